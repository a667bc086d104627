"""The splits of a fit as it uses them: calibration gives gradients, and validation values of rules.

The validation split stops a search, prunes heads, and limits the interpolation weight. A fit sees
the model through a `ModelScorer`, which runs it under rules of its heads. It gives log p of
answers, the KL of text, and the derivatives of both by the numbers of the rules. The fit uses
nothing else of the model. The implementations:

* `TransformersScorer` (`transformers_scorer.py`): a causal language model and its examples; results
  are cached, and workers share the batches. Used by `calibrate model fit`.
* `BatchScorer` (`calibrate/batch_fit.py`): a PyTorch module and batches with a function that gives
  log p. Used by `calibrate.fit_model`.
* `QuadraticScorer` (`tests/fakes.py`): gains known in closed form, for tests without a model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import NamedTuple, Protocol

import numpy as np

from calibrate.datasets.examples import ExampleSet, Scores
from calibrate.model.batches import begin_passes
from calibrate.model.objective import ModelObjective, Value
from calibrate.model.parameters import HeadId, Parameters, RuleFamily
from calibrate.model.questions import answers_of
from calibrate.model.splits import CALIBRATION, VALIDATION, first_of_cells, split
from calibrate.parallel import SILENT, Progress
from calibrate.store.fit import Fit

TOKENS_A_STEP = 4096
MAX_OF_A_CELL = 8  # examples of a template and length in a batch
MAX_VALIDATION = 32  # examples of a template and length, unless a constraint applies to it


class ModelScorer(Protocol):
    """Scores of a model's examples under rules of its heads, and their derivatives.

    Examples are given by their indices in the example set of the fit.
    """

    @property
    def heads(self) -> list[HeadId]:
        """The heads of the model."""
        ...

    def score(self, rules: Sequence[Fit], indices: Sequence[int]) -> list[Scores]:
        """The scores of some examples under each rule; nats."""
        ...

    def gradient(
        self, parameters: Parameters, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers, (rows, columns).

        Log p of a question with several right answers is that of any of them; all have its weight.
        """
        ...

    def fisher_scores(self, parameters: Parameters, indices: Sequence[int]) -> np.ndarray:
        """Derivatives of log p of tokens that are drawn from the predictions of windows of text.

        (windows, rows, columns), over the root of the number of tokens: their squares add up to the
        Fisher information, the second derivatives of the KL of text, nats a token.
        """
        ...


class BatchSampler:
    """Batches of about `tokens` tokens of answers, without end, with `n_answers` in the mean.

    A batch has as many examples of each cell as it has room for. Where one of each cell is too
    much, it has some cells, and the next batch the next ones. In `n_once` batches, an epoch, each
    example comes once.
    The right answers to one question come together, and count as one.
    """

    def __init__(
        self, examples: ExampleSet, indices: np.ndarray, seed: int, tokens: int = TOKENS_A_STEP
    ):
        self._answers = {x[0]: x for x in answers_of(examples, indices.tolist())}
        firsts = np.array(list(self._answers), int)
        cell = np.array([examples.examples[i].cell for i in firsts])
        lengths = np.array(
            [sum(len(examples.examples[i].tokens) for i in x) for x in self._answers.values()]
        )
        members = {int(i): firsts[cell == i] for i in np.unique(cell)}
        length = {i: int(lengths[cell == i].max()) for i in members}
        answers = [i for i in members if not examples.cells[i].text]
        has_room_for = tokens // sum(length[i] for i in answers)
        self._of_each = min(MAX_OF_A_CELL, max(1, has_room_for))
        answers = np.random.default_rng(seed).permutation(answers).tolist()  # templates are mixed
        sizes = [self._of_each * length[i] for i in answers]
        self._groups = _groups(answers, sizes, tokens)
        self.n_answers = self._of_each * len(answers) / len(self._groups)
        most = max(len(members[i]) for i in answers)
        self.n_once = len(self._groups) * -(-most // self._of_each)
        self._members, self._seed = members, seed

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(self._seed)
        streams = {i: _shuffled(members, rng) for i, members in self._members.items()}
        for cells in cycle(self._groups):
            firsts = [next(streams[i]) for i in cells for _ in range(self._of_each)]
            yield [answer for first in firsts for answer in self._answers[first]]


def _groups(items: list[int], sizes: list[int], room: float) -> list[list[int]]:
    """The items in their order, in groups that have room; of one item at least."""
    groups, left = list[list[int]](), 0.0
    for item, size in zip(items, sizes, strict=True):
        if not groups or size > left:
            groups.append([])
            left = room
        groups[-1].append(item)
        left -= size
    return groups


def _shuffled(items: np.ndarray, rng: np.random.Generator) -> Iterator[int]:
    """The items in a new order each time round."""
    while True:
        yield from rng.permutation(items).tolist()


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

    def rules(self, heads: list[HeadId]) -> Fit | None:
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

    def _scores(self, rules: Sequence[Fit], indices: list[int]) -> list[Scores]:
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
