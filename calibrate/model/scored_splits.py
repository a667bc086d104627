"""The calibration and the validation split of a fit, as a scorer of the model sees them.

The calibration split gives gradients; the validation split gives the values of rules, which stop a
search, prune heads and limit the interpolation weight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from calibrate.model.objective import ModelObjective, Value
from calibrate.model.parameters import HeadId, Parameters, RuleFamily
from calibrate.model.scoring import begin_passes
from calibrate.model.splits import CALIBRATION, VALIDATION, BatchSampler, limit_per_cell, split
from calibrate.parallel import SILENT, Progress
from calibrate.prompts.examples import ExampleSet, Scores
from calibrate.store.fit import Fit

MAX_VALIDATION = 32  # answers of a cell, unless a constraint applies to it


class ModelScorer(Protocol):
    """A model as a fit sees it: scores of examples under rules of its heads, and their gradients.

    Examples are given by their indices in the example set of the fit. The implementations:

    * `TransformersScorer` (`transformers_scorer.py`) for `calibrate model fit`: a causal language
      model, with a cache and workers.
    * `BatchScorer` (`calibrate/batch_fit.py`) for `calibrate.fit_model`: any model of Transformers,
      with a function of the user that returns log p.
    * `QuadraticScorer` (`tests/fakes.py`) for tests: gains in closed form, without a model.
    """

    @property
    def heads(self) -> list[HeadId]:
        """(layer, head) of all heads of the model."""
        ...

    def score(self, rules: Sequence[Fit], indices: Sequence[int]) -> list[Scores]:
        """The scores of some examples under each rule."""
        ...

    def gradient(
        self, parameters: Parameters, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers of rules, (rows, columns)."""
        ...

    def fisher_scores(self, parameters: Parameters, indices: Sequence[int]) -> np.ndarray:
        """The gradients of log p of tokens drawn from the predictions of windows of text.

        (windows, rows, columns), divided by the square root of the number of tokens: the sum of
        their squares is the Fisher information, the second derivative of the KL of text in nats per
        token.
        """
        ...


class ModelSolution(NamedTuple):
    """The best rules of a family, and their value on the validation split."""

    parameters: Parameters  # at interpolation weight 1
    value: Value  # at `weight`
    weight: float = 1.0  # interpolation weight

    @property
    def family(self) -> RuleFamily:
        """The family of the rules."""
        return self.parameters.family

    @property
    def applied(self) -> Parameters:
        """The rules at their interpolation weight."""
        return self.parameters.interpolated(self.weight)

    def rules(self, heads: list[HeadId]) -> Fit | None:
        """A fit with the rules at their interpolation weight; None if beta is 1 for all heads."""
        return self.applied.rules(heads)


class Calibration:
    """The calibration split, in batches whose order depends on a seed.

    Args:
      max_steps: the largest number of batches.
      progress: advances after each pass.
    """

    def __init__(
        self,
        scorer: ModelScorer,
        examples: ExampleSet,
        max_steps: int,
        seed: int,
        progress: Progress = SILENT,
    ):
        self.scorer, self.examples, self.max_steps = scorer, examples, max_steps
        self._progress = progress
        self._sampler = BatchSampler(examples, np.array(split(examples, CALIBRATION)), seed)

    def batches(self) -> Iterator[list[int]]:
        """The indices of the examples of each batch."""
        return islice(self._sampler, self.max_steps)

    def epoch(self) -> Iterator[list[int]]:
        """The batches until each example has come once, at most `max_steps`."""
        return islice(self._sampler, min(self.max_steps, self._sampler.n_epoch))

    def begin(self, stage: str, passes: Sequence[Sequence[int]]) -> None:
        """Begins a stage of progress; `passes` are the indices of the examples of each pass."""
        begin_passes(self._progress, stage, self.examples, passes)

    def gradient(self, parameters: Parameters, indices: list[int]) -> np.ndarray:
        """The gradient of the mean log p of a batch by the numbers of rules, (rows, columns)."""
        weights = np.full(len(indices), 1 / self._sampler.n_answers)
        return self.scorer.gradient(parameters, indices, weights)


@dataclass(frozen=True, eq=False)
class Validation:
    """The validation split, on which rules get their value."""

    scorer: ModelScorer
    objective: ModelObjective
    indices: list[int]  # of the examples
    progress: Progress = SILENT

    @cached_property
    def answers(self) -> list[int]:
        """The indices of the answers."""
        return self._in_cells(np.flatnonzero(~self.objective.is_text))

    @cached_property
    def text(self) -> list[int]:
        """The indices of the windows of retention text."""
        return self._in_cells(np.flatnonzero(self.objective.is_text))

    @cached_property
    def constrained(self) -> list[int]:
        """The indices of the examples that a constraint applies to."""
        return self._in_cells(sorted(self.objective.constrained_cells))

    def _in_cells(self, cells: Sequence[int] | np.ndarray) -> list[int]:
        chosen = np.isin(self.objective.cell[self.indices], cells)
        return [i for i, is_chosen in zip(self.indices, chosen, strict=True) if is_chosen]

    def baseline(self, family: RuleFamily) -> ModelSolution:
        """The baseline as a solution of a family; its scores are known."""
        scores = self.objective.baseline.at(self.answers)
        parameters = family.baseline(self.scorer.heads)
        return ModelSolution(parameters, self.objective.value(self.answers, scores))

    def solution(self, parameters: Parameters, weight: float = 1.0) -> ModelSolution:
        """Rules at an interpolation weight, with their value on the answers."""
        value = self._value(parameters.interpolated(weight), self.answers)
        return ModelSolution(parameters, value, weight)

    def at_full_weight(self, solution: ModelSolution) -> ModelSolution:
        """The same rules at interpolation weight 1."""
        return solution if solution.weight == 1 else self.solution(solution.parameters)

    def constrained_value(self, parameters: Parameters) -> Value:
        """The value of rules on the examples that a constraint applies to."""
        return self._value(parameters, self.constrained)

    def _value(self, parameters: Parameters, indices: list[int]) -> Value:
        """The value of rules on some examples, which are passed through the model."""
        rules, scores = parameters.rules(self.scorer.heads), self.objective.baseline.at(indices)
        if rules is not None:
            examples = self.objective.examples
            begin_passes(self.progress, "validation split", examples, examples.units(indices))
            (scores,) = self.scorer.score([rules], indices)
        return self.objective.value(indices, scores)


def validation_indices(objective: ModelObjective, most: int = MAX_VALIDATION) -> list[int]:
    """The validation split: all examples of constrained cells, and `most` answers of others."""
    examples, constrained = objective.examples, objective.constrained_cells
    return limit_per_cell(examples, split(examples, VALIDATION), most, constrained)
