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
from calibrate.maths.rule import LOG_SIZE, Rule, beta_of
from calibrate.report.blocks import Block, Code, Curve, Facts, Heading, Text
from calibrate.report.wording import facts, guards, head_text, load_line, outside, polynomial, span

PLOT_POINTS = 128  # two per character
SHOWN_ENTRIES = 8


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
        for entry in coefficients.entries[:SHOWN_ENTRIES]:
            if len(coefficients.entries) > 1:
                yield Text(f"  {head_text(entry.layer, entry.head)}")
            yield from _entry_blocks(entry, coefficients.rule)
        if len(coefficients.entries) > SHOWN_ENTRIES:
            rest = len(coefficients.entries) - SHOWN_ENTRIES
            yield Text(f"  and {rest} more entries (--json lists them all)")
        rows = [("guards", guards(coefficients.rule)), *facts(coefficients)]
        rows += [("file", str(coefficients.path)), ("id", digest(coefficients))]
        if self.figure:
            rows.append(("figure", str(self.figure)))
        yield Facts(rows)
        yield Code("Load it:", f"fit = {load_line(coefficients)}")


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


def _entry_blocks(entry: Entry, rule: Rule) -> Iterable[Block]:
    by_size = rule.kind == LOG_SIZE
    domain = f"{span(entry.domain, rule.kind)}; {outside(rule, [entry])}"
    yield Facts([("p(n)" if by_size else "p(H)", polynomial(entry.coefficients)),
                 ("domain", domain)])  # fmt: skip
    x = np.linspace(*entry.domain, PLOT_POINTS)
    beta = beta_of(x, x, entry.coefficients, entry.domain, rule, np)
    label = "set size n, log scale" if by_size else "entropy H, nats"
    yield Curve((np.exp(x) if by_size else x).tolist(), beta.tolist(), label, "beta")
