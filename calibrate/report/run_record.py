"""The result of `calibrate run`: the fit, the head's accuracy with and without it, the report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from calibrate.evaluation.score_head import Score
from calibrate.report.blocks import Block, Table
from calibrate.report.fit_record import FitRecord
from calibrate.report.report_record import ReportRecord


@dataclass(frozen=True)
class RunRecord:
    """The result of `calibrate run`."""

    fit: FitRecord
    head: str
    scores: Sequence[Score]  # of plain softmax, the paper's numbers and the fit
    report: ReportRecord

    def as_json(self) -> dict[str, Any]:
        """The fit, the report's sentences, and the scores as shares."""
        scores = [_score_json(score) for score in self.scores]
        return self.fit.as_json() | self.report.as_json() | {"scores": scores}

    def blocks(self) -> Iterable[Block]:
        """The fit, a table of accuracies, the verdict, and the line that loads the fit."""
        yield from self.fit.evidence()
        yield self._accuracy()
        yield from self.report.blocks()
        yield self.fit.usage()

    def _accuracy(self) -> Table:
        rows = []
        for score in self.scores:
            gain, error = score.gain("own", over="plain")
            accuracies = (
                _percent(score.accuracy(rule), score.standard_error(rule))
                for rule in ("plain", "paper", "own")
            )
            rows.append((f"{score.size:,}", *accuracies, f"{100 * gain:+.1f} ± {100 * error:.1f}"))
        own = self.fit.fit.coefficients.reference
        return Table(
            columns=("n", "plain softmax", "the paper's numbers", own, "gain over plain"),
            rows=rows,
            title=f"Accuracy of {self.head} in % ± standard error, "
            f"on {self.scores[0].sets:,} fresh sets of each size",
        )


def _percent(share: float, error: float) -> str:
    return f"{100 * share:.1f} ± {100 * error:.1f}"


def _score_json(score: Score) -> dict[str, Any]:
    mean, error = score.gain("own", over="plain")
    accuracies = {
        rule: {"accuracy": score.accuracy(rule), "error": score.standard_error(rule)}
        for rule in score.correct
    }
    gain = {"mean": mean, "error": error}
    return {"size": score.size, "sets": score.sets, **accuracies, "gain": gain}
