"""Optimisation of the numbers of rules on the heads of a model, by gradient.

With retention text, they are a step of natural gradient: the gradient of the answers at the
baseline, divided by the Fisher information of text, which is the curvature of its KL divergence.
A model is near an optimum for text: at interpolation weight s a step costs text at second order in
s, and gains at first. The KL budget and the margin at trained lengths bound the weight.

Without text, proximal Adam optimises them (`adam.py`). Heads that gained little, by the gradient at
a step times the last move, whose noise is of other examples, are pruned in the end while nothing is
lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from calibrate.datasets.examples import Scores
from calibrate.evidence.estimate import Estimate
from calibrate.export.plan import GLOBAL
from calibrate.model.objective import Objective, Value
from calibrate.model.parameters import SHARED_SLOPE, Form, Head
from calibrate.model.proximal_adam import ProximalAdam
from calibrate.model.splits import BatchSampler
from calibrate.store.coefficients import Coefficients

STEPS_TO_A_CHECK = 10
MAX_STEPS = 100
_TINY = 1e-8
_HALVINGS = 3  # of the learning rate, each when a check finds no gain; then it stops early
_SHARED_HALVINGS = 1  # of numbers that all heads share: their gradient has little noise
_MIN_RISE = 0.002  # nats from one check to the next
_KEPT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the heads that changed
FULL_KL = 0.04  # nats a token: the KL of text at interpolation weight 1, by its curvature
PARTS = 64  # of interpolation weight 1
_TRIALS = 6  # of interpolation weights, at most
_NEAR = 0.9  # of the margin: no other weight is tried


class Solution(NamedTuple):
    """Numbers of a form, and their value on the validation split."""

    form: Form
    numbers: np.ndarray  # at interpolation weight 1
    value: Value
    strength: float = 1.0  # the interpolation weight

    def at(self, strength: float) -> np.ndarray:
        """The numbers at an interpolation weight."""
        return self.form.clip_to_feasible(strength * self.numbers)

    def heads_changed(self, heads: list[Head]) -> list[Head]:
        """The heads of a model whose beta is not 1, or not what all have in common."""
        return self.form.heads_changed(self.at(self.strength), heads)

    def fit(self, heads: list[Head], strength: float | None = None) -> Coefficients | None:
        """The rules of the heads of a model; None where beta is 1 on all."""
        return self.form.fit(self.at(self.strength if strength is None else strength), heads)


Rules = tuple[Form, np.ndarray]  # a form, and its numbers at interpolation weight 1


class Scorer(Protocol):
    """Scores of a model and their gradients; `ModelScorer` documents each method."""

    @property
    def heads(self) -> list[Head]: ...

    def gradient(
        self, form: Form, numbers: np.ndarray, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray: ...

    def fisher_scores(
        self, form: Form, numbers: np.ndarray, indices: Sequence[int]
    ) -> np.ndarray: ...

    def score_fits(
        self, fits: Mapping[str, Coefficients], indices: Sequence[int]
    ) -> dict[str, Scores]: ...


@dataclass
class _InterpolationSearch:
    """A search for the largest interpolation weight within the margins, in parts of 1."""

    rule: Rules
    part: int  # to be tried next
    low: int = 0  # the largest within the margins
    high: int = PARTS + 1  # the smallest beyond them
    losses: list[Estimate] | None = None  # at the largest
    n: int = 0
    over: bool = False

    def next_rule(self) -> Rules:
        """The rule at the part that is to be tried."""
        form, numbers = self.rule
        return form, form.clip_to_feasible(self.part / PARTS * numbers)

    def take(self, value: Value) -> None:
        """Takes the value at the part."""
        if value.is_allowed:
            self.low, self.losses = self.part, value.losses
        else:
            self.high = self.part
        self.n += 1
        near = _NEAR * value.bound <= value.lost <= value.bound
        self.over = self.high - self.low == 1 or near or self.n == _TRIALS
        # The KL of text rises as the square of the weight; other costs may be linear in it.
        power = 1.0 if self.n > 1 and not self.low else 0.5
        guess = self.part * (value.bound / max(value.lost, 1e-12)) ** power
        self.part = int(np.clip(guess, self.low + 1, max(self.high - 1, self.low + 1)))


@dataclass(frozen=True, eq=False)
class HeadRuleOptimizer:
    """Optimises the numbers of forms."""

    passes: Scorer
    objective: Objective
    sampler: BatchSampler  # the examples of each step
    validation: list[int]  # the examples of each check
    most_steps: int  # of a form
    strength: float | None = None  # interpolation weight; None: the largest within the margins
    _at_plain: dict[Form, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def work(self, forms: Sequence[Form]) -> list[list[int]]:
        """The examples of every pass that the optimisation of these forms may take."""
        units = self.objective.examples.units
        answers, trials = units(self._answers), units(self._protected)
        trials *= _TRIALS if self.strength is None else 0
        known, passes = set(self._at_plain), list[list[int]]()
        for form in forms:
            passes += trials
            if self.uses_natural_gradient(form):
                passes += [] if form.full_basis in known else [*self._first_steps, self._text]
                passes += answers
                known.add(form.full_basis)
                continue
            checks = -(-self.most_steps // STEPS_TO_A_CHECK)
            n_scored = 2 + checks + (0 if form.sharing == GLOBAL else len(_KEPT_SHARES))
            passes += [*islice(self.sampler, self.most_steps), *answers * n_scored]
        return passes

    def plain(self, form: Form) -> Solution:
        """The baseline, whose scores are known."""
        value = self.objective.value(self._answers, self.objective.plain.at(self._answers))
        return Solution(form, form.zeros(self.passes.heads), value)

    def at(self, form: Form, numbers: np.ndarray, strength: float = 1.0) -> Solution:
        """Numbers at an interpolation weight, scored by the answers alone."""
        value = self._value(form, form.clip_to_feasible(strength * numbers), self._answers)
        return Solution(form, numbers, value, strength)

    def uses_natural_gradient(self, form: Form) -> bool:
        """True if a form's numbers are a step of natural gradient from the baseline."""
        return bool(self._text) and form.kind != SHARED_SLOPE

    @property
    def _first_steps(self) -> Iterator[list[int]]:
        return islice(self.sampler, min(self.most_steps, self.sampler.n_once))

    def _value(self, form: Form, numbers: np.ndarray, indices: list[int]) -> Value:
        return self._values([(form, numbers)], indices)[0]

    def _values(self, rules: Sequence[Rules], indices: list[int]) -> list[Value]:
        """The value of each rule on some examples, by their indices."""
        heads, plain = self.passes.heads, self.objective.plain.at(indices)
        fits = {str(i): form.fit(numbers, heads) for i, (form, numbers) in enumerate(rules)}
        changing = {name: fit for name, fit in fits.items() if fit is not None}
        scores = self.passes.score_fits(changing, indices) if changing else {}
        return [self.objective.value(indices, scores.get(name, plain)) for name in fits]

    @cached_property
    def _answers(self) -> list[int]:
        return self._validation(~self.objective.is_text)

    @cached_property
    def _text(self) -> list[int]:
        return self._validation(self.objective.is_text)

    @cached_property
    def _protected(self) -> list[int]:
        cells = [cell for part in self.objective.protected for cell in part]
        return self._validation(np.isin(np.arange(len(self.objective.is_text)), cells))

    def _validation(self, cells: np.ndarray) -> list[int]:
        """The validation examples of some cells, (cells,) bool."""
        return [i for i in self.validation if cells[self.objective.cell[i]]]

    def solve_by_natural_gradient(self, forms: Sequence[Form]) -> list[Solution]:
        """Numbers by a step of natural gradient; those of the baseline where it gains nothing."""
        steps = self._max_interpolation([(form, self._direction(form)) for form in forms])
        return [x if x.value.gain >= 0 or not x.strength else self.plain(x.form) for x in steps]

    def _direction(self, form: Form) -> np.ndarray:
        heads = self.passes.heads
        if form.full_basis not in self._at_plain:
            self._at_plain[form.full_basis] = self._derivatives(form.full_basis)
        gradients, scores = (
            form.project_gradient(x, heads) for x in self._at_plain[form.full_basis]
        )
        fisher = np.einsum("wrc,wsc->crs", scores, scores)
        numbers = natural_gradient_step(shrink_gradient(gradients), fisher, FULL_KL)
        return form.zeros(heads) if numbers is None else numbers

    def run(self, start: Solution) -> Solution:
        """The best numbers of all steps, at the largest interpolation weight within the margins."""
        form, best = start.form, start
        halvings = _SHARED_HALVINGS if form.sharing == GLOBAL else _HALVINGS
        adam = ProximalAdam(form, start.numbers)
        for number, indices in enumerate(islice(self.sampler, self.most_steps), 1):
            weights = np.full(len(indices), 1 / self.sampler.n_answers)
            adam.step(self.passes.gradient(form, adam.numbers, indices, weights))
            if number % STEPS_TO_A_CHECK and number != self.most_steps:
                continue
            current = self.at(form, adam.numbers)
            rise = current.value.gain - best.value.gain
            best = current if rise > 0 else best
            if rise < _MIN_RISE:
                if not halvings:
                    break
                halvings -= 1
                adam.halve_learning_rate()
            if best is not current:
                adam.reset_to(best.numbers)
        best = best if form.sharing == GLOBAL else self._prune_heads(best, adam.gained)
        is_free = self.strength is None and not self._protected
        return best if is_free else self._max_interpolation([(form, best.numbers)])[0]

    def _derivatives(self, form: Form) -> tuple[np.ndarray, np.ndarray]:
        """At the baseline, the gradient of the answers of each step, and `fisher_scores`."""
        plain, n_answers = form.zeros(self.passes.heads), self.sampler.n_answers
        gradients = [
            self.passes.gradient(form, plain, indices, np.full(len(indices), 1 / n_answers))
            for indices in self._first_steps
        ]
        return np.array(gradients), self.passes.fisher_scores(form, plain, self._text)

    def _max_interpolation(self, rules: Sequence[Rules]) -> list[Solution]:
        """Rules at the given interpolation weight, or each at the largest within the margins."""
        if self.strength is not None:
            return [self.at(form, numbers, self.strength) for form, numbers in rules]
        predicted = float(np.sqrt(self.objective.max_kl / FULL_KL))
        shares = [predicted if self.uses_natural_gradient(form) else 1.0 for form, _ in rules]
        parts = np.clip(PARTS * np.array(shares), 1, PARTS).astype(int).tolist()
        searches = [_InterpolationSearch(x, part) for x, part in zip(rules, parts, strict=True)]
        while active := [search for search in searches if not search.over]:
            tried = [search.next_rule() for search in active]
            for search, value in zip(active, self._values(tried, self._protected), strict=True):
                search.take(value)
        return [self._with_known_losses(search) for search in searches]

    def _with_known_losses(self, search: _InterpolationSearch) -> Solution:
        """The result of a search, scored by the answers, with the losses that are known of it."""
        solution = self.at(*search.rule, search.low / PARTS)
        losses = search.losses or solution.value.losses
        return solution._replace(value=replace(solution.value, losses=losses))

    def full(self, solution: Solution) -> Value:
        """The gain of the answers at interpolation weight 1."""
        if solution.strength == 1:
            return solution.value
        return self._value(solution.form, solution.at(1.0), self._answers)

    def with_losses(self, solution: Solution, full: Value) -> Value:
        """The same, `full`, with the losses of protected parts."""
        value = self._value(solution.form, solution.at(1.0), self._protected)
        return replace(full, losses=value.losses)

    def _prune_heads(self, best: Solution, gained: np.ndarray) -> Solution:
        """The rule with the fewest layers or heads that is as good within one standard error."""
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


def shrink_gradient(gradients: np.ndarray) -> np.ndarray:
    """The mean of gradients, (steps, ...), each number shrunk by the noise in its square."""
    mean = np.array(gradients.mean(axis=0))
    if len(gradients) == 1:
        return mean
    noise = gradients.var(axis=0, ddof=1) / len(gradients)
    return np.array(mean * np.maximum(0.0, 1 - noise / np.maximum(mean**2, _TINY**2)))


def natural_gradient_step(
    gradient: np.ndarray, curvature: np.ndarray, cost: float
) -> np.ndarray | None:
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
