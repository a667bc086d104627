"""Optimisation of the rules of a model's heads, family by family.

With retention text, rules are a step of natural gradient from the baseline. Without, proximal Adam
searches for them, from a simpler family's rules, and heads that gained little are pruned in the end
while nothing is lost. Then the interpolation weight is the largest at which no constraint is
violated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from calibrate.core.parameter_sharing import Sharing
from calibrate.evidence.non_inferiority import NonInferiorityResult
from calibrate.model.calibration_and_validation import Calibration, ModelSolution, Validation
from calibrate.model.natural_gradient import FULL_KL, NaturalGradient
from calibrate.model.objective import Value
from calibrate.model.parameters import SHARED_SLOPE, Parameters, RuleFamily
from calibrate.model.proximal_adam import ascend

_KEPT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the heads that changed
_MIN_GAIN_TO_LOSS = 20  # of pruning
N_PARTS = 64  # of interpolation weight 1: the step of the search
MAX_TRIALS = 5  # of weights
_NEAR = 0.9  # of the margin: no other weight is tried
_MIN_LOSS = 1e-12  # nats a token: what loses less may grow by as much as there is room for


@dataclass(eq=False)
class HeadRuleOptimizer:
    """Solves families, each from the solutions of simpler ones.

    Attributes:
      families: the simplest first.
      weight: interpolation weight; None: the largest within the margins.
      heads_per_layer: whose rule may differ from the baseline, where each has its own; None: all.
      solutions: so far.
      natural_gradient: steps of all families, from one set of derivatives.
    """

    calibration: Calibration
    validation: Validation
    families: list[RuleFamily]
    weight: float | None = None
    heads_per_layer: int | None = None
    solutions: list[ModelSolution] = field(default_factory=list)

    def __post_init__(self) -> None:
        fulls = [family.full for family in self.families]
        full = max(fulls, key=lambda family: len(family.basis.terms), default=None)
        self.natural_gradient = NaturalGradient(self.calibration, self.validation.text, full)

    def solve(self) -> list[ModelSolution]:
        """The solution of each family, in their order; those by natural gradient share passes."""
        direct = [family for family in self.families if self.natural_gradient.suits(family)]
        if direct:
            self.solutions += self._solve_by_natural_gradient(direct)
        for family in self.families:
            if family not in direct:  # it may begin at any solution before it
                self.solutions.append(self._solve_by_proximal_adam(family))
        return sorted(self.solutions, key=lambda solution: self.families.index(solution.family))

    # By natural gradient

    def _solve_by_natural_gradient(self, families: Sequence[RuleFamily]) -> list[ModelSolution]:
        """The step of each family; the baseline where it gains nothing."""
        steps = [self.natural_gradient.step(family, self.heads_per_layer) for family in families]
        predicted = min(float(np.sqrt(self.validation.objective.max_kl / FULL_KL)), 1.0)
        return [
            x if x.value.gain >= 0 or not x.weight else self.validation.baseline(x.family)
            for x in self._interpolate(steps, predicted)
        ]

    # By proximal Adam

    def _solve_by_proximal_adam(self, family: RuleFamily) -> ModelSolution:
        """The best rules from those of a simpler family, or from the same of all heads."""
        solution = self._optimise(self._simpler(family))
        shared = self._shared(family)
        if shared is None:
            return solution
        lead = shared.value.over(solution.value)
        if not lead.mean > max(lead.error, 0.0):  # unknown errors are NaN: no
            return solution
        # It begins at interpolation weight 1: the value there differs.
        return self._optimise(self.validation.at_full_weight(shared))

    def _optimise(self, start: ModelSolution) -> ModelSolution:
        """The best rules from a start, pruned, at the largest weight within the margins."""
        best, gained = ascend(start, self.calibration, self.validation.solution)
        if self.heads_per_layer and not start.family.is_global:
            best, gained_again = self._refit_best_of_layers(best, self.heads_per_layer)
            gained = gained + gained_again
        if not start.family.is_global:
            best = self.prune_heads(best, gained)
        is_free = self.weight is None and not self.validation.constrained
        return best if is_free else self._interpolate([best.parameters], 1.0)[0]

    def _refit_best_of_layers(
        self, best: ModelSolution, n_per_layer: int
    ) -> tuple[ModelSolution, np.ndarray]:
        """The best rules of few heads of each layer, and what each of them gained from `best` on.

        Those whose numbers have the largest norm stay: the group lasso keeps it small where little
        is gained.
        """
        family, numbers = best.parameters
        norm = np.sqrt((numbers**2).sum(axis=0))
        is_best = family.best_of_layers(norm, self.calibration.scorer.heads, n_per_layer)
        fewer = self.validation.solution(Parameters(family, numbers * is_best))
        return ascend(fewer, self.calibration, self.validation.solution, is_best)

    def _simpler(self, family: RuleFamily) -> ModelSolution:
        """The last solution whose rules the family contains; of a shared slope, the best one.

        Its value is known: it is the same rule.
        """
        embedded = self._embedded(family)
        if not embedded:
            return self.validation.baseline(family)
        if family.kind != SHARED_SLOPE:
            embedded = embedded[:1]
        values = [self.validation.at_full_weight(solution).value for solution, _ in embedded]
        starts = [
            ModelSolution(same, value) for (_, same), value in zip(embedded, values, strict=True)
        ]
        return max(starts, key=lambda start: start.value.gain)

    def _embedded(self, family: RuleFamily) -> list[tuple[ModelSolution, Parameters]]:
        """The solutions whose rules a family contains, with its numbers, the last one first."""
        embedded = []
        for solution in reversed(self.solutions):
            same = family.embed(solution.parameters, self.calibration.scorer.heads)
            if same is not None:
                embedded.append((solution, same))
        return embedded

    def _shared(self, family: RuleFamily) -> ModelSolution | None:
        """The rules of the same kind that all heads share, in the numbers of a family."""
        if not family.may_begin_again:
            return None
        shared = replace(family, sharing=Sharing.GLOBAL)
        known = next(x for x in self.solutions if x.family == shared)
        numbers = family.zeros(self.calibration.scorer.heads) + known.parameters.numbers
        return known._replace(parameters=Parameters(family, numbers))

    def prune_heads(self, best: ModelSolution, gained: np.ndarray) -> ModelSolution:
        """The rules with the fewest layers or heads that are as good within a standard error."""
        changed = best.parameters.changed_columns()
        order = changed[np.argsort(-gained[changed], kind="stable")]
        for kept_share in _KEPT_SHARES:
            n_kept = int(np.ceil(kept_share * len(order)))
            if not 0 < n_kept < len(order):
                continue
            numbers = best.parameters.numbers.copy()
            numbers[:, order[n_kept:]] = 0
            fewer = self.validation.solution(Parameters(best.family, numbers))
            lead = best.value.over(fewer.value)
            error = np.nan_to_num(lead.error, nan=np.inf)
            if lead.mean <= min(error, best.value.gain / _MIN_GAIN_TO_LOSS):
                return fewer
        return best

    # Of both

    def _interpolate(
        self, parameters: Sequence[Parameters], predicted: float
    ) -> list[ModelSolution]:
        """Rules at the given interpolation weight, or each at the largest within the margins."""
        validation = self.validation
        if self.weight is not None:
            return [validation.solution(x, self.weight) for x in parameters]
        solutions = []
        for search in search_interpolation(parameters, predicted, validation.constrained_values):
            solution = validation.solution(search.parameters, search.weight)
            results = search.results or solution.value.results
            solutions.append(solution._replace(value=replace(solution.value, results=results)))
        return solutions


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
