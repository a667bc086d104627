"""Families of rules for two layers of four heads, and numbers of each."""

import numpy as np

from calibrate.core.rule import CONSTANT, KINDS, Sharing
from calibrate.model.parameters import Parameters, RuleFamily

GLOBAL = Sharing.GLOBAL
PER_LAYER = Sharing.PER_LAYER
PER_HEAD = Sharing.PER_HEAD
HEADS = [(layer, head) for layer in range(2) for head in range(4)]


def family(kind, sharing, center=3.0, largest=4.0):
    return RuleFamily(kind, sharing, center, largest)


FAMILIES = [family(kind, sharing) for kind in KINDS for sharing in (GLOBAL, PER_HEAD)]
FAMILIES += [family(CONSTANT, PER_LAYER)]
CONSTANTS = family(CONSTANT, GLOBAL)


def some_parameters(family, scale=1.0):
    rng = np.random.default_rng(5)
    return Parameters(family, 0.1 * scale * rng.standard_normal(family.zeros(HEADS).shape))
