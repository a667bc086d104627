"""Fits of the rules of a whole model, through the model."""
