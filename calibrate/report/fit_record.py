"""A fit of one head as a result to show: the rule, its rows, and its gain on held-out rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.evidence.baselines import kind_label
from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Block, Code, Facts, Heading, Table
from calibrate.report.rule_curves import all_constant, constant_text
from calibrate.report.selection import selection_tables
from calibrate.report.usage import usage
from calibrate.report.wording import argument, left_out, polynomial, span
from calibrate.rows.choose_rule import Choice
from calibrate.rows.fit_collection import FitResult
from calibrate.rows.pooling import HARM

WORTH_COLLECTING = 0.001  # nats, by twice the rows


@dataclass(frozen=True)
class FitRecord:
    """The result of `calibrate fit` on one head; the figure is None if it was not drawn."""

    fit: FitResult
    figure: Path | None

    @property
    def coefficients(self) -> Coefficients:
        return self.fit.coefficients

    def as_json(self) -> dict[str, Any]:
        """The rule, its quality, and the paths."""
        coefficients = self.fit.coefficients
        return {
            "reference": coefficients.reference,
            "path": str(coefficients.path),
            "figure": self.figure and str(self.figure),
            "coefficients": list(coefficients.only.coefficients),
            "domain": list(coefficients.only.domain),
            "quality": dict(coefficients.quality),
        }

    def blocks(self) -> Iterable[Block]:
        """The rule, its evidence, and the Python that uses it."""
        yield from self.evidence()
        yield self.usage()

    def evidence(self) -> Iterable[Block]:
        """The rule, its rows, the paths, and its gain on held-out rows."""
        yield Heading(f"Fit {self.fit.coefficients.reference}")
        yield Facts(list(self._facts()))
        if self.fit.choice is not None:
            yield from self._choice_blocks(self.fit.choice)
            advice = advice_on_rows(self.fit.coefficients.quality)
            yield Facts([("verdict", self.fit.choice.verdict), ("more rows", advice)])

    def usage(self) -> Code:
        """The Python that uses the fit."""
        return usage(self.fit.coefficients)

    def _facts(self) -> Iterable[tuple[str, str]]:
        coefficients = self.fit.coefficients
        entry, rule = coefficients.only, coefficients.rule
        rows = coefficients.quality["rows"]
        if all_constant(coefficients):
            yield "rule", constant_text(entry)
        else:
            yield f"beta({argument(rule)})", polynomial(entry.coefficients)
            yield "domain", span(entry.domain, rule.kind)
        if residuals := coefficients.quality.get("residuals"):
            yield (
                "residuals",
                f"beta {residuals['beta_rms']:.3f} (R^2 {residuals['beta_r_squared']:.3f}), "
                f"theta {residuals['theta_rms']:.3f}, root mean square",
            )
        others = ", ".join(f"{count:,} {reason}" for count, reason in left_out(rows))
        used = rows.get("used", rows["interior"])
        yield "rows", f"{used:,} used of {rows['rows']:,}; left out: {others or 'none'}"
        yield "file", str(coefficients.path)
        yield "figure", str(self.figure or "not drawn")

    def _choice_blocks(self, choice: Choice) -> Iterable[Block]:
        """The score on held-out rows by set size, and of each kind of rule and q."""
        quality = self.fit.coefficients.quality
        yield held_out_table(quality["held_out"], choice.options.trained_up_to or 0)
        yield from selection_tables(self.fit.coefficients)
        if choice.left_out:
            reasons = choice.left_out.items()
            yield Facts([(kind_label(kind), f"no fit: {why}") for kind, why in reasons])


def held_out_table(sizes: Iterable[Mapping[str, Any]], trained_up_to: int = 0) -> Table:
    """log p of the target by set size, without and with a fit, as its file has it."""
    held = f"Up to n = {trained_up_to:,}, where the head was trained, a fit may lose {HARM:g} nats."
    return Table(
        columns=("n", "rows", "plain softmax", "this fit", "gain ± standard error"),
        rows=[
            (
                f"{of['size']:,}", f"{of['rows']:,}", f"{of['before']:.3f}", f"{of['after']:.3f}",
                f"{of['after'] - of['before']:+.4f} ± {of['error']:.4f}",
            )
            for of in sizes
        ],
        title="Log-probability of the target in nats, held out (five folds)",
        note=held * bool(trained_up_to),
    )  # fmt: skip


def log_p_gains(fit: Coefficients) -> dict[int, str]:
    """By set size: what a fit adds to log p of the target on held-out rows, in nats."""
    return {
        of["size"]: f"{of['after'] - of['before']:+.3f} ± {of['error']:.3f}"
        for of in fit.quality.get("held_out", [])
        if {"size", "after", "before", "error"} <= of.keys()
    }


def advice_on_rows(quality: Mapping[str, Any]) -> str:
    """Whether more rows would improve the fit, by its learning curve."""
    curve = quality["learning_curve"]
    if len(curve) < 2:
        return "too few to tell"
    half, full = curve[-2], curve[-1]
    gain = full["log_p"] - half["log_p"]
    advice = "more would help" if gain > WORTH_COLLECTING else "more would hardly help"
    if gain < -WORTH_COLLECTING:
        advice = "too few rows to tell it from noise"
    return f"from {half['rows']:,} to {full['rows']:,} changes log p by {gain:+.4f} nats: {advice}"
