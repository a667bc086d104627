"""Optimisation of the rules of a model's heads, family by family.

1. With retention text, the rules of a family are a step of natural gradient from the baseline
   (`natural_gradient.py`).
2. Without text, Adam searches for them, starting from the rules of a simpler family. A group lasso
   keeps heads with a small gradient at the baseline, and heads that gained little are pruned.
3. The interpolation weight is then the largest at which no constraint is violated.

References: Kingma and Ba 2015 (Adam), Yuan and Lin 2006 (group lasso).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch

from calibrate.core.rule import CONSTANT, LOG_SIZE, Sharing
from calibrate.evidence.harm_limits import NonInferiorityResult
from calibrate.model.natural_gradient import FULL_KL, NaturalGradient
from calibrate.model.objective import Value
from calibrate.model.parameters import Parameters, RuleFamily, best_of_layers
from calibrate.model.scored_splits import Calibration, ModelSolution, Validation

# Adam
LEARNING_RATE = 0.04  # of beta
SHARED_LEARNING_RATE = 0.06  # of a family that all heads share
ADAM_DECAY = (0.9, 0.98)  # of the mean of gradients and of their squares
GROUP_LASSO = 0.003  # penalty on the norm of a head's numbers, nats per unit of beta
STEPS_PER_CHECK = 10
_N_HALVINGS = 3  # of the learning rate, each after a check without a gain, before the search stops
_N_SHARED_HALVINGS = 1  # for numbers that all heads share, whose gradient has little noise
_MIN_RISE = 0.002  # gain from one check to the next, nats
_TINY = 1e-8
# Pruning
_KEPT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the heads that changed
_MAX_LOSS = 1 / 20  # of the gain, by pruning
# Interpolation weight
N_PARTS = 64  # the search is in steps of 1 / N_PARTS
MAX_TRIALS = 5
_NEAR = 0.9  # share of the margin from which on no other weight is tried
_MIN_LOSS = 1e-12  # nats per token, in place of smaller losses


@dataclass(eq=False)
class HeadRuleOptimizer:
    """Solves families, each from the solutions of simpler ones.

    Attributes:
      families: the simplest first; the last one has all terms of the others.
      heads_per_layer: the number of heads of a layer whose rule may differ from the baseline; None:
        all. Rules that heads share are not limited.
      solutions: the solutions so far.
    """

    calibration: Calibration
    validation: Validation
    families: list[RuleFamily]
    heads_per_layer: int | None = None
    solutions: list[ModelSolution] = field(default_factory=list)

    def solve(self) -> list[ModelSolution]:
        """The solution of each family, in the order of the families."""
        if self.validation.text:
            return self._solve_by_natural_gradient()
        for family in self.families:
            self.solutions.append(self._solve_by_adam(family))
        return self.solutions

    def _solve_by_natural_gradient(self) -> list[ModelSolution]:
        """The step of each family, or the baseline if it gains nothing."""
        full = replace(self.families[-1], sharing=Sharing.PER_HEAD)
        gradient = NaturalGradient(self.calibration, self.validation.text, full)
        predicted = min(float(np.sqrt(self.validation.objective.max_kl / FULL_KL)), 1.0)
        for family in self.families:
            step = gradient.step(family, self.heads_per_layer)
            solution = self._interpolate(step, predicted)
            loses = solution.value.gain < 0 and solution.weight > 0
            self.solutions.append(self.validation.baseline(family) if loses else solution)
        return self.solutions

    def _solve_by_adam(self, family: RuleFamily) -> ModelSolution:
        """The best rules from a simpler family, or from the rule of the kind for all heads."""
        solution = self._search(self._simpler_start(family))
        shared = self._shared_start(family)
        if shared is None:
            return solution
        lead = shared.value.over(solution.value)
        if not lead.mean > max(lead.error, 0.0):  # also if the error is NaN
            return solution
        return self._search(self.validation.at_full_weight(shared))

    def _search(self, start: ModelSolution) -> ModelSolution:
        """The best rules from a start, pruned, at the largest weight within the margins."""
        best, gained = maximise_log_p(start, self.calibration, self.validation)
        if not start.family.is_global:
            if self.heads_per_layer:
                best, gained = self._refit_best_heads(best, gained, self.heads_per_layer)
            best = self.prune_heads(best, gained)
        is_free = not self.validation.constrained
        return best if is_free else self._interpolate(best.parameters, 1.0)

    def _refit_best_heads(
        self, best: ModelSolution, gained: np.ndarray, n_per_layer: int
    ) -> tuple[ModelSolution, np.ndarray]:
        """Searches again with those heads of each layer alone whose numbers have the largest norm.

        The group lasso keeps the norm small for heads that gain little. Returns the best rules and
        the gain of each head in both searches.
        """
        family, numbers = best.parameters
        norm = np.sqrt((numbers**2).sum(axis=0))
        is_best = best_of_layers(norm, self.calibration.scorer.heads, n_per_layer)
        fewer = self.validation.solution(Parameters(family, numbers * is_best))
        best, gained_again = maximise_log_p(fewer, self.calibration, self.validation, is_best)
        return best, gained + gained_again

    def _simpler_start(self, family: RuleFamily) -> ModelSolution:
        """The last solution that a family contains; its value is known, as it is the same rule."""
        for solution in reversed(self.solutions):
            parameters = family.embed(solution.parameters)
            if parameters is not None:
                return ModelSolution(parameters, self.validation.at_full_weight(solution).value)
        return self.validation.baseline(family)

    def _shared_start(self, family: RuleFamily) -> ModelSolution | None:
        """The rule of the kind for all heads, as numbers of each; None if there is no such start.

        Its value is at its interpolation weight.
        """
        if family.is_global or family.kind not in (CONSTANT, LOG_SIZE):
            return None
        shared = replace(family, sharing=Sharing.GLOBAL)
        known = next(x for x in self.solutions if x.family == shared)
        numbers = family.zeros(self.calibration.scorer.heads) + known.parameters.numbers
        return known._replace(parameters=Parameters(family, numbers))

    def prune_heads(self, best: ModelSolution, gained: np.ndarray) -> ModelSolution:
        """The rules with the fewest layers or heads that are as good within a standard error.

        Args:
          gained: (columns,) the gain of each layer or head, nats.
        """
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
            if lead.mean <= min(error, _MAX_LOSS * best.value.gain):
                return fewer
        return best

    def _interpolate(self, parameters: Parameters, predicted: float) -> ModelSolution:
        """Rules at the largest interpolation weight within the margins."""
        validation = self.validation
        weight, results = largest_weight(parameters, predicted, validation.constrained_value)
        solution = validation.solution(parameters, weight)
        results = solution.value.results if results is None else results
        return solution._replace(value=replace(solution.value, results=results))


# Adam


def maximise_log_p(
    start: ModelSolution,
    calibration: Calibration,
    validation: Validation,
    is_free: np.ndarray | None = None,
) -> tuple[ModelSolution, np.ndarray]:
    """Maximises the mean log p of the answers by Adam with a group lasso, with early stopping.

    After every STEPS_PER_CHECK steps the rules get their value on the validation split. If it has
    not risen, the search goes on from the best rules with half the learning rate, and stops in the
    end.

    Args:
      start: the rules to start from, with their value.
      is_free: (columns,) bool: the columns that may change; None: all.
    Returns:
      The best of the rules that were checked, and (columns,) the gain of each column in nats. The
      gain is the sum of each move times the gradient at the next step, which is of other examples,
      so that the noise of both is independent.
    """
    family, best = start.family, start
    halvings_left = _N_SHARED_HALVINGS if family.is_global else _N_HALVINGS
    rate = SHARED_LEARNING_RATE if family.is_global else LEARNING_RATE
    numbers = torch.tensor(start.parameters.numbers)
    adam = torch.optim.Adam([numbers], rate, betas=ADAM_DECAY, maximize=True)
    gained, move = np.zeros(numbers.shape[1]), np.zeros(numbers.shape)
    batches, n_steps = calibration.batches(), 0
    while until_check := list(islice(batches, STEPS_PER_CHECK)):
        n_steps += len(until_check)
        calibration.begin(f"{family.label}: step {n_steps} of {calibration.max_steps}", until_check)
        for indices in until_check:
            parameters = Parameters(family, numbers.numpy().copy())
            gradient = calibration.gradient(parameters, indices)
            gradient = gradient if is_free is None else gradient * is_free
            gained += (gradient * move).sum(axis=0)
            _take_step(numbers, gradient, adam, family)
            move = numbers.numpy() - parameters.numbers
        current = validation.solution(Parameters(family, numbers.numpy().copy()))
        rise = current.value.gain - best.value.gain
        best = current if rise > 0 else best
        if rise < _MIN_RISE:
            if not halvings_left:
                break
            halvings_left -= 1
            adam.param_groups[0]["lr"] /= 2
        if best is not current:
            numbers.copy_(torch.from_numpy(best.parameters.numbers))
            move = np.zeros(numbers.shape)
    return best, gained


def _take_step(
    numbers: torch.Tensor, gradient: np.ndarray, adam: torch.optim.Adam, family: RuleFamily
) -> None:
    """Takes a step of Adam, and one of the group lasso unless all heads share a rule, in place."""
    numbers.grad = torch.from_numpy(gradient)
    adam.step()
    if not family.is_global:
        _shrink_heads(numbers, adam)


def _shrink_heads(numbers: torch.Tensor, adam: torch.optim.Adam) -> None:
    """The proximal step of the group lasso, in the metric of Adam, in place.

    A head whose gradient is small compared with GROUP_LASSO goes to exactly 0. Without this step,
    heads that a search starts with, and that gain nothing, would keep the rule of all heads.
    """
    state, rate = adam.state[numbers], adam.param_groups[0]["lr"]
    mean_square = state["exp_avg_sq"].mean(dim=0) / (1 - ADAM_DECAY[1] ** state["step"])
    norm = numbers.norm(dim=0).clamp_min(_TINY)
    numbers *= (1 - rate * GROUP_LASSO / (mean_square.sqrt() + _TINY) / norm).clamp_min(0)


# The interpolation weight


def largest_weight(
    parameters: Parameters, predicted: float, evaluate: Callable[[Parameters], Value]
) -> tuple[float, list[NonInferiorityResult] | None]:
    """The largest interpolation weight at which no constraint is violated.

    Args:
      parameters: the rules at interpolation weight 1.
      predicted: the weight to be tried first.
      evaluate: returns the value on the constrained examples.
    Returns:
      The weight, 0 if none was within the margins, and the results of the constraints at it.
    """
    low, high, results = 0, N_PARTS + 1, None  # within the margins, and beyond them
    part = int(np.clip(N_PARTS * predicted, 1, N_PARTS))
    for n_trials in range(1, MAX_TRIALS + 1):
        value = evaluate(parameters.interpolated(part / N_PARTS))
        loss, margin = value.limiting
        if value.is_allowed:
            low, results = part, value.results
        else:
            high = part
        if high - low == 1 or _NEAR * margin <= loss <= margin:
            break
        # The KL of text grows with the square of the weight; other losses may grow linearly.
        power = 1.0 if n_trials > 1 and not low else 0.5
        guess = part * (margin / max(loss, _MIN_LOSS)) ** power
        part = int(np.clip(guess, low + 1, max(high - 1, low + 1)))
    return low / N_PARTS, results
