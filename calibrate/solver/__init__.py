"""Optimal beta of each row of logits, and the likelihood of each row as a function of beta."""
