"""What a fit through a model aims at: log p of the answers, while others must not get worse.

Templates and lengths count alike. Plain text, and answers up to a trained length, are held: their
mean log p a token may fall by little. Each such constraint has a multiplier that rises when a check
finds it broken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.files.examples import ExampleSet, Scores
from calibrate.model.comparison import Estimate, estimate

ALLOWED_LOSS = 0.005  # nats a token, of held examples
_FIRST = 0.01  # nats of the answers, for all that a constraint allows to lose: its multiplier
_RISE, _FALL = 4.0, 0.5  # of a multiplier


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
        lost = -gain / self.n_answer[index]
        losses = [self._loss([lost[cell == i] for i in cells]) for cells in self.constraints]
        return Value(of_cells, losses, self.allowed)

    @staticmethod
    def _loss(parts: list[np.ndarray]) -> Estimate:
        """The mean over the examples of the cells of a constraint, 0 if there are none.

        Several cells are of text.
        """
        parts = [part for part in parts if len(part)]
        if not parts:
            return Estimate(0.0, np.nan)
        count = np.array([len(part) for part in parts])
        return estimate(parts, count / count.sum(), of_text=True)


class Value(NamedTuple):
    """Of some examples under a rule."""

    gains: list[np.ndarray]  # of each cell of answers: log p beyond that of plain softmax, nats
    losses: list[Estimate]  # of each constraint: nats a token
    allowed: float

    @property
    def gain(self) -> float:
        """Mean over cells, nats."""
        return float(np.mean([gains.mean() for gains in self.gains]))

    @property
    def is_allowed(self) -> bool:
        """Whether no held examples lose more than they may."""
        return all(loss.mean <= self.allowed for loss in self.losses)

    def lead(self, other: "Value | None" = None) -> tuple[float, float]:
        """Mean lead over another rule on the same examples, and its standard error.

        None is plain softmax.
        """
        pairs = self.gains
        if other is not None:
            pairs = [mine - its for mine, its in zip(self.gains, other.gains, strict=True)]
        variances = [pair.var(ddof=1) / len(pair) if len(pair) > 1 else np.inf for pair in pairs]
        return float(np.mean([x.mean() for x in pairs])), float(
            np.sqrt(sum(variances)) / len(pairs)
        )

    def leads_by(self, least: float, other: "Value | None" = None) -> bool:
        """Whether the lead is more than so many nats, and more than its standard error."""
        lead, error = self.lead(other)
        return lead > max(error, least)


class Multipliers:
    """How much each constraint weighs now."""

    def __init__(self, objective: Objective):
        self._objective = objective
        self._each = np.full(len(objective.constraints), _FIRST / max(objective.allowed, 1e-6))

    def weights(self, which: Sequence[int], n_answers: float) -> np.ndarray:
        """d objective / d log p of the examples of a step, (examples,).

        Args:
          n_answers: how many of them are answers, in the mean over steps.
        """
        objective = self._objective
        index = np.asarray(which)
        cell = objective.cell[index]
        weights = np.array([not objective.examples.cells[i].text for i in cell]) / n_answers
        for multiplier, cells in zip(self._each, objective.constraints, strict=True):
            held = np.isin(cell, cells)
            weights += multiplier * held / objective.n_answer[index] / max(1, held.sum())
        return weights

    def adapt(self, value: Value) -> None:
        """Raises those of constraints that are broken, and lowers those that are far from it."""
        losses = np.array([loss.mean for loss in value.losses])
        self._each = np.where(losses > value.allowed, _RISE * self._each, self._each)
        self._each = np.where(losses < value.allowed / 2, _FALL * self._each, self._each)
