"""Examples of a language model: from a file of prompts, the built-in task, or plain text.

`examples.py` has the record of an example and the collection on disk, `make_examples.py` calls the
three sources, and `encoding.py` turns text into token ids.
"""
