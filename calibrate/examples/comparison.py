"""Comparison of rules on the examples of a model: answers right and log p, paired by example.

A cell is a template at a length. Cells count alike, whatever the number of their examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.files.example_set import Cell, ExampleSet, Scores

PLAIN = "plain"
LOG_P, RIGHT = "log_p", "right"  # measures
CERTAIN = 2.0  # standard errors


class Estimate(NamedTuple):
    """A mean, or a mean difference, over cells."""

    mean: float
    error: float  # standard error; NaN where a cell has one example

    @property
    def sign(self) -> int:
        """1 or -1 where it is beyond two standard errors, else 0."""
        return int(np.sign(self.mean)) if abs(self.mean) > CERTAIN * self.error else 0


@dataclass(frozen=True)
class ExampleComparison:
    """Rules on the same examples.

    Attributes:
      rules: their names, plain softmax first.
      cells: those that have examples.
      cell: (examples,) int, the place of each one's cell in `cells`.
      values: of each measure, (rules, examples). "log_p" is in nats of the whole answer, of text
        per token; "right" is 1 where the whole answer is right and else 0, of text the share of
        its tokens.
    """

    rules: tuple[str, ...]
    cells: tuple[Cell, ...]
    cell: np.ndarray
    values: Mapping[str, np.ndarray]

    def members(
        self, text: bool = False, length: int | None = None, template: str | None = None
    ) -> list[int]:
        """The cells of answers, or of text; of a length, or of a template."""
        return [
            i for i, cell in enumerate(self.cells)
            if cell.text is text and length in (None, cell.length)
            and template in (None, cell.template)
        ]  # fmt: skip

    def lengths(self, text: bool = False) -> list[int]:
        """The lengths of answers, or of text, rising."""
        return sorted({self.cells[i].length for i in self.members(text)})

    def count(self, cells: Sequence[int]) -> int:
        """The examples of some cells."""
        return int(np.isin(self.cell, cells).sum())

    def mean(self, rule: str, measure: str, cells: Sequence[int]) -> Estimate:
        """The mean over some cells, each with the same weight."""
        return self._estimate(self._of(rule, measure), cells)

    def gain(self, rule: str, measure: str, cells: Sequence[int], over: str = PLAIN) -> Estimate:
        """What a rule adds to another one, by the differences on each example."""
        return self._estimate(self._of(rule, measure) - self._of(over, measure), cells)

    def best(self, measure: str, cells: Sequence[int], among: Sequence[str] = ()) -> str:
        """The rule of the highest mean; of equal ones the first."""
        return max(among or self.rules, key=lambda rule: self.mean(rule, measure, cells).mean)

    def rivals(self, rule: str, measure: str, cells: Sequence[int]) -> list[str]:
        """The rules that one is not ahead of by two standard errors."""
        others = [other for other in self.rules if other != rule]
        return [x for x in others if self.gain(rule, measure, cells, over=x).sign < 1]

    def _of(self, rule: str, measure: str) -> np.ndarray:
        row: np.ndarray = self.values[measure][self.rules.index(rule)]
        return row

    def _estimate(self, value: np.ndarray, cells: Sequence[int]) -> Estimate:
        """Answers are independent. Text of all lengths is the same text: its errors add up."""
        parts = [value[self.cell == i] for i in cells]
        mean = np.mean([part.mean() for part in parts])
        if min(map(len, parts)) < 2:
            return Estimate(float(mean), np.nan)
        errors = np.array([part.std(ddof=1) / np.sqrt(len(part)) for part in parts])
        of_text = all(self.cells[i].text for i in cells)
        error = errors.mean() if of_text else np.sqrt((errors**2).sum()) / len(errors)
        return Estimate(float(mean), float(error))


def compare(
    examples: ExampleSet, which: Sequence[int], scores: Mapping[str, Scores]
) -> ExampleComparison:
    """Compares rules by their scores of some examples.

    Args:
      examples: of all cells.
      which: numbers of those that were scored.
      scores: by rule, with an entry for each of `which`; plain softmax is "plain".
    """
    all_cells = np.array([examples.examples[i].cell for i in which])
    present, cell = np.unique(all_cells, return_inverse=True)
    cells = tuple(examples.cells[i] for i in present)
    per_token, n_answer = np.array([c.text for c in cells])[cell], examples.n_answer(which)
    rules = (PLAIN, *(rule for rule in scores if rule != PLAIN))
    log_p = [scores[rule].log_p / np.where(per_token, n_answer, 1) for rule in rules]
    share = [scores[rule].right / n_answer for rule in rules]
    right = [np.where(per_token, x, x == 1) for x in share]
    return ExampleComparison(rules, cells, cell, {LOG_P: np.array(log_p), RIGHT: np.array(right)})
