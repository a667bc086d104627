"""A fit per head as a result to show: the heads that gain, and where the file is."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table
from calibrate.report.rule_curves import all_constant, beta_text, of_both
from calibrate.report.usage import usage
from calibrate.report.wording import argument, polynomial
from calibrate.rows.per_head import HeadFit, PerHeadResult


@dataclass(frozen=True)
class PerHeadRecord:
    """The result of `calibrate fit` on several heads; the figure is None if it was not drawn."""

    fits: PerHeadResult
    figure: Path | None

    @property
    def coefficients(self) -> Coefficients:
        return self.fits.coefficients

    def as_json(self) -> dict[str, Any]:
        """Every head, with or without a rule, and the paths."""
        coefficients = self.fits.coefficients
        return {
            "reference": coefficients.reference,
            "path": str(coefficients.path),
            "figure": self.figure,
            "heads": [_head_json(head) for head in self.fits.heads],
            "quality": dict(coefficients.quality),
        }

    def blocks(self) -> Iterable[Block]:
        """The heads with a rule, the largest gain first, and the Python that uses the fit."""
        coefficients, calibrated = self.fits.coefficients, self.fits.calibrated
        yield Heading(f"Fit {coefficients.reference}")
        yield Facts([
            ("heads", f"{len(calibrated)} of {len(self.fits.heads)} have a rule"),
            ("file", str(coefficients.path)),
            ("figure", str(self.figure or "not drawn")),
        ])  # fmt: skip
        beta = f"beta({argument(coefficients.rule)})" + ", range" * of_both(coefficients.rule)
        beta = "beta" if all_constant(coefficients) else beta
        rest = len(calibrated) - SHOWN_HEADS
        yield Table(
            columns=("layer", "head", "rows", "misranked", "gain", "95 % interval", beta),
            rows=[_cells(coefficients, head) for head in calibrated[:SHOWN_HEADS]],
            title="Gain in nats of log p, held out (five folds)",
            note=f"and {rest} more (--json lists them all)" if rest > 0 else "",
            left=(beta,),
            keys=2,
        )
        yield Facts([("verdict", coefficients.quality["verdict"])])
        yield usage(coefficients)


def _cells(fit: Coefficients, head: HeadFit) -> tuple[str, ...]:
    assert head.rule
    gain, entry = head.rule.gain, head.rule.entry
    beta = polynomial(entry.coefficients)
    if of_both(fit.rule):  # eight terms are too long for a table
        beta = beta_text(fit, entry)
    return (
        _index(head.layer), _index(head.head), f"{head.rows:,}", f"{head.misranked:.1%}",
        f"{gain.mean:+.4f}", f"{gain.low:+.4f} to {gain.high:+.4f}",
        beta,
    )  # fmt: skip


def _index(number: int | None) -> str:
    return "all" if number is None else str(number)


def _head_json(head: HeadFit) -> dict[str, Any]:
    rule = head.rule
    return {
        "layer": head.layer, "head": head.head, "rows": head.rows, "misranked": head.misranked,
        "kind": rule and rule.kind, "gain": rule and rule.gain, "why": head.verdict,
    }  # fmt: skip
