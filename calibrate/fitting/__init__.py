"""Fitting: from collected rows to a calibrated rule and its evidence."""
