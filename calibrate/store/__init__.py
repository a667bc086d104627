"""Coefficient files and the store that publishes, versions and loads them."""
