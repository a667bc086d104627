"""The page on a fit, one self-contained HTML file, and the results of `report` and `run`."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.errors import printable
from calibrate.evidence.calibration_error import expected_calibration_error, reliability
from calibrate.evidence.estimate import decimal
from calibrate.evidence.evidence import PLAIN, Evidence
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RIGHT, Metric
from calibrate.evidence.verdict import judged_items, main_metric
from calibrate.report import plots
from calibrate.report.blocks import Block, Facts, Heading, Result, Table, Text, as_detail
from calibrate.report.fit_record import FitRecord, over_constant_facts, rule_facts, usage
from calibrate.report.metric_text import capitalised
from calibrate.report.optimal_temperatures import Solved, temperatures_section
from calibrate.report.pictures import Figures, Picture, draw_picture
from calibrate.report.rules import facts, guards, value_text
from calibrate.report.scores_record import Sample, ScoresRecord
from calibrate.report.selection import gain_kl_tables, selection_tables
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.coefficients import Coefficients

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


def report_result(scores: ScoresRecord, path: Path | None) -> Result:
    """The verdict, other rules as a detail, and the path of the page; None if not written."""
    short, every = (
        [text for verdict in scores.verdict_sentences(baselines).values() for text in verdict]
        for baselines in (False, True)
    )
    on_other_rules = [sentence for sentence in every if sentence not in short]
    shown: list[Block] = [Text("\n" + "\n".join(short))]
    shown += [Text(sentence, detail=True) for sentence in on_other_rules]
    shown.append(Facts([("report", str(path or "not written"))]))
    return Result(shown, {"verdict": " ".join(every), "report": path})


def run_result(fit: FitRecord, scores: ScoresRecord, report: Result) -> Result:
    """Scores of a fit on held-out data, the verdict, and the lines that load the fit."""
    shown: list[Block] = [
        *as_detail(fit.evidence()),
        Facts([("scored", scores.scored_items())], detail=True),
        *scores.tables(),
        *report.shown,
        usage(fit.coefficients),
    ]
    return Result(shown, fit.as_json() | report.found | {"scores": scores.as_json()})


def write_fit_page(
    path: Path, fit: Coefficients, scores: ScoresRecord, solved: Solved = None
) -> None:
    """Writes the page, whole or not at all.

    All text is escaped, also what is not printable, as in the name of a file.

    Args:
      path: of the page.
      fit: what was calibrated; the first of the fits that were scored.
      scores: of items that are, if possible, held out.
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
    html = environment.get_template("page.html.j2").render(
        title=f"Calibration report: {fit.reference}",
        subtitle=f"A fit for adaptive-temperature softmax, scored on {scores.evidence.of.name}",
        verdict=[text for verdict in scores.verdict_sentences().values() for text in verdict],
        blocks=_page_blocks(fit, scores, solved),
    )
    write_atomically(path, html.encode())


def _page_blocks(
    fit: Coefficients, scores: ScoresRecord, solved: Solved
) -> "list[Block | Figures | Folded | Sample]":
    """The sections of the page on a fit, in reading order."""
    of, tables = scores.evidence.of, scores.tables()
    scored = f"{of.name} ({of.fingerprint}): {scores.scored_items()}"
    more = [table for table in tables if table.detail]
    return [
        Heading("In your code"),
        usage(fit),
        Heading("Scores"),
        *(table for table in tables if not table.detail),
        *([Folded(more)] if more else []),
        *_answers_section(scores),
        *temperatures_section(fit, solved),
        Heading("Figures"),
        Figures([*_score_pictures(scores, fit), *_rule_pictures(fit)]),
        *_selection_section(fit),
        *_rule_section(fit),
        Heading("Provenance"),
        Facts([*facts(fit), ("scored on", scored)]),
    ]


def _answers_section(scores: ScoresRecord) -> Iterable[Block | Sample]:
    """Answers of a model that changed most; nothing without any."""
    if scores.samples:
        yield Heading("Answers before and after")
        yield Text(f"{_answers_changed(scores)} {SAMPLES_NOTE}")
    for sample in scores.samples:
        yield sample
        yield Facts([_answer(scores, rule, sample.item) for rule in (PLAIN, scores.fits[0])])


