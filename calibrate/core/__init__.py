"""The rule as the ground floor: its equation, its kinds, masks, entropy; NumPy and JAX alone."""
