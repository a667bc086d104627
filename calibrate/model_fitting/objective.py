"""What a fit through a model aims at: log p of the answers, while others must not get worse.

Templates and lengths count alike. Plain text, and answers up to a trained length, are held: their
mean log p a token may fall by little. Each such constraint has a multiplier that rises while it is
broken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.files.example_set import ExampleSet, Scores

ALLOWED_LOSS = 0.005  # nats a token, of held examples
# The multiplier of a constraint: nats of the answers for a nat a token of what is held.
_AT_ONCE, _EACH_STEP, _MEMORY = 300.0, 100.0, 0.8


@dataclass(frozen=True)
class Objective:
    """Examples with the scores of plain softmax, and which of them are held.

    Attributes:
      plain: scores of plain softmax, an entry per example.
      trained_up_to: length in tokens up to which answers are held too; None or 0 for none.
      allowed: nats a token that held examples may lose in the mean.
    """

    examples: ExampleSet
    plain: Scores
    trained_up_to: int | None = None
    allowed: float = ALLOWED_LOSS

    def __post_init__(self) -> None:
        everything = self.examples.examples
        object.__setattr__(self, "cell", np.array([example.cell for example in everything]))
        object.__setattr__(self, "n_answer", self.examples.n_answer(range(len(everything))))

    cell: np.ndarray = None  # type: ignore[assignment]  # (examples,)
    n_answer: np.ndarray = None  # type: ignore[assignment]  # (examples,) tokens

    @property
    def constraints(self) -> list[list[int]]:
        """The cells of each constraint: plain text, and every trained cell of answers."""
        cells = self.examples.cells
        text = [i for i, cell in enumerate(cells) if cell.text]
        most = self.trained_up_to or 0
        trained = [[i] for i, cell in enumerate(cells) if not cell.text and cell.length <= most]
        return ([text] if text else []) + trained

    def value(self, which: Sequence[int], log_p: np.ndarray) -> "Value":
        """What some examples are worth; their log p under a rule, and in the same order."""
        index = np.asarray(which)
        gain, cell = log_p - self.plain.log_p[index], self.cell[index]
        answers = [i for i in np.unique(cell) if not self.examples.cells[i].text]
        of_cells = [gain[cell == i] for i in answers]
        losses = []
        for cells in self.constraints:
            held = np.isin(cell, cells)
            if held.any():
                losses.append(float(np.mean(-gain[held] / self.n_answer[index][held])))
        return Value(of_cells, losses, self.allowed)


class Value(NamedTuple):
    """Of some examples under a rule."""

    gains: list[np.ndarray]  # of each cell of answers: log p beyond that of plain softmax, nats
    losses: list[float]  # of each constraint: nats a token
    allowed: float

    @property
    def gain(self) -> float:
        """Mean over cells, nats."""
        return float(np.mean([gains.mean() for gains in self.gains]))

    @property
    def is_allowed(self) -> bool:
        """Whether no held examples lose more than they may."""
        return all(loss <= self.allowed for loss in self.losses)

    def lead(self, other: "Value") -> tuple[float, float]:
        """Mean lead over another rule on the same examples, and its standard error."""
        pairs = [mine - its for mine, its in zip(self.gains, other.gains, strict=True)]
        variances = [pair.var(ddof=1) / len(pair) if len(pair) > 1 else np.inf for pair in pairs]
        return float(np.mean([x.mean() for x in pairs])), float(
            np.sqrt(sum(variances)) / len(pairs)
        )


class Multipliers:
    """How much each constraint weighs now."""

    def __init__(self, objective: Objective):
        self._objective = objective
        n = len(objective.constraints)
        self._total, self._recent = np.zeros(n), np.zeros(n)

    def weights(self, which: Sequence[int], n_answers: float) -> np.ndarray:
        """d objective / d log p of the examples of a step, (examples,).

        Args:
          n_answers: how many of them are answers, in the mean over steps.
        """
        objective = self._objective
        index = np.asarray(which)
        cell = objective.cell[index]
        is_answer = np.array([not objective.examples.cells[i].text for i in cell])
        weights = is_answer / n_answers
        excess = self._recent - objective.allowed / 2
        multipliers = np.maximum(0.0, self._total + _AT_ONCE * excess)
        for multiplier, cells in zip(multipliers, objective.constraints, strict=True):
            held = np.isin(cell, cells)
            weights += multiplier * held / objective.n_answer[index] / max(1, held.sum())
        return weights

    def update(self, which: Sequence[int], log_p: np.ndarray) -> None:
        """Takes what the examples of a step lost into account."""
        objective = self._objective
        index = np.asarray(which)
        loss = (objective.plain.log_p[index] - log_p) / objective.n_answer[index]
        for i, cells in enumerate(objective.constraints):
            held = np.isin(objective.cell[index], cells)
            if held.any():
                self._recent[i] += (1 - _MEMORY) * (loss[held].mean() - self._recent[i])
                excess = self._recent[i] - objective.allowed / 2
                self._total[i] = max(0.0, self._total[i] + _EACH_STEP * excess)
