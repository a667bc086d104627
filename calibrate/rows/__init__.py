"""Rows of logits: heads and arrays, collections, solved inputs, diagnosis and scores.

In the order of the work: a head (`heads.py`) draws inputs unit by unit (`units.py`), or a user
gives arrays (`logits_files.py`); `collect.py` plans a collection and makes its shards, and
`run_units` writes them resumably. `open_collection` opens it, and `solve_collection` finds the
optimal temperature of each input.
"""
