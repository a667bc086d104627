"""The rule: its equation and kinds, masked items, and rows of logits; NumPy alone."""
