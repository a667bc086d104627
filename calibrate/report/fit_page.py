"""The page on a fit: its verdict, scores, figures, rule and provenance, for whatever was scored."""

from collections.abc import Iterable
from pathlib import Path

from calibrate.evidence.evidence import LOG_P, Evidence
from calibrate.evidence.verdict import judged_items, main_measure
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.report import plots
from calibrate.report.blocks import Heading
from calibrate.report.page import (
    Figures,
    Page,
    Picture,
    draw,
    provenance_section,
    rule_section,
    usage_section,
    write_page,
)
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.selection import selection_section

BARS = "bars of two standard errors"


def write_fit_page(path: Path, fit: Coefficients, scores: ScoresRecord) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: what was calibrated; the first of the fits that were scored.
      scores: of items that it was, if possible, not made of.
    """
    of = scores.evidence.of
    blocks = [
        Heading("Scores"),
        *scores.tables(),
        *usage_section(fit),
        Heading("Figures"),
        Figures([*_score_pictures(scores, fit), *_rule_pictures(scores, fit)]),
        *selection_section(fit),
        *rule_section(fit),
        *provenance_section(fit, f"{of.name} ({of.fingerprint}): {scores.scored_items()}"),
    ]
    subtitle = f"Calibration of adaptive-temperature softmax, scored on {of.name}"
    verdict = " ".join(scores.verdicts().values())
    write_page(path, Page(fit.reference, subtitle, verdict, blocks))


def _score_pictures(scores: ScoresRecord, fit: Coefficients) -> Iterable[Picture]:
    """The measure that decides, by size and template; protected text; gains of heads."""
    own, items = scores.fits[0], judged_items(scores.evidence)
    measure, what = main_measure(scores.evidence), items.of.items

    def by(key: str, part: Evidence, measure: str, gain: bool, title: str) -> Picture:
        beyond = "; rules far beyond this fit are in the tables alone" if gain else ""
        caption = f"On the same {what}; {BARS}{beyond}."
        look = {"by": key, "own": own, "gain": gain, "name": fit.reference}
        return draw(plots.plot_scores, part, measure, title=title, caption=caption, **look)

    yield by("size", items, measure, False, "Every size")
    yield by("size", items, measure, True, "Gain over plain softmax")
    if len(items.by("template")) > 1:
        yield by("template", items, measure, True, "Gain by template")
    text = scores.evidence.text
    if text.n and text.n < scores.evidence.n:
        yield by("size", text, LOG_P, True, "Protected text: below 0 it is worse")
    if len(items.heads) > 1 and LOG_P in items.values:
        yield draw(
            plots.plot_gain_map, items, own, title="Gain by layer and head",
            caption="Nats of log p; orange gains, purple loses. x: unchanged.",
        )  # fmt: skip


def _rule_pictures(scores: ScoresRecord, fit: Coefficients) -> Iterable[Picture]:
    """The rule, and what it gains on held-out rows of its own."""
    yield draw(
        plots.plot_rule, fit, _by_gain(scores, fit), title="The rule",
        caption="Beta over the domain that it was fitted on.",
    )  # fmt: skip
    if fit.has_heads:
        yield draw(
            plots.plot_head_betas, fit, title="Beta of the heads",
            caption="At the largest n of the fit and half the entropy it can have; x: no rule.",
        )  # fmt: skip
    if fit.quality.get("held_out"):
        yield draw(
            plots.plot_held_out, fit, title="Gain in log p, held out",
            caption=f"On what the fit held out from its own rows; {BARS}.",
        )  # fmt: skip


def _by_gain(scores: ScoresRecord, fit: Coefficients) -> list[Entry]:
    """Every entry once: those of heads that gain most first, those without any rows last."""
    ranked = (fit.entry_of(*head) for head, _ in scores.ranked(scores.fits[0]))
    return list(dict.fromkeys(entry for entry in (*ranked, *fit.entries) if entry is not None))
