"""A published fit as a result to show: its rule with a curve, its facts, and how to load it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.files.coefficient_file import digest, dumps
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.store import load
from calibrate.report.blocks import SHOWN_HEADS, Block, Curve, Facts, Heading, Table
from calibrate.report.rule_curves import beta_at, beta_text, domain_curve, of_both, shown_sizes
from calibrate.report.selection import selection_tables
from calibrate.report.usage import load_line, usage
from calibrate.report.wording import (
    NOTHING,
    argument,
    facts,
    guards,
    outside,
    polynomial,
    span,
)

PLOT_POINTS = 128  # two per character
SHOWN_ENTROPIES = 7


@dataclass(frozen=True)
class PublishedFitRecord:
    """The result of `calibrate fits show`; the figure is None if none was asked for."""

    coefficients: Coefficients
    figure: Path | None

    def as_json(self) -> dict[str, Any]:
        """The file as it is, its path and the line that loads it."""
        return {
            "fit": json.loads(dumps(self.coefficients)),
            "path": str(self.coefficients.path),
            "load": load_line(self.coefficients),
            "figure": self.figure,
        }

    def blocks(self) -> Iterable[Block]:
        """The rule of each entry with its curve, the facts, and the line that loads it."""
        coefficients = self.coefficients
        yield Heading(f"Fit {coefficients.reference}")
        if len(coefficients.entries) > 1:
            yield _entry_table(coefficients)
        else:
            yield from _entry_blocks(coefficients, coefficients.only)
        rows = [("guards", guards(coefficients.rule)), *facts(coefficients)]
        rows += [("file", str(coefficients.path)), ("id", digest(coefficients))]
        if self.figure:
            rows.append(("figure", str(self.figure)))
        yield Facts(rows)
        yield from selection_tables(coefficients)
        yield usage(coefficients)


def show_fit(reference: str, store: Path | None, figure: Path | None) -> PublishedFitRecord:
    """Loads a fit, and draws its figure if one is asked for.

    Raises:
      CoefficientsError: there is no such fit.
      CalibrateError: the figure cannot be written.
    """
    coefficients = load(reference, store)
    if figure:
        from calibrate.report.fit_plots import save_beta_figure  # loads Matplotlib

        save_beta_figure(figure, coefficients)
    return PublishedFitRecord(coefficients, figure)


def _entry_table(fit: Coefficients) -> Table:
    """A row for each entry: its layer and head, its domain, beta over it, and the rule."""
    rule, rest = fit.rule, len(fit.entries) - SHOWN_HEADS
    formula = f"p({argument(rule)})"
    return Table(
        columns=("layer", "head", "domain", "beta", formula),
        rows=[
            (
                "all" if entry.layer is None else str(entry.layer),
                "all" if entry.head is None else str(entry.head),
                span(entry.domain, rule.kind),
                beta_text(fit, entry),
                polynomial(entry.coefficients),
            )
            for entry in fit.entries[:SHOWN_HEADS]
        ],
        title=f"{len(fit.entries):,} entries; other heads keep plain softmax",
        note=f"Outside its domain: {outside(rule, fit.entries)}."
        + f" And {rest} more entries (--json lists them all)." * (rest > 0),
        left=(formula,),
    )


def _entry_blocks(fit: Coefficients, entry: Entry) -> Iterable[Block]:
    """The rule of one entry: its formula, its domain, and beta as a curve or a table."""
    rule = fit.rule
    domain = f"{span(entry.domain, rule.kind)}; {outside(rule, [entry])}"
    yield Facts([(f"p({argument(rule)})", polynomial(entry.coefficients)), ("domain", domain)])
    if of_both(rule):
        yield _beta_table(fit, entry)
        return
    x, beta = domain_curve(fit, entry, PLOT_POINTS)
    label = "entropy H, nats" if rule.by_entropy else "set size n, log scale"
    yield Curve(x.tolist(), beta.tolist(), label, "beta")


def _beta_table(fit: Coefficients, entry: Entry) -> Table:
    """beta of a rule of entropy and size: a row per set size, a column per entropy."""
    lo, hi, _, large = entry.domain
    H = np.linspace(lo, min(hi, large), SHOWN_ENTROPIES)
    rows = []
    for n in shown_sizes(entry.domain[2:]):
        beta = beta_at(fit, entry, H, n)
        cells = [f"{b:.2f}" if h <= np.log(n) else NOTHING for h, b in zip(H, beta, strict=True)]
        rows.append([f"{n:,}", *cells])
    columns = ["n", *(f"H = {h:.3g}" for h in H)]
    note = "No set of n items has an entropy above log n. The last row is beyond the fitted sizes."
    return Table(columns, rows, "beta by set size n and entropy H in nats", note)
