"""The page on a fit: its verdict, scores, figures, rule and provenance, for whatever was scored."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from calibrate.evidence.evidence import LOG_P, Evidence
from calibrate.evidence.verdict import judged_items, main_measure
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.report import plots
from calibrate.report.blocks import Block, Facts, Heading, Text
from calibrate.report.fit_record import rule_facts
from calibrate.report.page import Figures, Page, Picture, draw, write_page
from calibrate.report.rule_curves import all_constant
from calibrate.report.rule_words import facts, guards
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.selection import selection_section
from calibrate.report.usage import usage

SYMBOLS = {
    "H": "H is the Shannon entropy, in nats, of softmax(z) over the unmasked items.",
    "n": "n is the number of unmasked items; log is the natural logarithm.",
}
BARS = "bars of two standard errors"


def write_fit_page(path: Path, fit: Coefficients, scores: ScoresRecord) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: what was calibrated; the first of the fits that were scored.
      scores: of items that it was, if possible, not made of.
    """
    of, scored = scores.evidence.of, scores.scored_items()
    blocks = [
        Heading("Scores"),
        *scores.tables(),
        *_usage_section(fit),
        Heading("Figures"),
        Figures([*_score_pictures(scores, fit), *_rule_pictures(scores, fit)]),
        *selection_section(fit),
        *_rule_section(fit),
        Heading("Provenance"),
        Facts([*facts(fit), ("scored on", f"{of.name} ({of.fingerprint}): {scored}")]),
    ]
    subtitle = f"Calibration of adaptive-temperature softmax, scored on {of.name}"
    verdict = " ".join(scores.verdicts().values())
    write_page(path, Page(fit.reference, subtitle, verdict, blocks))


def _usage_section(fit: Coefficients) -> Iterable[Block]:
    code = usage(fit)
    yield Heading(code.purpose.removesuffix(":"))
    yield replace(code, purpose="")
    if fit.has_heads:
        yield Text("A head that the fit does not name keeps beta = 1.")


def _rule_section(fit: Coefficients) -> Iterable[Block]:
    rule, constant = fit.rule, all_constant(fit)
    yield Heading("The rule")
    yield Facts([*rule_facts(fit), *([] if constant else [("guards", guards(rule))])])
    if not constant:
        used = (("H", rule.by_entropy), ("n", rule.by_size))
        yield Text(" ".join(SYMBOLS[symbol] for symbol, uses in used if uses))


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
