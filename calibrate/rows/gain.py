"""The gain of one rule over another on held-out rows: its mean, 95 % interval and p-value.

A sample of N rows does not show failures that are rarer than 1 in N, and log p has no bound: a head
that is right in all of 100 rows looks as if it gained by any sharpening. So rules are fitted as if
there were m more, with the logits of the others and targets drawn from plain softmax, and the
lower end of an interval allows for them. They are the prior of a Dirichlet process (Ferguson 1973),
that the head is calibrated as it is: the posterior's mean is that of N + m rows, and its variance
counts what such targets may do. N counts groups, as all rows of a few may lack what others show; m
is 10, but N / 4 at most, so fits to few groups are less sharp. scripts/results/README.md shows what
other values do. Also where rows have sets of targets, plain softmax draws one item: such fits are
somewhat less sharp than they need be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calibrate.maths.rule import ENTROPY_AND_SIZE
from calibrate.rows.solved_rows import Rows
from calibrate.rows.weighting import MIN_EFFECTIVE, Strata, group_weights

PRIOR_ROWS = 10.0
MOST_PRIOR = 0.25  # of the number of groups
LEAST_GAIN = 0.01  # nats: a user would not notice less
LEAST_LEAD = 0.001  # nats, of one kind of rule over a simpler one
# A rule of entropy and size extrapolates to pairs of them that no row had: it has to be worth it.
LEAST_LEAD_OF_BOTH = LEAST_GAIN
CONFIDENCE = 0.95  # of an interval
CHANCE = (1 - CONFIDENCE) / 2  # that a gain of 0 lies below its interval


def least_lead(kind: str) -> float:
    """Nats by which a kind of rule has to lead a simpler one."""
    return LEAST_LEAD_OF_BOTH if kind == ENTROPY_AND_SIZE else LEAST_LEAD


class Scores(NamedTuple):
    """What rows are worth under a rule, (rows,) each."""

    beta: np.ndarray  # within the bounds
    log_p: np.ndarray  # nats
    expected: np.ndarray  # nats, the mean over targets drawn from plain softmax


class Gain(NamedTuple):
    """Mean difference of log p under two rules, sizes equal, in nats."""

    mean: float  # of the rows
    low: float  # the 95 % interval; its lower end allows for targets that the rows do not show
    high: float
    p: float  # likewise, the probability of such a mean if there were no gain

    @property
    def evident(self) -> bool:
        """Whether it is beyond chance, and large enough to notice."""
        return self.low > 0 and self.mean >= LEAST_GAIN

    def leads(self, kind: str) -> bool:
        """Whether it is beyond chance, and worth a rule of that kind in place of a simpler one."""
        return self.low > 0 and self.mean >= least_lead(kind)


@dataclass(frozen=True, eq=False)
class Evidence:
    """The rows that rules are compared on."""

    rows: Rows
    block: np.ndarray  # (rows,) rows of one block may be alike, those of different ones are not
    weight: np.ndarray  # (rows,) adding up to 1
    prior_rows: float = PRIOR_ROWS

    def score(self, beta: np.ndarray) -> Scores:
        """The rows' scores at a beta of each, (rows,)."""
        profile, plain_profile = self.rows.profile, self.rows.plain_profile
        beta = np.clip(beta, profile.low, profile.high)
        return Scores(beta, profile.log_p(beta), plain_profile.log_p(beta))

    def gain(self, rule: Scores, other: Scores) -> Gain:
        """The mean gain of a rule over another, in nats, and its interval by Student's t."""
        from scipy.special import stdtr, stdtrit

        values = self._strata.mean(rule.log_p - other.log_p)
        mean, error, n_blocks = (float(value) for value in values)
        error = error if n_blocks >= MIN_EFFECTIVE else np.inf
        both = np.array([[mean, error], self._posterior(rule, other, mean, error)])
        degrees = max(n_blocks, MIN_EFFECTIVE) - 1
        margin = both[:, 1] * stdtrit(degrees, 1 - CHANCE)
        low, high = (both[:, 0] - margin).min(), mean + margin[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.nan_to_num(both[:, 0] / both[:, 1], nan=0.0)
        return Gain(mean, float(low), float(high), float(stdtr(degrees, -t).max()))

    @cached_property
    def _strata(self) -> Strata:
        return Strata(self.rows, self.block)

    @cached_property
    def _prior(self) -> tuple[float, float]:
        return prior_share(group_weights(self.rows), self.prior_rows)

    def _posterior(
        self, rule: Scores, other: Scores, mean: float, error: float
    ) -> tuple[float, float]:
        """Mean and standard deviation of the gain, given those of the rows alone."""
        expected = rule.expected - other.expected
        prior_mean = float(self.weight @ expected)
        # Of a target drawn from plain softmax, the difference is (beta - beta') z + constant.
        drawn = (rule.beta - other.beta) ** 2 * self.rows.variance
        prior_variance = self.weight @ ((expected - prior_mean) ** 2 + drawn)
        share, n = self._prior
        between = share * (1 - share) * (mean - prior_mean) ** 2
        variance = ((1 - share) * error) ** 2 + (share * prior_variance + between) / (n + 1)
        return (1 - share) * mean + share * prior_mean, float(np.sqrt(variance))


def prior_share(weight: np.ndarray, prior_rows: float) -> tuple[float, float]:
    """The share m / (N + m) of m more rows, and N + m.

    N is the effective number of groups, 1 / sum of (groups,) weight^2, and m is `prior_rows`, but
    a quarter of N at most, or few groups would never outweigh them.
    """
    n = float(1 / (weight @ weight))
    m = min(prior_rows, n * MOST_PRIOR)
    return m / (n + m), n + m


def evident_among(p: Sequence[float]) -> list[bool]:
    """Which of many p-values are evident at a false-discovery rate of 2.5 %.

    By Benjamini and Hochberg (1995).
    """
    from scipy.stats import false_discovery_control

    return [bool(corrected <= CHANCE) for corrected in false_discovery_control(p)]
