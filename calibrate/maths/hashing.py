"""Hashing of row numbers: samples that do not depend on the order of work."""

import numpy as np


def hashes(index: np.ndarray) -> np.ndarray:
    """uint64 of non-negative integers by SplitMix64's finaliser: every bit moves every bit."""
    x = np.asarray(index).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
