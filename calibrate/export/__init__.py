"""Fits written into checkpoints, for engines that know nothing of calibrate."""
