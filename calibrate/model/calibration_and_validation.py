"""The splits of a fit as it uses them: calibration gives gradients, and validation values of rules.

The validation split stops a search, prunes heads, and limits the interpolation weight.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from calibrate.datasets.examples import ExampleSet, Scores
from calibrate.model.batch_sampler import BatchSampler
from calibrate.model.batches import begin_passes
from calibrate.model.model_scorer import ModelScorer
from calibrate.model.objective import ModelObjective, Value
from calibrate.model.parameters import HeadId, Parameters, RuleFamily
from calibrate.model.splits import CALIBRATION, VALIDATION, first_of_cells, split
from calibrate.parallel import SILENT, Progress
from calibrate.store.coefficients import Coefficients

MAX_VALIDATION = 32  # examples of a template and length, unless a constraint applies to it


class ModelSolution(NamedTuple):
    """The best rules of a family, and their value on the validation split."""

    parameters: Parameters  # at interpolation weight 1
    value: Value
    weight: float = 1.0  # the interpolation weight

    @property
    def family(self) -> RuleFamily:
        """The family of the rules."""
        return self.parameters.family

    @property
    def applied(self) -> Parameters:
        """The rules at their interpolation weight."""
        return self.parameters.interpolated(self.weight)

    def heads_changed(self, heads: list[HeadId]) -> list[HeadId]:
        """The heads of a model whose beta is not 1, or not what all have in common."""
        return self.applied.heads_changed(heads)

    def rules(self, heads: list[HeadId]) -> Coefficients | None:
        """The rules of the heads of a model; None where beta is 1 on all."""
        return self.applied.rules(heads)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The calibration split in batches of answers, one for each step of an optimiser."""

    scorer: ModelScorer
    sampler: BatchSampler
    examples: ExampleSet
    max_steps: int
    progress: Progress = SILENT

    def begin(self, stage: str, passes: Iterable[Sequence[int]]) -> None:
        """Begins a stage of some passes, the indices of the examples of each."""
        begin_passes(self.progress, stage, self.examples, passes)

    def batches(self) -> Iterator[list[int]]:
        """The indices of the examples of each step."""
        return islice(self.sampler, self.max_steps)

    def epoch(self) -> Iterator[list[int]]:
        """The batches in which each example comes once, or as many as there are steps."""
        return islice(self.sampler, min(self.max_steps, self.sampler.n_once))

    def gradient(self, parameters: Parameters, indices: list[int]) -> np.ndarray:
        """The gradient of the mean log p of a batch by the numbers, (rows, columns)."""
        weights = np.full(len(indices), 1 / self.sampler.n_answers)
        return self.scorer.gradient(parameters, indices, weights)


@dataclass(frozen=True, eq=False)
class Validation:
    """The validation split under rules."""

    scorer: ModelScorer
    objective: ModelObjective
    indices: list[int]  # of the examples
    progress: Progress = SILENT

    @cached_property
    def answers(self) -> list[int]:
        """The indices of the answers."""
        return self._of_cells(np.flatnonzero(~self.objective.is_text))

    @cached_property
    def text(self) -> list[int]:
        """The indices of the windows of retention text."""
        return self._of_cells(np.flatnonzero(self.objective.is_text))

    @cached_property
    def constrained(self) -> list[int]:
        """The indices of the examples that a constraint applies to."""
        return self._of_cells(sorted(self.objective.constrained_cells))

    def _of_cells(self, cells: Sequence[int] | np.ndarray) -> list[int]:
        chosen = np.isin(self.objective.cell[self.indices], cells)
        return [i for i, is_chosen in zip(self.indices, chosen, strict=True) if is_chosen]

    def baseline(self, family: RuleFamily) -> ModelSolution:
        """The baseline, whose scores are known."""
        scores = self.objective.plain.at(self.answers)
        parameters = family.baseline(self.scorer.heads)
        return ModelSolution(parameters, self.objective.value(self.answers, scores))

    def solution(self, parameters: Parameters, weight: float = 1.0) -> ModelSolution:
        """Rules at an interpolation weight, with their value by the answers alone."""
        (value,) = self.values([parameters.interpolated(weight)], self.answers)
        return ModelSolution(parameters, value, weight)

    def at_full_weight(self, solution: ModelSolution) -> ModelSolution:
        """The same rules at interpolation weight 1, with their value by the answers alone."""
        return solution if solution.weight == 1 else self.solution(solution.parameters)

    def constrained_values(self, parameters: Sequence[Parameters]) -> list[Value]:
        """The value of each rule by the examples that a constraint applies to."""
        return self.values(parameters, self.constrained)

    def values(self, parameters: Sequence[Parameters], indices: list[int]) -> list[Value]:
        """The value of each rule by some examples."""
        rules = [x.rules(self.scorer.heads) for x in parameters]
        changing = {i: rule for i, rule in enumerate(rules) if rule is not None}
        scores = self._scores(list(changing.values()), indices) if changing else []
        changed = dict(zip(changing, scores, strict=True))
        baseline = self.objective.plain.at(indices)
        return [self.objective.value(indices, changed.get(i, baseline)) for i in range(len(rules))]

    def _scores(self, rules: Sequence[Coefficients], indices: list[int]) -> list[Scores]:
        """The scores of some examples under each rule, in a stage of the progress."""
        examples = self.objective.examples
        begin_passes(
            self.progress, "validation split", examples, examples.units(indices) * len(rules)
        )
        return self.scorer.score(rules, indices)


def calibration_of(
    scorer: ModelScorer,
    examples: ExampleSet,
    max_steps: int,
    seed: int,
    progress: Progress = SILENT,
) -> Calibration:
    """The calibration split, in batches whose order depends on a seed."""
    indices = np.array(split(examples, CALIBRATION))
    sampler = BatchSampler(examples, indices, seed)
    return Calibration(scorer, sampler, examples, max_steps, progress)


def validation_indices(objective: ModelObjective, max_of_a_cell: int = MAX_VALIDATION) -> list[int]:
    """The validation split: all examples of constrained cells, and some of the others."""
    examples, constrained = objective.examples, objective.constrained_cells
    return first_of_cells(examples, split(examples, VALIDATION), max_of_a_cell, constrained)
