"""The rule as the ground floor: its equation, its kinds, masks; NumPy alone."""
