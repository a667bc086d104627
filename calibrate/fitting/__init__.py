"""Fitting rules to solved rows."""
