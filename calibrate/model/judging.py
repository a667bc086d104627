"""What a fit and its rivals are worth on examples that none of them has seen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.errors import QualityError
from calibrate.evidence.prior import LEAST_GAIN
from calibrate.model.comparison import (
    CERTAIN,
    LOG_P,
    PLAIN,
    RIGHT,
    Estimate,
    ExampleComparison,
)  # fmt: skip
from calibrate.model.verdict import shares

OWN, PAPER = "own", "the paper's numbers"
FREE = "best without --for-export"
ONE_CONSTANT, ONE_LINE = "one constant", "one line in log n"  # on every head


class NotWorthItError(QualityError):
    """No rule is worth publishing.

    Attributes:
      comparison: of plain softmax, and of a fit that was judged, that and its rivals.
    """

    def __init__(self, message: str, comparison: ExampleComparison) -> None:
        super().__init__(message)
        self.comparison = comparison


@dataclass(frozen=True)
class Judged:
    """A fit, OWN, beside its rivals.

    Attributes:
      comparison: with plain softmax.
      losses: nats a token that each held part of the examples loses, by rule.
      allowed: nats a token that it may lose.
      beside: of a fit for export, the rule that is best without that constraint: FREE, or OWN
        itself, or plain softmax; else None.
    """

    comparison: ExampleComparison
    losses: Mapping[str, list[Estimate]]
    allowed: float
    beside: str | None = None

    def gain(self, rule: str, over: str = PLAIN) -> Estimate:
        """Nats of log p of the answers, cells alike."""
        return self.comparison.gain(rule, LOG_P, self.comparison.members(), over)

    def right(self, rule: str) -> float:
        """The share of the answers that are wholly right, cells alike."""
        return self.comparison.mean(rule, RIGHT, self.comparison.members()).mean

    def lost(self, rule: str) -> Estimate | None:
        """Nats a token that the held part with most to lose loses; None if nothing is held."""
        return max(self.losses[rule], default=None)

    def _lost_too_much(self, rule: str) -> Estimate | None:
        """The most that a held part loses; None if none evidently loses more than it may."""
        evident = [
            lost for lost in self.losses[rule]
            if lost.mean > self.allowed and not lost.mean - CERTAIN * lost.error <= self.allowed
        ]  # fmt: skip
        return max(evident, default=None)

    @property
    def export_cost(self) -> Estimate | None:
        """Nats of log p of the answers that a fit for export gives away; None of other fits."""
        return None if self.beside is None else self.gain(self.beside, OWN)

    def export_cost_in_words(self, free: str) -> str:
        """Of a fit for export; `free` is what the best rule is without that constraint."""
        if self.beside == OWN or self.export_cost is None:
            return "export costs nothing: no other kind is better"
        mean, error = self.export_cost
        if self.export_cost.sign < 1:
            return f"export costs nothing beyond chance ({mean:+.3f} ± {error:.3f} nats an answer)"
        return f"export costs {mean:+.3f} ± {error:.3f} nats an answer, beside {free}"

    def by_length(self) -> list[dict[str, Any]]:
        """log p of the answers of each length under plain softmax and under the fit."""
        rows, found = [], self.comparison
        for length in found.lengths():
            cells = found.members(length=length)
            before, after = (found.mean(rule, LOG_P, cells).mean for rule in (PLAIN, OWN))
            error = found.gain(OWN, LOG_P, cells).error
            row = (length, found.count(cells), before, after, error)
            rows.append(dict(zip(("size", "rows", "before", "after", "error"), row, strict=True)))
        return rows

    def require_worth(self) -> None:
        """Raises if the fit is not worth it, or what is held loses evidently more.

        Raises:
          NotWorthItError: it does.
        """
        gain, seen = self.gain(OWN), self._seen()
        if gain.mean < LEAST_GAIN or gain.sign < 1:
            advice = "collect more examples, or see `calibrate diagnose`"
            if not self.right(PLAIN):
                advice = "the model gets no answer right: give prompts that it can answer in part"
            raise NotWorthItError(
                f"not for this model: log p of the answers changes by {gain.mean:+.3f} ± "
                f"{gain.error:.3f} nats {seen}; {advice}",
                self.comparison,
            )
        if lost := self._lost_too_much(OWN):
            raise NotWorthItError(
                f"what may lose {self.allowed:g} nats a token loses {lost.mean:.4f} ± "
                f"{lost.error:.4f} {seen}; collect more of it, or allow more with --allowed-loss",
                self.comparison,
            )

    def summary(self) -> str:
        """What the fit is worth, and whether a rule for all heads does as well."""
        gain, lost = self.gain(OWN), self.lost(OWN)
        held = f"; held tokens change by {-lost.mean:+.4f} ± {lost.error:.4f} nats" if lost else ""
        as_good = [
            rule
            for rule in (ONE_CONSTANT, ONE_LINE)
            if rule in self.comparison.rules and self.gain(OWN, rule).sign < 1
        ]
        rivals = f"; {as_good[0]} on every head does as well" if as_good else ""
        return (
            f"log p {gain.mean:+.3f} ± {gain.error:.3f} nats, answers right "
            f"{shares(self.comparison, OWN, self.comparison.members())}, {self._seen()}{held}"
            f"{rivals}"
        )

    def _seen(self) -> str:
        count = self.comparison.count(self.comparison.members())
        return f"on {count:,} answers that no fit has seen"
