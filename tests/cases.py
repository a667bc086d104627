"""One table of cases that every backend's softmax meets: logits, mask, and what they are about."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import reference
from attention_cases import BY_BOTH, BY_SIZE
from scipy.optimize import brentq

from calibrate.core.rule import ENTROPY_AND_SIZE, RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, identity

DOMAIN = (1.0, 4.0)
CONSTANT = Fit(RuleForm.constant(), (Entry((1.7,)),))
POWERS = (0.02, -0.2, 0.5, 0.6, 0.4)
LINE = Entry((0.35, 0.2), (1.0, 7.0))
FALLING_LINE = Entry((-0.35, 2.0), (0.5, 5.0))
# Made of sets of 5 to 403 items; beyond them beta rises where H > 2.6 alone.
SURFACE = Entry((*POWERS, 0.05, -0.04, 0.35), (*DOMAIN, 1.5, 6.0))
FALLING_SURFACE = Entry((*POWERS, -0.04, 0.01, -0.05), (*DOMAIN, 2.0, 5.0))
# p(H) is between 1.3 and 2.2 on the domain: every threshold is a jump or a bend of beta.
FITS = {
    "constant": CONSTANT,
    "constant, low ceiling": Fit(RuleForm.constant(0.1, 1.5), (Entry((1.7,)),)),
    "clamp": Fit(RuleForm(), (Entry(POWERS, DOMAIN),)),
    "identity outside": Fit(RuleForm(outside="identity"), (Entry(POWERS, DOMAIN),)),
    "low ceiling": Fit(RuleForm(0.1, 1.0, 1.5), (Entry(POWERS, DOMAIN),)),
    "log size": Fit(RuleForm.log_size(), (LINE,)),
    "falling, low ceiling": Fit(RuleForm.log_size(0.1, 1.5), (FALLING_LINE,)),
    "entropy and size": Fit(RuleForm(kind=ENTROPY_AND_SIZE), (SURFACE,)),
    "both, low ceiling": Fit(RuleForm(0.1, 0.2, 1.5, kind=ENTROPY_AND_SIZE), (FALLING_SURFACE,)),
    "softer": Fit(RuleForm(0.1, 0.2, 1.0), (Entry((0.0, 0.0, 0.0, 0.1, 0.1), DOMAIN),)),
}


# Smooth: derivatives are compared with differences.
SMOOTH = Fit(RuleForm(0.0), (Entry((0.01, -0.1, 0.2, 0.7, 0.6), (0.2, 5.0)),))
SMOOTH_FITS = {"constant": CONSTANT, "polynomial": SMOOTH, "log size": BY_SIZE, "both": BY_BOTH}
# The rules of the first head and of another.
HEAD_RULES = {
    "constant": (CONSTANT.rule, CONSTANT.only, Entry((2.3,))),
    "polynomial": (
        RuleForm(), Entry((0.0, 0.0, 0.0, 0.0, 3.0), (0.2, 4.0)),
        Entry((0.0, 0.0, 0.0, 0.5, 1.0), (0.2, 4.0)),
    ),
    "log size": (BY_SIZE.rule, BY_SIZE.only, Entry((0.0, 3.0), (1.0, 8.0))),
    "both": (
        BY_BOTH.rule, BY_BOTH.only,
        Entry((0.0, 0.0, 0.0, 0.3, 2.0, 0.1, 0.0, 0.2), (0.1, 2.0, 0.5, 1.5)),
    ),
}  # fmt: skip


def per_head(kind="polynomial"):
    """Heads 0 and 2 calibrated; and the fits of each of four heads alone."""
    rule, one, two = HEAD_RULES[kind]
    fit = Fit(rule, (replace(one, head=0), replace(two, head=2)))
    first, second = (Fit(rule, (entry,)) for entry in (one, two))
    return fit, [first, identity(), second, identity()]


class Case(NamedTuple):
    name: str
    logits: np.ndarray  # (rows, n) float32
    where: np.ndarray | None = None  # bool, broadcastable

    def expected(self, fit, dtype="float32"):
        """Probabilities in float64, of the logits as that dtype holds them."""
        logits = self.logits.astype(dtype).astype(np.float64)
        entry = fit.only
        return reference.adaptive_softmax(
            logits, entry.coefficients, entry.domain, fit.rule, where=self.where
        )


def _normal(n, scale, rows=3, seed=0):
    rng = np.random.default_rng([seed, n])
    return (rng.standard_normal((rows, n)) * scale).astype(np.float32)


def with_entropy(H, n=300):
    """Rows of logits whose softmax has that entropy, to 1e-6 nats."""
    z = _normal(n, 1.0, rows=1, seed=7).astype(np.float64)
    scale = brentq(lambda scale: reference.entropy(scale * z)[0] - H, 0, 1e3, xtol=1e-14)
    return np.repeat(scale * z, 3, axis=0).astype(np.float32)


def _masks():
    logits, real = _normal(300, 2.0), np.arange(300) < np.full((3, 1), 200)
    yield Case("where", logits, real)
    yield Case("where over hot items", np.where(real, logits, np.float32(1e4)), real)
    yield Case("where over NaN", np.where(real, logits, np.float32("nan")), real)
    for mask in (-np.inf, np.finfo(np.float32).min, -1e9, -1e4):
        yield Case(f"additive {mask:.0e}", np.where(real, logits, np.float32(mask)))
    yield Case("per row", logits, np.arange(300) < np.array([[1], [2], [299]]))
    yield Case("a row of none", logits, np.arange(300) < np.array([[0], [2], [300]]))
    more = np.arange(300) < np.full((3, 1), 250)
    yield Case("both", np.where(real, logits, np.float32(-np.inf)), more)


# Few shapes, as each takes a compilation.
CASES = [
    *(Case(f"n={n} scale={scale:g}", _normal(n, scale, rows=1 if n > 9_999 else 3))
      for n in (1, 3, 300, 65_536) for scale in (1e-6, 0.1, 1.0, 5.0, 100.0, 1e4)),
    *_masks(),
    *(Case(f"H={H:g}", with_entropy(H))
      for threshold in (0.1, 0.5, *DOMAIN) for H in (threshold - 1e-3, threshold + 1e-3)),
    Case("ends of float32", np.array([[3e38, -3e38, 0.0], [-3e38] * 3, [3e38] * 3], np.float32)),
    Case("equal", np.full((3, 300), 5.0, np.float32)),
]  # fmt: skip
