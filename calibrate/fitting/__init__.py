"""Fits to solved inputs: a rule of a head, or one for each head; `fit.py` names the steps."""
