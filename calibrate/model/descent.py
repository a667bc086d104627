"""The numbers of rules on the heads of a model, found by gradient: most heads stay as they are.

Beside protected text they go along one gradient, that of plain softmax, divided by the curvature of
the KL of text: a model is near an optimum for text, so that a share s of the way costs text at
second order in s, and gains at first. What is protected then bounds the strength.

Without text they are searched for, in steps of Adam (Kingma and Ba 2015) with one scale a head. A
penalty on the length of each head's numbers takes back what its gradient does not ask for (proximal
steps of a group lasso, Yuan and Lin 2006). Heads that gained little, by the gradient at a step
times the last move, whose noise is of other examples, are dropped in the end while nothing is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.export.plan import ALIKE
from calibrate.files.coefficients import Coefficients
from calibrate.files.examples import Scores
from calibrate.model.forms import ONE_RATIO, Form, Head
from calibrate.model.objective import Objective, Value
from calibrate.model.splits import Schedule

RATE, SHARED_RATE = 0.04, 0.06  # of a step of beta; of one that all heads share
PENALTY = 0.003  # nats for a unit of beta of one head
STEPS_TO_A_CHECK = 10
MOST_STEPS = 100
_DECAY, _DECAY_OF_SCALE, _TINY = 0.9, 0.98, 1e-8
_HALVINGS = 3  # of the rate, each when a check finds no gain; then it is over
_SHARED_HALVINGS = 1  # of numbers that all heads share: their gradient has little noise
_LEAST_RISE = 0.002  # nats from one check to the next
_KEPT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the heads that changed
FULL_KL = 0.04  # nats a token that text would lose at full strength, by its curvature
PARTS = 64  # parts of full strength
_TRIALS = 6  # of strengths, at most
_NEAR = 0.9  # of what is allowed: no other strength is tried


class Solution(NamedTuple):
    """Numbers of a form, and what they are worth on the examples that choose."""

    form: Form
    numbers: np.ndarray  # at full strength
    value: Value
    strength: float = 1.0
    full: Value | None = None  # of the answers at full strength, once the strength is chosen

    def at(self, strength: float) -> np.ndarray:
        """The numbers at a strength, 1 being full."""
        return self.form.within(strength * self.numbers)

    def heads_changed(self, heads: list[Head]) -> list[Head]:
        """The heads of a model whose beta is not 1, or not what all have in common."""
        return self.form.heads_changed(self.at(self.strength), heads)

    def fit(self, heads: list[Head], strength: float | None = None) -> Coefficients | None:
        """The rules of the heads of a model; None where beta is 1 on all."""
        return self.form.fit(self.at(self.strength if strength is None else strength), heads)


class Scorer(Protocol):
    """What runs a model on examples, by their numbers."""

    @property
    def heads(self) -> list[Head]:
        """The heads of the model."""

    def scores(self, form: Form, numbers: np.ndarray, which: Sequence[int]) -> Scores:
        """Scores of some examples under the rules of a form."""

    def gradient(
        self, form: Form, numbers: np.ndarray, which: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) of answers by the numbers."""

    def drawn(self, form: Form, numbers: np.ndarray, which: Sequence[int]) -> np.ndarray:
        """(windows, rows, columns), whose squares add up to the second derivatives of the KL of
        text, nats a token.
        """

    def score_fits(
        self, fits: Mapping[str, Coefficients], which: Sequence[int]
    ) -> dict[str, Scores]:
        """Scores of some examples under fits."""