def _answers_changed(scores: ScoresRecord) -> str:
    """A sentence on how many answers became exact matches, and how many no longer are."""
    answers = scores.evidence.answers
    before, after = (answers.scores(rule, RIGHT) for rule in (PLAIN, scores.fits[0]))
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


def _selection_section(fit: Coefficients) -> Iterable[Block]:
    """The verdict of the fit's file and its tables; nothing if the file has no table."""
    by_weight, of_kinds = gain_kl_tables(fit), selection_tables(fit)
    if by_weight or of_kinds:
        verdict = value_text(fit.quality.get("verdict", ""))
        yield Heading("Which kind of rule" if of_kinds else "Gain and cost")
        yield Text(f"{verdict[:1].upper()}{verdict[1:].removesuffix('.')}.")
        yield from [*by_weight, *of_kinds]


def _rule_section(fit: Coefficients) -> Iterable[Block]:
    rule, constant = fit.rule, fit.ignores_inputs
    yield Heading("The rule")
    guarded = [] if constant else [("guards", guards(rule))]
    yield Facts([*rule_facts(fit), *guarded, *over_constant_facts(fit)])
    if not constant:
        used = (("H", rule.by_entropy), ("n", rule.by_size))
        yield Text(" ".join(SYMBOLS[symbol] for symbol, uses in used if uses))
    if fit.has_heads:
        yield Text("A head that the fit does not name keeps beta = 1.")


def _score_pictures(scores: ScoresRecord, fit: Coefficients) -> Iterable[Picture]:
    """The metric that decides, by size and template; retention text; gains of heads."""
    own, items = scores.fits[0], judged_items(scores.evidence)
    metric, what = main_metric(scores.evidence), items.of.items.name

    def by(key: str, part: Evidence, metric: Metric, gain: bool, title: str) -> Picture:
        caption = f"On the same {what}; bars: two standard errors. {plots.BEYOND_NOTE}"
        look: dict[str, Any] = {"by": key, "own": own, "gain": gain, "name": fit.reference}
        return draw_picture(title, caption, plots.plot_scores, part, metric, **look)

    yield by("size", items, metric, False, f"{capitalised(metric.label)} by size")
    yield by("size", items, metric, True, "Gain over the baseline by size")
    if CONFIDENCE in items.values:
        yield _reliability_picture(items, own, fit.reference)
    if len(items.by("template")) > 1:
        yield by("template", items, metric, True, "Gain over the baseline by prompt template")
    text = scores.evidence.text
    if text.n and text.n < scores.evidence.n:
        yield by("size", text, LOG_P, True, "Retention text: below 0 it is worse")
    if len(items.heads) > 1 and LOG_P in items.values:
        caption = "Nats of log-likelihood: orange gains, purple loses; x: unchanged."
        yield draw_picture("Gain by layer and head", caption, plots.plot_gain_map, items, own)


def _reliability_picture(items: Evidence, own: str, name: str) -> Picture:
    before, after = (reliability(items, rule) for rule in (PLAIN, own))
    ece_before, ece_after = (100 * expected_calibration_error(x) for x in (before, after))
    caption = (
        f"{len(before.n)} bins of {before.n.min():,} {items.of.items.name} or more. Expected "
        f"calibration error (ECE): baseline {ece_before:.1f} %, {name} "
        f"{ece_after:.1f} %; of perfectly calibrated probabilities, by chance, "
        f"{100 * before.chance:.1f} % and {100 * after.chance:.1f} %. Above the diagonal: "
        "under-confident; below: over-confident."
    )
    return draw_picture("Reliability diagram", caption, plots.plot_reliability, items, own, name)


def _rule_pictures(fit: Coefficients) -> Iterable[Picture]:
    if fit.has_heads:
        caption = (
            "At the largest n of the fit and half of the entropy that is possible there. Red: beta "
            "> 1, sharper than the baseline; blue: more diffuse; x: no rule."
        )
        yield draw_picture("Beta of the heads", caption, plots.plot_head_betas, fit)
    else:
        caption = "Beta over the domain of the fit, and beyond."
        yield draw_picture("The rule", caption, plots.plot_rule, fit)
