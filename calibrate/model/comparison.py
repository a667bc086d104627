"""Comparison of rules on the examples of a model: answers right and log p, paired by example.

A cell is a template at a length. Cells count alike, whatever the number of their examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.files.examples import Cell, ExampleSet, Scores
from calibrate.maths.student import widening

PLAIN = "plain"
LOG_P, RIGHT = "log_p", "right"  # measures
CERTAIN = 2.0  # standard errors
LEAST_ALIKE = 6  # answers that all turn alike: of fewer, chance gives one sign too often


class Estimate(NamedTuple):
    """A mean, or a mean difference, over cells."""

    mean: float
    # Standard error, as much wider as Student's t is; NaN where a cell has one example, or fewer
    # than LEAST_ALIKE answers all turn alike.
    error: float

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
        found = self._estimate(self._of(rule, measure) - self._of(over, measure), cells)
        few = measure == RIGHT and self.count(cells) < LEAST_ALIKE
        return found._replace(error=np.nan) if few and found.mean and not found.error else found

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
        parts = [value[self.cell == i] for i in cells]
        of_text = all(self.cells[i].text for i in cells)
        return estimate(parts, np.full(len(parts), 1 / len(parts)), of_text)


def estimate(parts: Sequence[np.ndarray], share: np.ndarray, of_text: bool) -> Estimate:
    """`over_cells` of (examples,) values, the error as wide as Student's t has it."""
    mean, error, freedom = over_cells(parts, share, of_text)
    return Estimate(float(mean), float(error * widening(freedom)))


def over_cells(
    parts: Sequence[np.ndarray], share: np.ndarray, of_text: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A mean over cells, its standard error, and the degrees of freedom of that.

    Answers are independent, with freedom by Welch and Satterthwaite. Text of all lengths is the
    same text: its errors add up.

    Args:
      parts: of each cell, (examples, ...).
      share: (cells,) of the mean, adding up to 1.
      of_text: whether all cells are of text.
    Returns:
      (...) each; NaN for the error and 0 degrees where a cell has one example.
    """
    count = np.array([len(part) for part in parts])
    mean = np.tensordot(share, [part.mean(axis=0) for part in parts], 1)
    if count.min() < 2:
        return mean, np.full_like(mean, np.nan), np.zeros_like(mean)
    errors = np.array([part.std(axis=0, ddof=1) / np.sqrt(len(part)) for part in parts])
    errors = (share * errors.T).T
    if of_text:
        return mean, errors.sum(axis=0), np.full_like(mean, count.min() - 1)
    total = np.sum(errors**2, axis=0)
    lost = np.tensordot(1 / (count - 1), errors**4, 1)
    freedom = np.where(lost > 0, total**2 / np.where(lost > 0, lost, 1), count.sum() - len(parts))
    return mean, np.sqrt(total), freedom


def plain_alone(examples: ExampleSet, scores: Scores) -> ExampleComparison:
    """Plain softmax on all examples, by its scores of them."""
    return compare(examples, range(len(examples.examples)), {PLAIN: scores})


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
