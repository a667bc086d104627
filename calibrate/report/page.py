"""The page on a fit, one self-contained HTML file."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.errors import printable
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.estimate import decimal
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RIGHT, Metric
from calibrate.report import plots
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.fit_facts import input_facts, rule_facts, source_facts
from calibrate.report.fit_record import held_out_tables, over_constant_facts, usage
from calibrate.report.interpolation_table import interpolation_tables
from calibrate.report.kinds_table import kinds_table
from calibrate.report.metric_text import capitalised, metric_label
from calibrate.report.optimal_temperatures import Solved, temperatures_section
from calibrate.report.pictures import Figures, Picture, draw_picture
from calibrate.report.run_record import SolvedHead
from calibrate.report.scores_record import Sample, ScoresRecord
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit

SYMBOLS = {
    "H": "H is the Shannon entropy, in nats, of softmax(z) over the unmasked items.",
    "n": "n is the number of unmasked items; log is the natural logarithm.",
}
SAMPLES_NOTE = (
    "Shown are those that change most, at most one of each prompt template and length. Exact "
    "match: each token of the answer has the highest probability."
)


class Folded(NamedTuple):
    """Tables that are shown when they are asked for, and in print."""

    tables: Sequence[Table]


PageBlock = Block | Figures | Folded | Sample


def write_fit_page(
    path: Path, fit: Fit, scores: ScoresRecord | None, solved: Solved = None
) -> None:
    """Writes the page, whole or not at all.

    All text is escaped, also what is not printable, as in the name of a file.

    Args:
      path: of the page.
      fit: the first of the fits that were scored.
      scores: on other items than it was fitted to, if possible; None: those in its file.
      solved: of a head, or of the heads with the largest gains, inputs with optimal temperatures.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value, "\n\u00a0") if type(value) is str else value,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    on = f", scored on {scores.evidence.of.name}" if scores else ""
    html = environment.get_template("page.html.j2").render(
        title=f"Calibration report: {fit.reference}",
        subtitle=f"A fit for adaptive-temperature softmax{on}",
        verdict=fit.verdict,
        blocks=_page_blocks(fit, scores, solved),
    )
    write_atomically(path, html.encode())


def _page_blocks(fit: Fit, scores: ScoresRecord | None, solved: Solved) -> list[PageBlock]:
    """The sections of the page on a fit, in reading order."""
    pictures = [*_score_pictures(scores, fit)] if scores else []
    return [
        Heading("In your code"),
        usage(fit),
        Heading("Scores"),
        *(_score_tables(scores) if scores else held_out_tables(fit)),
        *(_answers_section(scores) if scores else ()),
        *_kinds_section(fit),
        *temperatures_section(fit, solved),
        Heading("Figures"),
        Figures([*pictures, *_rule_pictures(fit)]),
        *_rule_section(fit),
        *_inputs_section(fit, solved),
        Heading("Provenance"),
        Facts([*source_facts(fit), *_scored_facts(scores)]),
    ]


def _score_tables(scores: ScoresRecord) -> list[Block | Folded]:
    """The tables that decide, and the others folded."""
    tables = scores.tables()
    shown: list[Block | Folded] = [table for table in tables if not table.detail]
    more = [table for table in tables if table.detail]
    return [*shown, Folded(more)] if more else shown


def _answers_section(scores: ScoresRecord) -> Iterable[Block | Sample]:
    """Answers of a model that changed most; nothing without any."""
    if scores.samples:
        yield Heading("Answers before and after")
        yield Text(f"{_answers_changed(scores)} {SAMPLES_NOTE}")
    for sample in scores.samples:
        yield sample
        yield Facts([_answer(scores, rule, sample.item) for rule in (BASELINE, scores.fits[0])])


def _answers_changed(scores: ScoresRecord) -> str:
    """A sentence on how many answers became exact matches, and how many no longer are."""
    answers = scores.evidence.answers
    before, after = (answers.scores(rule, RIGHT) for rule in (BASELINE, scores.fits[0]))
    gained, lost = int((after > before).sum()), int((after < before).sum())
    return (
        f"Of {answers.n:,} held-out answers {gained:,} become exact matches, and {lost:,} no "
        "longer are."
    )


def _answer(scores: ScoresRecord, rule: str, item: int) -> tuple[str, str]:
    """A rule and its score on an answer: "probability 12.3 %, NLL 2.096 nats: no exact match"."""
    log_p, right = (scores.evidence.scores(rule, metric)[item] for metric in (LOG_P, RIGHT))
    state = "exact match" if right else "no exact match"
    nll = decimal(0.0 - log_p, ".3f")
    text = f"probability {100 * math.exp(log_p):.3g} %, NLL {nll} nats: {state}"
    return scores.label(rule), text


