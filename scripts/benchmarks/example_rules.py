"""Rules for benchmarks: a polynomial in the entropy, one with terms of the set size, a constant."""

import math

import calibrate
from calibrate.core.rule import ENTROPY_AND_SIZE, Rule
from calibrate.evidence.baselines import one_constant
from calibrate.store.coefficient_file import Entry
from calibrate.store.fit import Fit

_PAPER = calibrate.load("paper").only
_SIZES = (math.log(16), math.log(4096))  # benchmarks have more items too: beta goes on, with H
FITS = {  # the first is what the others are compared with
    "by entropy": Fit(Rule(), (Entry(_PAPER.coefficients, _PAPER.domain),)),
    "by entropy and size": Fit(
        Rule(kind=ENTROPY_AND_SIZE),
        (Entry((*_PAPER.coefficients, 0.01, -0.005, 0.1), (*_PAPER.domain, *_SIZES)),),
    ),
    "constant": one_constant(2.0),
}
