"""The page on a fit of a whole model, scored by the model's answers."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from calibrate.files.coefficients import Coefficients
from calibrate.model.comparison import LOG_P, PLAIN, RIGHT, ExampleComparison
from calibrate.model.verdict import verdict
from calibrate.report import model_plots
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.model_scores_record import ModelScoresRecord
from calibrate.report.page import (
    Figures,
    Highlights,
    Page,
    Picture,
    draw,
    provenance_section,
    rule_section,
    usage_section,
    write_page,
)


def write_model_page(path: Path, fit: Coefficients, record: ModelScoresRecord) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: the first of the record's fits.
      record: the scores, of examples that it was, if possible, not made of.
    """
    blocks = [
        Highlights(list(_highlights(record.comparison, record.fits[0]))),
        *usage_section(fit),
        Heading("By template and length"),
        Facts([("scored", record.scored), *record.best()]),
        Text("Chance: two standard errors."),
        *record.tables(),
        Heading("Figures"),
        Figures(list(_pictures(record.comparison, record.fits[0], fit))),
        *_candidates(fit),
        *rule_section(fit),
        *provenance_section(fit, f"{record.model} ({record.fingerprint}): {record.scored}"),
    ]
    subtitle = f"Calibration of the attention heads of {record.model}, scored by its own answers"
    write_page(path, Page(fit.reference, subtitle, page_verdict(record), blocks))


def page_verdict(record: ModelScoresRecord) -> str:
    """What the fit does, in a few sentences."""
    return "; ".join(verdict(record.comparison, record.fits[0], record.constants)) + "."


def _highlights(comparison: ExampleComparison, own: str) -> Iterable[tuple[str, str]]:
    if cells := comparison.members():
        before, after = (100 * comparison.mean(r, RIGHT, cells).mean for r in (PLAIN, own))
        yield f"{before:.0f} % to {after:.0f} %", "answers wholly right, plain and with this fit"
        gain, error = comparison.gain(own, LOG_P, cells)
        yield f"{gain:+.3f} nats", f"of log p of the answer over plain softmax, ± {error:.3f}"
    if text := comparison.members(text=True):
        gain, error = comparison.gain(own, LOG_P, text)
        yield f"{gain:+.4f} nats", f"of log p of a token of plain text, ± {error:.4f}"


def _pictures(comparison: ExampleComparison, own: str, fit: Coefficients) -> Iterable[Picture]:
    bars = "bars of two standard errors"
    far = "rules far beyond this fit are in the tables alone"

    def plot(
        measure: str, groups: model_plots.Groups, gain: bool, title: str, caption: str
    ) -> Picture:
        of = (comparison, measure, groups, own, gain)
        return draw(model_plots.plot_scores, *of, title=title, caption=caption)

    lengths = [(f"{n:,}", comparison.members(length=n)) for n in comparison.lengths()]
    names = dict.fromkeys(comparison.cells[i].template for i in comparison.members())
    templates = [(name, comparison.members(template=name)) for name in names]
    for by, groups in (("length in tokens", lengths), ("template", templates)):
        if groups and (len(groups) > 1 or by != "template"):
            yield plot(RIGHT, groups, False, f"Right answers by {by}", f"In per cent; {bars}.")
            yield plot(
                LOG_P, groups, True, f"log p of the answers by {by}",
                f"Nats above plain softmax, on the same examples; {bars}; {far}.",
            )  # fmt: skip
    if text_lengths := comparison.lengths(text=True):
        groups = [(f"{n:,}", comparison.members(text=True, length=n)) for n in text_lengths]
        yield plot(
            LOG_P, groups, True, "Plain text by length in tokens",
            f"Nats a token above plain softmax: below 0, text is worse; {bars}; {far}.",
        )  # fmt: skip
    if any(entry.layer is not None for entry in fit.entries):
        n = int(np.median(comparison.lengths() or comparison.lengths(text=True)))
        yield draw(
            model_plots.plot_head_betas, fit, n, title="Beta of the heads",
            caption=f"Of a query with {n:,} keys, at half of the entropy that it can have; red is "
            "sharper, blue more diffuse than plain softmax; x: no rule.",
        )  # fmt: skip


def _candidates(fit: Coefficients) -> Iterable[Block]:
    """What the file says of the kinds of rule that were tried."""
    records = [r for r in fit.quality.get("candidates", []) if {"kind", "gain"} <= r.keys()]
    if records:
        yield Heading("Kinds of rule that were tried")
        yield Table(
            ["kind", "gain"],
            [(str(record["kind"]), f"{record['gain']:+.3f}") for record in records],
            title="Nats of log p of the answers beyond plain softmax, on the examples that chose",
            left=["kind"],
        )
