"""Rules for benchmarks: a polynomial in the entropy, one with terms of the set size, a constant."""

import math

import calibrate
from calibrate.core.rule import ENTROPY_AND_SIZE, Rule
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

_PAPER = calibrate.load("paper").only
_SIZES = (math.log(16), math.log(4096))  # benchmarks have more items too: beta goes on, with H
FITS = {  # the first is what the others are compared with
    "by entropy": Coefficients(Rule(), (Entry(_PAPER.coefficients, _PAPER.domain),)),
    "by entropy and size": Coefficients(
        Rule(kind=ENTROPY_AND_SIZE),
        (Entry((*_PAPER.coefficients, 0.01, -0.005, 0.1), (*_PAPER.domain, *_SIZES)),),
    ),
    "constant": Coefficients(Rule(0.0), (Entry((0.0, 0.0, 0.0, 0.0, 2.0), _PAPER.domain),)),
}
