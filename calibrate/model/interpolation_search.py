"""Search for the largest interpolation weight of a rule whose losses are within their margins.

A model is near an optimum for text: at interpolation weight s a rule costs text at second order in
s, and gains at first. The weight is searched for in steps of 1 / N_PARTS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.evidence.non_inferiority import NonInferiorityResult
from calibrate.model.objective import Value
from calibrate.model.parameters import Parameters

N_PARTS = 64  # of interpolation weight 1
MAX_TRIALS = 5  # of weights
_NEAR = 0.9  # of the margin: no other weight is tried
_MIN_LOSS = 1e-12  # nats a token: what loses less may grow by as much as there is room for


@dataclass
class InterpolationSearch:
    """The state of the search for one rule; weights are in parts of 1."""

    parameters: Parameters
    part: int  # to be tried next
    low: int = 0  # the largest within the margins
    high: int = N_PARTS + 1  # the smallest beyond them
    results: list[NonInferiorityResult] | None = None  # at the largest
    n_trials: int = 0
    is_over: bool = False

    @property
    def weight(self) -> float:
        """The largest interpolation weight within the margins."""
        return self.low / N_PARTS

    @property
    def trial(self) -> Parameters:
        """The rule at the weight that is to be tried."""
        return self.parameters.interpolated(self.part / N_PARTS)

    def take(self, value: Value) -> None:
        """Takes the value at the weight that was tried, and chooses the next one."""
        loss, margin = value.limiting
        if value.is_allowed:
            self.low, self.results = self.part, value.results
        else:
            self.high = self.part
        self.n_trials += 1
        is_near = _NEAR * margin <= loss <= margin
        self.is_over = self.high - self.low == 1 or is_near or self.n_trials == MAX_TRIALS
        # The KL of text rises as the square of the weight; other costs may be linear in it.
        power = 1.0 if self.n_trials > 1 and not self.low else 0.5
        guess = self.part * (margin / max(loss, _MIN_LOSS)) ** power
        self.part = int(np.clip(guess, self.low + 1, max(self.high - 1, self.low + 1)))


def search_interpolation(
    parameters: Sequence[Parameters],
    predicted: float,
    evaluate: Callable[[Sequence[Parameters]], list[Value]],
) -> list[InterpolationSearch]:
    """The search for the weight of each rule, when all are over.

    Args:
      parameters: the rules, at interpolation weight 1.
      predicted: the weight that is tried first.
      evaluate: gives values by the constrained examples; called with all rules of a trial at once.
    """
    part = int(np.clip(N_PARTS * predicted, 1, N_PARTS))
    searches = [InterpolationSearch(x, part) for x in parameters]
    while active := [search for search in searches if not search.is_over]:
        values = evaluate([search.trial for search in active])
        for search, value in zip(active, values, strict=True):
            search.take(value)
    return searches
