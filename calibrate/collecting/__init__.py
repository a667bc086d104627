"""Collecting: a head is run, and a sample of its rows is kept."""
