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
from calibrate.report.rule_curves import (
    all_constant,
    beta_at,
    beta_text,
    constant_text,
    domain_curve,
    of_both,
    shown_sizes,
)
from calibrate.report.selection import selection_tables
from calibrate.report.usage import load_line, usage
from calibrate.report.wording import (
    NOTHING,
    argument,
    facts,
    guards,
    head_text,
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
            yield from _entry_blocks(coefficients, coefficients.entries[0])
        constant = all_constant(coefficients)
        rows = [] if constant else [("guards", guards(coefficients.rule))]
        rows += facts(coefficients)
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
    """A row for each entry: layer, head and beta; unless all are constants, domain and rule too."""
    rule, shown, rest = fit.rule, fit.entries[:SHOWN_HEADS], len(fit.entries) - SHOWN_HEADS
    columns = {
        "layer": ["all" if entry.layer is None else str(entry.layer) for entry in shown],
        "head": ["all" if entry.head is None else str(entry.head) for entry in shown],
        "domain": [span(entry.domain, rule.kind) for entry in shown],
        "beta": [beta_text(fit, entry) for entry in shown],
        (formula := f"p({argument(rule)})"): [polynomial(entry.coefficients) for entry in shown],
    }
    note = f"Outside its domain: {outside(rule, fit.entries)}. "
    if all_constant(fit):
        columns, note = {name: columns[name] for name in ("layer", "head", "beta")}, ""
    return Table(
        columns=list(columns),
        rows=list(zip(*columns.values(), strict=True)),
        title=f"{len(fit.entries):,} entries; other heads keep plain softmax",
        note=note + f"And {rest} more entries (--json lists them all)." * (rest > 0),
        left=(formula,),
        keys=2,
    )


def _entry_blocks(fit: Coefficients, entry: Entry) -> Iterable[Block]:
    """The rule of one entry: a constant, or a formula, its domain, and beta as a curve or table."""
    if (entry.layer, entry.head) != (None, None):
        heads = head_text(entry.layer, entry.head)
        yield Facts([("for", f"{heads}; other heads keep plain softmax")])
    if all_constant(fit):
        yield Facts([("rule", constant_text(entry))])
        return
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
