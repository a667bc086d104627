"""The numbers of rules on the heads of a model, found by gradient: most heads stay as they are.

Steps are Adam's (Kingma and Ba 2015), with one scale a head, and a penalty on the length of each
head's numbers takes back what its gradient does not ask for (proximal steps of a group lasso, Yuan
and Lin 2006). Heads that gained little, by the gradient at a step times the last move, whose noise
is of other examples, are dropped in the end while nothing is lost by it.
"""

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from calibrate.export.plan import ALIKE
from calibrate.files.coefficients import Coefficients
from calibrate.model.forms import Form, Head
from calibrate.model.objective import Multipliers, Objective, Value
from calibrate.model.passes import Passes
from calibrate.model.splits import Schedule

RATE, SHARED_RATE = 0.04, 0.06  # of a step of beta; of one that all heads share
PENALTY = 0.003  # nats for a unit of beta of one head
STEPS_TO_A_CHECK = 10
MOST_STEPS = 100
_DECAY, _DECAY_OF_SCALE, _TINY = 0.9, 0.98, 1e-8
_SHARES_OF_THE_WAY = (0.5, 0.4)  # back to the best point, while a constraint is broken
PASSES_OF_A_CHECK = 1 + len(_SHARES_OF_THE_WAY)
_HALVINGS = 3  # of the rate, each when a check finds no gain; then it is over
_LEAST_RISE = 0.002  # nats from one check to the next
_KEPT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the heads that changed


class Solution(NamedTuple):
    """Numbers of a form, and what they are worth on the examples that choose."""

    form: Form
    numbers: np.ndarray
    value: Value

    def heads_changed(self, heads: list[Head]) -> list[Head]:
        """The heads of a model whose beta is not 1, or not what all have in common."""
        return self.form.heads_changed(self.numbers, heads)

    def fit(self, heads: list[Head]) -> Coefficients | None:
        """The rules of the heads of a model; None where beta is 1 on all."""
        return self.form.fit(self.numbers, heads)


@dataclass(frozen=True, eq=False)
class Descent:
    """The best numbers of one form."""

    passes: Passes
    objective: Objective
    schedule: Schedule  # the examples of each step
    choosing: list[int]  # the examples that checks look at
    most_steps: int  # of a form

    def work(self, form: Form) -> list[list[int]]:
        """The examples of every pass that a descent may take."""
        checks = -(-self.most_steps // STEPS_TO_A_CHECK)
        passes = 1 + checks * PASSES_OF_A_CHECK + (0 if form.of == ALIKE else len(_KEPT_SHARES))
        return [*islice(self.schedule, self.most_steps), *[self.choosing] * passes]

    def at(self, form: Form, numbers: np.ndarray) -> Solution:
        """Numbers, scored."""
        scores = self.passes.scores(form, numbers, self.choosing)
        return Solution(form, numbers, self.objective.value(self.choosing, scores))

    def run(self, start: Solution) -> Solution:
        """The best allowed numbers that it comes by."""
        form, best, halvings = start.form, start, 0
        walk = _Walk(form, start.numbers, Multipliers(self.objective))
        for number, which in enumerate(islice(self.schedule, self.most_steps), 1):
            weights = walk.multipliers.weights(which, self.schedule.n_answers)
            walk.step(self.passes.gradient(form, walk.numbers, which, weights))
            if number % STEPS_TO_A_CHECK and number != self.most_steps:
                continue
            here = self.at(form, walk.numbers)
            walk.multipliers.adapt(here.value)
            found = self._allowed_towards(best, here)
            rise = found.value.gain - best.value.gain
            best = found if rise > 0 else best
            if rise < _LEAST_RISE:
                if halvings == _HALVINGS:
                    break
                halvings += 1
                walk.slow_down()
            if best is not here:
                walk.back_to(best.numbers)
        return best if form.of == ALIKE else self._fewest(best, walk.gained)

    def _allowed_towards(self, best: Solution, here: Solution) -> Solution:
        """The point itself, or one on the way to it that breaks no constraint; else the best."""
        for share in _SHARES_OF_THE_WAY:
            if here.value.is_allowed:
                return here
            here = self.at(here.form, best.numbers + share * (here.numbers - best.numbers))
        return here if here.value.is_allowed else best

    def _fewest(self, best: Solution, gained: np.ndarray) -> Solution:
        """The one with the fewest layers or heads that is as good within its standard error."""
        changed = best.form.changed(best.numbers)
        order = changed[np.argsort(-gained[changed], kind="stable")]
        for share in _KEPT_SHARES:
            n_kept = int(np.ceil(share * len(order)))
            if not 0 < n_kept < len(order):
                continue
            numbers = best.numbers.copy()
            numbers[:, order[n_kept:]] = 0
            fewer = self.at(best.form, numbers)
            lead = best.value.over(fewer.value)
            error = np.nan_to_num(lead.error, nan=np.inf)
            if fewer.value.is_allowed and lead.mean <= min(error, best.value.gain / 20):
                return fewer
        return best


class _Walk:
    """Where a descent is."""

    def __init__(self, form: Form, start: np.ndarray, multipliers: Multipliers):
        self.numbers, self.multipliers = start, multipliers
        self.gained = np.zeros(start.shape[1])  # nats, of each head
        is_common = form.is_common(start)
        self._within = form.within
        self._rate = np.where(is_common, SHARED_RATE, RATE)
        self._penalty = np.where(is_common, 0.0, PENALTY)
        self._mean, self._square = np.zeros_like(start), np.zeros(start.shape[1])
        self._last_move, self._count = np.zeros_like(start), 0

    def step(self, gradient: np.ndarray) -> None:
        """Goes a step uphill."""
        self.gained = self.gained + (gradient * self._last_move).sum(axis=0)
        self._count += 1
        self._mean = _DECAY * self._mean + (1 - _DECAY) * gradient
        square = (gradient**2).mean(axis=0)
        self._square = _DECAY_OF_SCALE * self._square + (1 - _DECAY_OF_SCALE) * square
        scale = np.sqrt(self._square / (1 - _DECAY_OF_SCALE**self._count)) + _TINY
        moved = self.numbers + self._rate * self._mean / (1 - _DECAY**self._count) / scale
        length = np.sqrt((moved**2).sum(axis=0))
        left = 1 - self._rate * self._penalty / scale / np.maximum(length, _TINY)
        moved = self._within(moved * np.maximum(0.0, left))
        self._last_move, self.numbers = moved - self.numbers, moved

    def back_to(self, numbers: np.ndarray) -> None:
        """Goes on from there."""
        self.numbers, self._last_move = numbers, np.zeros_like(numbers)

    def slow_down(self) -> None:
        """Goes on in steps of half the size."""
        self._rate = self._rate / 2
