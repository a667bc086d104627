"""Families of rules for two layers of four heads, and numbers of each."""

import numpy as np

from calibrate.core.rule import CONSTANT, KINDS, Sharing
from calibrate.model.parameters import SHARED_SLOPE, Basis, Parameters, RuleFamily

GLOBAL = Sharing.GLOBAL
PER_LAYER = Sharing.PER_LAYER
PER_HEAD = Sharing.PER_HEAD
HEADS = [(layer, head) for layer in range(2) for head in range(4)]


def family(kind, sharing, center=3.0, largest=4.0):
    return RuleFamily(Basis(kind, center, largest), sharing)


FAMILIES = [family(k, sharing) for k in (*KINDS, SHARED_SLOPE) for sharing in (GLOBAL, PER_HEAD)]
FAMILIES += [family(kind, PER_LAYER) for kind in (CONSTANT, SHARED_SLOPE)]
CONSTANTS = family(CONSTANT, GLOBAL)


def some_parameters(family, scale=1.0):
    rng = np.random.default_rng(5)
    numbers = 0.1 * rng.standard_normal(family.zeros(HEADS).shape)
    numbers[-1, -1] = abs(numbers[-1, -1])  # it may be the slope, which may not fall
    return Parameters(family, family.clip_to_feasible(scale * numbers))
