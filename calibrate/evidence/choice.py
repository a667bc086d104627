"""The choice among rules: the simplest that no other one leads, for rows and for models."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from calibrate.evidence.prior import LEAST_GAIN, Gain

Candidate = TypeVar("Candidate")


def simplest_unbeaten(
    candidates: Sequence[Candidate],
    gain: Callable[[Candidate, Candidate | None], Gain],
    least_lead: Callable[[Candidate], float],
) -> Candidate | None:
    """The simplest candidate that no other leads; None if none evidently beats plain softmax.

    Args:
      candidates: the simplest first.
      gain: of one held out over another, or over plain softmax, which is None.
      least_lead: nats by which a candidate has to lead a simpler one.
    """
    best: Candidate | None = None
    for candidate in candidates:
        least = LEAST_GAIN if best is None else least_lead(candidate)
        if gain(candidate, best).is_at_least(least):
            best = candidate
    return best
