"""Rules for benchmarks: the paper's polynomial in the entropy, and a constant."""

import calibrate
from calibrate.evidence.baselines import one_constant

POLYNOMIAL = calibrate.load("paper")
CONSTANT = one_constant(2.0)
