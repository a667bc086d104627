"""Evaluation: how good fits are, and which heads are worth one."""
