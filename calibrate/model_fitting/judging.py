"""What rules are worth on examples that no fit has seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.example_set import Scores
from calibrate.fitting.gain import CHANCE, LEAST_GAIN
from calibrate.model_fitting.objective import Objective, Value

PLAIN, OWN, PAPER = "plain", "own", "the paper's numbers"
ONE_CONSTANT, ONE_LINE = "one constant", "one line in log n"  # on every head


@dataclass(frozen=True)
class Judged:
    """Scores of a fit, OWN, and of its rivals by label, on some examples.

    Attributes:
      objective: of the fit, with plain softmax's scores.
      which: the examples.
      scores: an entry for each of them.
    """

    objective: Objective
    which: Sequence[int]
    scores: Mapping[str, Scores]

    def value(self, label: str) -> Value:
        """Relative to plain softmax."""
        return self.objective.value(self.which, self.scores[label].log_p)

    def gain(self, label: str) -> tuple[float, float]:
        """Nats of log p of the answers, cells alike, with a standard error."""
        value = self.value(label)
        return value.lead(value._replace(gains=[np.zeros_like(x) for x in value.gains]))

    def right(self, label: str) -> float:
        """The share of the answers that are wholly right, cells alike."""
        index = np.asarray(self.which)
        plain = self.objective.plain.right[index]
        n_right = plain if label == PLAIN else self.scores[label].right
        whole, cell = n_right == self.objective.n_answer[index], self.objective.cell[index]
        answers = [i for i in np.unique(cell) if not self.objective.examples.cells[i].text]
        return float(np.mean([whole[cell == i].mean() for i in answers]))

    def by_length(self) -> list[dict[str, Any]]:
        """log p of the answers of each length under plain softmax and under the fit."""
        index, cells = np.asarray(self.which), self.objective.examples.cells
        after, before = self.scores[OWN].log_p, self.objective.plain.log_p[index]
        cell = self.objective.cell[index]
        lengths = np.array([0 if cells[i].text else cells[i].length for i in cell])
        rows = []
        for length in np.unique(lengths[lengths > 0]).tolist():
            own = lengths == length
            n, difference = int(own.sum()), (after - before)[own]
            error = float(difference.std(ddof=1) / np.sqrt(n)) if n > 1 else float(abs(difference))
            row = (length, n, float(before[own].mean()), float(after[own].mean()), error)
            rows.append(dict(zip(("size", "rows", "before", "after", "error"), row, strict=True)))
        return rows

    def require_worth(self, allowed: float) -> None:
        """Raises QualityError if the fit is not worth it, or held examples lose evidently more."""
        from scipy.special import ndtri

        (gain, error), value = self.gain(OWN), self.value(OWN)
        if gain < LEAST_GAIN or gain < -ndtri(CHANCE) * error:
            raise QualityError(
                f"not for this model: log p of the answers changes by {gain:+.3f} ± {error:.3f} "
                f"nats {self._seen()}; collect more examples, or see `calibrate diagnose`"
            )
        if (lost := max(value.losses, default=0.0)) > 2 * allowed:
            raise QualityError(
                f"what may lose {allowed:g} nats a token loses {lost:.4f} {self._seen()}; collect "
                "more plain text, or allow more with --allowed-loss"
            )

    def summary(self) -> str:
        """What the fit is worth, and whether a rule for all heads does as well."""
        (gain, error), losses = self.gain(OWN), self.value(OWN).losses
        held = f"; held tokens lose {max(losses):.4f} nats at most" if losses else ""
        as_good = [
            label
            for label in (ONE_CONSTANT, ONE_LINE)
            if label in self.scores
            and (lead := self.value(OWN).lead(self.value(label)))[0] < 2 * lead[1]
        ]
        rivals = f"; {as_good[0]} on every head does as well" if as_good else ""
        return (
            f"answers right {self.right(PLAIN):.1%} to {self.right(OWN):.1%}, log p {gain:+.3f} ± "
            f"{error:.3f} nats {self._seen()}{held}{rivals}"
        )

    def _seen(self) -> str:
        return f"on {sum(map(len, self.value(OWN).gains)):,} answers that no fit has seen"
