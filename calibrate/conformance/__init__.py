"""Test vectors of adaptive softmax, and the check of somebody else's function with them.

`vectors.json` has the vectors, `vectors.py` reads them, `mistakes.py` makes the common mistakes on
purpose, and `check_softmax.py` compares a function with them and names its faults.
"""
