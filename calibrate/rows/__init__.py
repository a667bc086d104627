"""Rows: heads and logits, collected, solved, fitted to a rule, scored and diagnosed."""
