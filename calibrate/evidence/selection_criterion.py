"""The criterion by which a rule is selected: a gain that is significant, and large enough.

The simplest candidate is taken that no other is significantly better than. Kinds of rules of a head
and families of rules of a model are selected by it alike.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

MIN_GAIN = 0.01  # nats: a user would not notice less
MIN_IMPROVEMENT = 0.001  # nats, of one kind of rule over a simpler one
# A rule of entropy and size extrapolates to pairs of them that no row had: it needs a larger gain.
MIN_IMPROVEMENT_OF_BOTH = MIN_GAIN
MIN_IMPROVEMENT_MODEL = 0.01  # nats, of one family of a model over a simpler one

T = TypeVar("T")


class Gain(NamedTuple):
    """Mean difference of log p under two rules, nats."""

    mean: float  # of the rows
    low: float  # of the 95 % interval, which includes pseudo-observations
    high: float
    p: float  # likewise, the two-sided p-value of no gain

    @property
    def significant(self) -> bool:
        """True if it is statistically significant, and large enough to notice."""
        return self.is_at_least(MIN_GAIN)

    def is_at_least(self, nats: float) -> bool:
        """True if it is statistically significant, and so many nats or more."""
        return self.low > 0 and self.mean >= nats


def min_improvement(depends_on_both: bool) -> float:
    """Nats by which a kind of rule, of entropy and size or not, has to lead a simpler one."""
    return MIN_IMPROVEMENT_OF_BOTH if depends_on_both else MIN_IMPROVEMENT


def simplest_unbeaten(
    candidates: Sequence[T],
    gain: Callable[[T, T | None], Gain],
    min_lead: Callable[[T], float],
) -> T | None:
    """The simplest candidate that no other is significantly better than; None for the baseline.

    Args:
      candidates: the simplest first.
      gain: of one held out over another, or over the baseline, which is None.
      min_lead: nats by which a candidate has to lead a simpler one.
    """
    best: T | None = None
    for candidate in candidates:
        least = MIN_GAIN if best is None else min_lead(candidate)
        if gain(candidate, best).is_at_least(least):
            best = candidate
    return best