@dataclass(frozen=True, eq=False)
class Descent:
    """The best numbers of one form."""

    passes: Scorer
    objective: Objective
    schedule: Schedule  # the examples of each step
    choosing: list[int]  # the examples that checks look at
    most_steps: int  # of a form
    strength: float | None = None  # None: the largest that what is protected allows
    _at_plain: dict[Form, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def work(self, form: Form) -> list[list[int]]:
        """The examples of every pass that a descent may take."""
        trials = [self._protected] * (_TRIALS if self.strength is None else 0)
        if self.goes_by_text(form):
            at_plain = [] if form.whole in self._at_plain else [*self._first_steps, self._text]
            return [*at_plain, *[self._answers] * 2, *trials]
        checks = -(-self.most_steps // STEPS_TO_A_CHECK)
        passes = 2 + checks + (0 if form.of == ALIKE else len(_KEPT_SHARES))
        steps = islice(self.schedule, self.most_steps)
        return [*steps, *[self._answers] * passes, *trials]

    def plain(self, form: Form) -> Solution:
        """Plain softmax, whose scores are known."""
        value = self.objective.value(self._answers, self.objective.plain.at(self._answers))
        return Solution(form, form.zeros(self.passes.heads), value)

    def at(self, form: Form, numbers: np.ndarray, strength: float = 1.0) -> Solution:
        """Numbers at a strength, scored by the answers alone."""
        value = self._value(form, form.within(strength * numbers), self._answers)
        return Solution(form, numbers, value, strength)

    def goes_by_text(self, form: Form) -> bool:
        """Whether a form's numbers go along the gradient of plain softmax, wherever they start."""
        return bool(self._text) and form.kind != ONE_RATIO

    @property
    def _first_steps(self) -> Iterator[list[int]]:
        return islice(self.schedule, min(self.most_steps, self.schedule.n_once))

    def _value(self, form: Form, numbers: np.ndarray, which: list[int]) -> Value:
        return self.objective.value(which, self.passes.scores(form, numbers, which))

    @cached_property
    def _answers(self) -> list[int]:
        return self._choosing(~self.objective.is_text)

    @cached_property
    def _text(self) -> list[int]:
        return self._choosing(self.objective.is_text)

    @cached_property
    def _protected(self) -> list[int]:
        cells = [cell for part in self.objective.protected for cell in part]
        return self._choosing(np.isin(np.arange(len(self.objective.is_text)), cells))

    def _choosing(self, cells: np.ndarray) -> list[int]:
        """The choosing examples of some cells, (cells,) bool."""
        return [i for i in self.choosing if cells[self.objective.cell[i]]]

    def run(self, start: Solution) -> Solution:
        """The best numbers that it comes by, at the largest strength that is allowed."""
        form, best = start.form, start
        if self.goes_by_text(form):
            found = self._allowed(self._along_gradient(start))
            gains = found.value.gain >= 0 or not found.strength
            return found if gains else self.plain(form)
        halvings = _SHARED_HALVINGS if form.of == ALIKE else _HALVINGS
        walk = _Walk(form, start.numbers)
        for number, which in enumerate(islice(self.schedule, self.most_steps), 1):
            weights = np.full(len(which), 1 / self.schedule.n_answers)
            walk.step(self.passes.gradient(form, walk.numbers, which, weights))
            if number % STEPS_TO_A_CHECK and number != self.most_steps:
                continue
            here = self.at(form, walk.numbers)
            rise = here.value.gain - best.value.gain
            best = here if rise > 0 else best
            if rise < _LEAST_RISE:
                if not halvings:
                    break
                halvings -= 1
                walk.slow_down()
            if best is not here:
                walk.back_to(best.numbers)
        return self._allowed(best if form.of == ALIKE else self._fewest(best, walk.gained))

    def _along_gradient(self, start: Solution) -> Solution:
        """Numbers along the gradient of plain softmax, over the curvature of the KL of text."""
        form, heads = start.form, self.passes.heads
        if form.whole not in self._at_plain:
            self._at_plain[form.whole] = self._derivatives(form.whole)
        gradients, drawn = (form.contained(x, heads) for x in self._at_plain[form.whole])
        curvature = np.einsum("wrc,wsc->crs", drawn, drawn)
        numbers = along(without_noise(gradients), curvature, FULL_KL)
        return start if numbers is None else self.at(form, numbers)

    def _derivatives(self, form: Form) -> tuple[np.ndarray, np.ndarray]:
        """At plain softmax: the gradient of the answers of each step, and what `drawn` gives."""
        plain, n_answers = form.zeros(self.passes.heads), self.schedule.n_answers
        gradients = [
            self.passes.gradient(form, plain, which, np.full(len(which), 1 / n_answers))
            for which in self._first_steps
        ]
        return np.array(gradients), self.passes.drawn(form, plain, self._text)

    def _allowed(self, found: Solution) -> Solution:
        """The same numbers at the strength that is wanted, or the largest that is allowed."""
        form, numbers = found.form, found.numbers
        if self.strength is not None:
            return self.at(form, numbers, self.strength)._replace(full=found.value)
        if not self._protected:
            return found._replace(full=found.value)
        share = np.sqrt(self.objective.allowed / FULL_KL) if self.goes_by_text(form) else 1.0
        low, high, part = 0, PARTS + 1, int(np.clip(PARTS * share, 1, PARTS))
        losses = list[Estimate]()
        for trial in range(_TRIALS):
            value = self._value(form, found.at(part / PARTS), self._protected)
            if value.is_allowed:
                low, losses = part, value.losses
            else:
                high = part
            if high - low == 1 or _NEAR * value.allowed <= value.lost <= value.allowed:
                break
            # The KL of text rises as the square of the strength; other costs may be linear in it.
            power = 1.0 if trial and not low else 0.5
            guess = part * (value.allowed / max(value.lost, 1e-12)) ** power
            part = int(np.clip(guess, low + 1, high - 1))
        chosen = found if low == PARTS else self.at(form, numbers, low / PARTS)
        value = replace(chosen.value, losses=losses or chosen.value.losses)
        return chosen._replace(value=value, full=found.value)

    def at_full(self, found: Solution) -> Value:
        """What numbers are worth at full strength, with what is protected."""
        value = self._value(found.form, found.at(1.0), self._protected)
        return replace(found.full or found.value, losses=value.losses)

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
            if lead.mean <= min(error, best.value.gain / 20):
                return fewer
        return best


def without_noise(gradients: np.ndarray) -> np.ndarray:
    """The mean of gradients, (steps, ...), each number shrunk by what is noise in its square."""
    mean = np.array(gradients.mean(axis=0))
    if len(gradients) == 1:
        return mean
    noise = gradients.var(axis=0, ddof=1) / len(gradients)
    return np.array(mean * np.maximum(0.0, 1 - noise / np.maximum(mean**2, _TINY**2)))


def along(gradient: np.ndarray, curvature: np.ndarray, cost: float) -> np.ndarray | None:
    """The numbers that gain most at first order, of those that cost so much at second order.

    The median curvature of all columns is added to that of each: some heads have next to none, and
    no step is that long.

    Args:
      gradient: (rows, columns).
      curvature: (columns, rows, rows), second derivatives of the cost.
      cost: of the numbers, above 0.
    Returns:
      (rows, columns); None if the gradient is 0, or nothing costs.
    """
    typical = np.median(np.diagonal(curvature, axis1=1, axis2=2), axis=0)
    ridge = curvature + np.diag(np.maximum(typical, _TINY))
    step = np.linalg.solve(ridge, gradient.T[:, :, None])  # (columns, rows, 1)
    costs = float((step.mT @ curvature @ step).sum()) / 2
    if costs <= 0:
        return None
    return np.array(step[:, :, 0].T * np.sqrt(cost / costs))


class _Walk:
    """Where a descent is."""

    def __init__(self, form: Form, start: np.ndarray):
        self.numbers = start
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
