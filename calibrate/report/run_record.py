"""Results of `calibrate report` and `calibrate run`: verdict and page, fit and accuracies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.evidence.evidence import Evidence as Score
from calibrate.report.blocks import Block, Facts, Table, Text
from calibrate.report.fit_record import FitRecord, log_p_gains
from calibrate.report.wording import NOTHING

if TYPE_CHECKING:
    from calibrate.report.logits_record import LogitsRecord
    from calibrate.report.model_fit_record import ModelFitRecord
    from calibrate.report.model_scores_record import ModelScoresRecord
    from calibrate.report.per_head_record import PerHeadRecord


@dataclass(frozen=True)
class ReportRecord:
    """The result of `calibrate report`."""

    verdict: str
    path: Path | None  # None: it could not be written
    rivals: str | None = None  # how the fit compares with simpler rules, if they were scored

    def as_json(self) -> dict[str, Any]:
        """The sentences and the path."""
        rivals = {} if self.rivals is None else {"rivals": self.rivals}
        return {"verdict": self.verdict, **rivals, "report": self.path}

    def blocks(self) -> Iterable[Block]:
        """The sentences and the path."""
        yield Text(f"\n{self.verdict}")
        if self.rivals:
            yield Text(self.rivals)
        yield Facts([("report", str(self.path or "not written"))])


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
        rows, log_p = [], log_p_gains(self.fit.fit.coefficients)
        for score in self.scores:
            gain, error = score.gain("own", over="plain")
            accuracies = (
                f"{100 * score.accuracy(rule):.1f} ± {100 * score.standard_error(rule):.1f}"
                for rule in ("plain", "paper", "own")
            )
            gains = f"{100 * gain:+.1f} ± {100 * error:.1f}", log_p.get(score.size, NOTHING)
            rows.append((f"{score.size:,}", *accuracies, *gains))
        own = self.fit.fit.coefficients.reference
        compared = ("plain softmax", "the paper's numbers", own)
        return Table(
            columns=("n", *compared, "gain over plain", "log p gain"),
            rows=rows,
            title=f"Accuracy of {self.head} in % ± standard error, "
            f"on {self.scores[0].sets:,} fresh sets of each size",
            note="Gains in points, and in nats of log p of the target on held-out rows.",
        )


@dataclass(frozen=True)
class OwnRunRecord:
    """The result of `calibrate run` on logits or a model of one's own."""

    fit: "FitRecord | PerHeadRecord | ModelFitRecord"
    scores: "LogitsRecord | ModelScoresRecord"
    report: ReportRecord

    def as_json(self) -> dict[str, Any]:
        """The fit, the report's verdict and path, and the scores that `evaluate` would print."""
        return self.fit.as_json() | self.report.as_json() | {"scores": self.scores.as_json()}

    def blocks(self) -> Iterable[Block]:
        """The fit, its scores on what it was not made of, and the line that loads it."""
        *evidence, usage = self.fit.blocks()
        yield from evidence
        yield from self.scores.blocks()
        yield Facts([("report", str(self.report.path or "not written"))])
        yield usage


def _score_json(score: Score) -> dict[str, Any]:
    mean, error = score.gain("own", over="plain")
    accuracies = {
        rule: {"accuracy": score.accuracy(rule), "error": score.standard_error(rule)}
        for rule in score.correct
    }
    gain = {"mean": mean, "error": error}
    return {"size": score.size, "sets": score.sets, **accuracies, "gain": gain}
