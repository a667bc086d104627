"""Fits to solved inputs, of one head or of each; `fit_collection.py` names the steps."""