def _kinds_section(fit: Fit) -> Iterable[Block]:
    """The kinds of rule on the same folds; of a fit of a model, its interpolation weights."""
    if table := kinds_table(fit):
        yield Heading("Which kind of rule")
        yield table
    if tables := interpolation_tables(fit):
        yield Heading("Gain and cost")
        yield from tables


def _rule_section(fit: Fit) -> Iterable[Block]:
    rule, constant = fit.rule, fit.ignores_inputs
    yield Heading("The rule")
    yield Facts([*rule_facts(fit), *over_constant_facts(fit)])
    if not constant:
        used = (("H", rule.by_entropy), ("n", rule.by_size))
        yield Text(" ".join(SYMBOLS[symbol] for symbol, uses in used if uses))
    if fit.has_heads:
        yield Text("A head that the fit does not name keeps beta = 1.")


def _inputs_section(fit: Fit, solved: Solved) -> Iterable[Block]:
    """The inputs of the fit by class, and the misranked ones by n; nothing without any."""
    facts = [*input_facts(fit)]
    if isinstance(solved, SolvedHead):
        facts += [(f"misranked, n = {n:,}", text) for n, text in solved.misranked.items()]
    if facts:
        yield Heading("Inputs")
        yield Facts(facts)


def _scored_facts(scores: ScoresRecord | None) -> Iterable[tuple[str, str]]:
    """What was scored, with its fingerprint."""
    if scores:
        of = scores.evidence.of
        yield "scored on", f"{of.name} ({of.fingerprint}): {scores.scored_items()}"


def _score_pictures(scores: ScoresRecord, fit: Fit) -> Iterable[Picture]:
    """Log-likelihood and accuracy by size, gain by template, retention text, gains of heads."""
    own, items = scores.fits[0], scores.judged
    what = items.of.items.name

    def by(key: str, part: Evidence, metric: Metric, gain: bool, title: str) -> Picture:
        caption = f"On the same {what}; bars: two standard errors."
        caption += f" {plots.BEYOND_NOTE}" if gain else ""
        look: dict[str, Any] = {"by": key, "own": own, "gain": gain, "name": fit.reference}
        return draw_picture(title, caption, plots.plot_scores, part, metric, **look)

    yield by("size", items, LOG_P, True, "Gain over the baseline by size")
    if RIGHT in items.values:
        title = f"{capitalised(metric_label(RIGHT, items.of.items))} by size"
        yield by("size", items, RIGHT, False, title)
    if CONFIDENCE in items.values:
        yield _reliability_picture(items, own, fit.reference)
    if len(items.by("template")) > 1:
        yield by("template", items, LOG_P, True, "Gain over the baseline by prompt template")
    text = scores.evidence.text
    if text.n and text.n < scores.evidence.n:
        yield by("size", text, LOG_P, True, "Retention text: below 0 it is worse")
    if len(items.heads) > 1:
        caption = "Nats of log-likelihood: orange gains, purple loses; x: unchanged."
        yield draw_picture("Gain by layer and head", caption, plots.plot_gain_map, items, own)


def _reliability_picture(items: Evidence, own: str, name: str) -> Picture:
    before, after = (reliability_of(items, rule) for rule in (BASELINE, own))
    ece_before, ece_after = (100 * expected_calibration_error(x) for x in (before, after))
    caption = (
        f"{len(before.n)} bins of {before.n.min():,} {items.of.items.name} or more. Expected "
        f"calibration error (ECE): baseline {ece_before:.1f} %, {name} "
        f"{ece_after:.1f} %; of perfectly calibrated probabilities, by chance, "
        f"{100 * before.chance:.1f} % and {100 * after.chance:.1f} %. Above the diagonal: "
        "under-confident; below: over-confident."
    )
    return draw_picture("Reliability diagram", caption, plots.plot_reliability, items, own, name)


def _rule_pictures(fit: Fit) -> Iterable[Picture]:
    if fit.has_heads:
        caption = (
            f"{_place_of_betas(fit)}Red: beta > 1, sharper than the baseline; blue: more diffuse; "
            "x: no rule."
        )
        yield draw_picture("Beta of the heads", caption, plots.plot_head_betas, fit)
    else:
        caption = "Beta over the domain of the fit, and beyond."
        if fit.ignores_inputs:
            caption = "Beta is the same for every input."
        yield draw_picture("The rule", caption, plots.plot_rule, fit)


def _place_of_betas(fit: Fit) -> str:
    """The entropy and the n at which the map shows beta, in a sentence; see `typical_betas`."""
    if fit.ignores_inputs:
        return ""
    if not fit.rule.by_size:
        return "In the middle of the entropies of the fit. "
    half = " and half of the entropy that is possible there" if fit.rule.by_entropy else ""
    return f"At the largest n of the fit{half}. "
