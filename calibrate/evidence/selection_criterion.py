"""The criterion by which a rule is selected: a gain that is significant, and large enough.

The simplest candidate is taken that no other is significantly better than.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from calibrate.evidence.publish_threshold import MIN_GAIN

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
