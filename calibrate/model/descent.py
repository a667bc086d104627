"""The numbers of rules on the heads of a model, found by gradient: most heads stay as they are.

Beside protected text they go along one gradient, that of the baseline, divided by the curvature of
the KL of text: a model is near an optimum for text, so that a share s of the way costs text at
second order in s, and gains at first. What is protected then bounds the strength.

Without text they are searched for, in the steps of `adam.py`. Heads that gained little, by the
gradient at a step times the last move, whose noise is of other examples, are dropped in the end
while nothing is lost.
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
from calibrate.model.adam import Walk
from calibrate.model.forms import ONE_RATIO, Form, Head
from calibrate.model.objective import Objective, Value
from calibrate.model.splits import Schedule

STEPS_TO_A_CHECK = 10
MOST_STEPS = 100
_TINY = 1e-8
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

    def at(self, strength: float) -> np.ndarray:
        """The numbers at a strength, 1 being full."""
        return self.form.within(strength * self.numbers)

    def heads_changed(self, heads: list[Head]) -> list[Head]:
        """The heads of a model whose beta is not 1, or not what all have in common."""
        return self.form.heads_changed(self.at(self.strength), heads)

    def fit(self, heads: list[Head], strength: float | None = None) -> Coefficients | None:
        """The rules of the heads of a model; None where beta is 1 on all."""
        return self.form.fit(self.at(self.strength if strength is None else strength), heads)


Rules = tuple[Form, np.ndarray]  # a form, and its numbers at full strength


class Scorer(Protocol):
    """What runs a model on examples; `Passes` says what each method gives."""

    @property
    def heads(self) -> list[Head]: ...

    def gradient(
        self, form: Form, numbers: np.ndarray, which: Sequence[int], weights: np.ndarray
    ) -> np.ndarray: ...

    def drawn(self, form: Form, numbers: np.ndarray, which: Sequence[int]) -> np.ndarray: ...

    def score_fits(
        self, fits: Mapping[str, Coefficients], which: Sequence[int]
    ) -> dict[str, Scores]: ...


@dataclass
class _Trials:
    """A search for the largest part of full strength that is allowed."""

    rule: Rules
    part: int  # to be tried next
    low: int = 0  # the largest that is allowed
    high: int = PARTS + 1  # the least that is not
    losses: list[Estimate] | None = None  # at the largest
    n: int = 0
    over: bool = False

    def take(self, value: Value) -> None:
        """Takes what the part is worth."""
        if value.is_allowed:
            self.low, self.losses = self.part, value.losses
        else:
            self.high = self.part
        self.n += 1
        near = _NEAR * value.bound <= value.lost <= value.bound
        self.over = self.high - self.low == 1 or near or self.n == _TRIALS
        # The KL of text rises as the square of the strength; other costs may be linear in it.
        power = 1.0 if self.n > 1 and not self.low else 0.5
        guess = self.part * (value.bound / max(value.lost, 1e-12)) ** power
        self.part = int(np.clip(guess, self.low + 1, max(self.high - 1, self.low + 1)))


@dataclass(frozen=True, eq=False)
class Descent:
    """The best numbers of forms."""

    passes: Scorer
    objective: Objective
    schedule: Schedule  # the examples of each step
    choosing: list[int]  # the examples that checks look at
    most_steps: int  # of a form
    strength: float | None = None  # None: the largest that what is protected allows
    _at_plain: dict[Form, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def work(self, forms: Sequence[Form]) -> list[list[int]]:
        """The examples of every pass that a descent to these forms may take."""
        units = self.objective.examples.units
        answers, trials = units(self._answers), units(self._protected)
        trials *= _TRIALS if self.strength is None else 0
        made, passes = set(self._at_plain), list[list[int]]()
        for form in forms:
            passes += trials
            if self.goes_by_text(form):
                passes += [] if form.whole in made else [*self._first_steps, self._text]
                passes += answers
                made.add(form.whole)
                continue
            checks = -(-self.most_steps // STEPS_TO_A_CHECK)
            n_scored = 2 + checks + (0 if form.of == ALIKE else len(_KEPT_SHARES))
            passes += [*islice(self.schedule, self.most_steps), *answers * n_scored]
        return passes

    def plain(self, form: Form) -> Solution:
        """The baseline, whose scores are known."""
        value = self.objective.value(self._answers, self.objective.plain.at(self._answers))
        return Solution(form, form.zeros(self.passes.heads), value)

    def at(self, form: Form, numbers: np.ndarray, strength: float = 1.0) -> Solution:
        """Numbers at a strength, scored by the answers alone."""
        value = self._value(form, form.within(strength * numbers), self._answers)
        return Solution(form, numbers, value, strength)

    def goes_by_text(self, form: Form) -> bool:
        """Whether a form's numbers go along the gradient of the baseline, wherever they start."""
        return bool(self._text) and form.kind != ONE_RATIO

    @property
    def _first_steps(self) -> Iterator[list[int]]:
        return islice(self.schedule, min(self.most_steps, self.schedule.n_once))

    def _value(self, form: Form, numbers: np.ndarray, which: list[int]) -> Value:
        return self._values([(form, numbers)], which)[0]

    def _values(self, rules: Sequence[Rules], which: list[int]) -> list[Value]:
        heads, plain = self.passes.heads, self.objective.plain.at(which)
        fits = {str(i): x for i, (form, n) in enumerate(rules) if (x := form.fit(n, heads))}
        scores = self.passes.score_fits(fits, which) if fits else {}
        return [self.objective.value(which, scores.get(str(i), plain)) for i in range(len(rules))]

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

    def along_gradient(self, forms: Sequence[Form]) -> list[Solution]:
        """Numbers along the gradient of the baseline, over the curvature of the KL of text."""
        found = self._allowed([(form, self._direction(form)) for form in forms])
        return [x if x.value.gain >= 0 or not x.strength else self.plain(x.form) for x in found]

    def _direction(self, form: Form) -> np.ndarray:
        heads = self.passes.heads
        if form.whole not in self._at_plain:
            self._at_plain[form.whole] = self._derivatives(form.whole)
        gradients, drawn = (form.contained(x, heads) for x in self._at_plain[form.whole])
        curvature = np.einsum("wrc,wsc->crs", drawn, drawn)
        numbers = along(without_noise(gradients), curvature, FULL_KL)
        return form.zeros(heads) if numbers is None else numbers

    def run(self, start: Solution) -> Solution:
        """The best numbers that steps come by, at the largest strength that is allowed."""
        form, best = start.form, start
        halvings = _SHARED_HALVINGS if form.of == ALIKE else _HALVINGS
        walk = Walk(form, start.numbers)
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
        best = best if form.of == ALIKE else self._fewest(best, walk.gained)
        is_free = self.strength is None and not self._protected
        return best if is_free else self._allowed([(form, best.numbers)])[0]

    def _derivatives(self, form: Form) -> tuple[np.ndarray, np.ndarray]:
        """At the baseline: the gradient of the answers of each step, and what `drawn` gives."""
        plain, n_answers = form.zeros(self.passes.heads), self.schedule.n_answers
        gradients = [
            self.passes.gradient(form, plain, which, np.full(len(which), 1 / n_answers))
            for which in self._first_steps
        ]
        return np.array(gradients), self.passes.drawn(form, plain, self._text)

    def _allowed(self, rules: Sequence[Rules]) -> list[Solution]:
        """Rules at the strength that is wanted, or each at the largest that is allowed."""
        if self.strength is not None:
            return [self.at(form, numbers, self.strength) for form, numbers in rules]
        foretold = float(np.sqrt(self.objective.max_kl / FULL_KL))
        shares = [foretold if self.goes_by_text(form) else 1.0 for form, _ in rules]
        parts = np.clip(PARTS * np.array(shares), 1, PARTS).astype(int).tolist()
        trials = [_Trials(rule, part) for rule, part in zip(rules, parts, strict=True)]
        while going := [x for x in trials if not x.over]:
            asked = [(form, form.within(x.part / PARTS * n)) for x in going for form, n in [x.rule]]
            for x, value in zip(going, self._values(asked, self._protected), strict=True):
                x.take(value)
        found = [(self.at(*x.rule, x.low / PARTS), x.losses) for x in trials]
        return [
            at._replace(value=replace(at.value, losses=losses or at.value.losses))
            for at, losses in found
        ]

    def full(self, found: Solution) -> Value:
        """What the answers gain at full strength."""
        known = found.strength == 1
        return found.value if known else self._value(found.form, found.at(1.0), self._answers)

    def with_losses(self, found: Solution, full: Value) -> Value:
        """The same, `full`, with what protected parts lose."""
        value = self._value(found.form, found.at(1.0), self._protected)
        return replace(full, losses=value.losses)

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
