"""Rows of logits: heads and arrays that give them, their collection, and rules scored on them."""
