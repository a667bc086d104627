"""Coefficient files, and the store that saves, versions and loads them."""
