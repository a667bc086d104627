"""The page on a fit, one self-contained HTML file, and the results of `report` and `run`."""

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.errors import printable
from calibrate.evidence.baselines import paper
from calibrate.evidence.evidence import CONFIDENCE, LOG_P, PLAIN, RIGHT, Evidence
from calibrate.evidence.verdict import judged_items, main_measure
from calibrate.files.atomic_io import write_atomically
from calibrate.files.coefficients import Coefficients
from calibrate.report import plot_style, plots
from calibrate.report.blocks import Block, Facts, Heading, Result, Table, Text, as_detail
from calibrate.report.fit_record import FitRecord, rule_facts, usage
from calibrate.report.plot_polynomial import plot_optimal_beta
from calibrate.report.polynomial_record import polynomial_blocks
from calibrate.report.rules import all_constant, facts, guards, value_text
from calibrate.report.run_record import SolvedHead
from calibrate.report.scores_record import Sample, ScoresRecord
from calibrate.report.selection import selection_tables, trade_tables

SYMBOLS = {
    "H": "H is the Shannon entropy, in nats, of softmax(z) over the unmasked items.",
    "n": "n is the number of unmasked items; log is the natural logarithm.",
}
NARROW = (5.4, 4.2)  # inches: two side by side on a wide screen
WIDE = (7.2, 4.8)


class Picture(NamedTuple):
    """A figure with its caption."""

    source: str  # a data: URL
    title: str
    caption: str


@dataclass(frozen=True)
class Figures:
    """Figures side by side."""

    pictures: Sequence[Picture]


class Folded(NamedTuple):
    """Tables that are shown when they are asked for, and in print."""

    tables: Sequence[Table]


def report_result(scores: ScoresRecord, path: Path | None) -> Result:
    """The verdict, with rivals as a detail, and the path of the page; None if not written."""
    short, verdict = (" ".join(scores.verdicts(r).values()) for r in (False, True))
    rivals = [Text(verdict.removeprefix(short).strip(), detail=True)] if verdict != short else []
    shown: list[Block] = [Text(f"\n{short}"), *rivals]
    shown.append(Facts([("report", str(path or "not written"))]))
    return Result(shown, {"verdict": verdict, "report": path})


def run_result(fit: FitRecord, scores: ScoresRecord, report: Result) -> Result:
    """Scores of a fit on what it was not made of, the verdict, and the lines that load the fit."""
    shown: list[Block] = [
        *as_detail(fit.evidence()),
        Facts([("scored", scores.scored_items())], detail=True),
        *scores.tables(),
        *report.shown,
        usage(fit.coefficients),
    ]
    return Result(shown, fit.as_json() | report.found | {"scores": scores.as_json()})


def write_fit_page(
    path: Path, fit: Coefficients, scores: ScoresRecord, solved: SolvedHead | None = None
) -> None:
    """Writes the page, whole or not at all.

    All text is escaped, also what is not printable, as in the name of a file.

    Args:
      path: of the page.
      fit: what was calibrated; the first of the fits that were scored.
      scores: of items that it was, if possible, not made of.
      solved: of a head, its inputs solved for their optimal temperatures.
    """
    of, tables = scores.evidence.of, scores.tables()
    scored = f"{of.name} ({of.fingerprint}): {scores.scored_items()}"
    more = [table for table in tables if table.detail]
    blocks = [
        Heading("In your code"),
        usage(fit),
        Heading("Scores"),
        *(table for table in tables if not table.detail),
        *([Folded(more)] if more else []),
        *_answers_section(scores),
        *_polynomial_section(fit, solved),
        Heading("Figures"),
        Figures([*_score_pictures(scores, fit), *_rule_pictures(fit)]),
        *_selection_section(fit),
        *_rule_section(fit),
        Heading("Provenance"),
        Facts([*facts(fit), ("scored on", scored)]),
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: printable(value, "\n\u00a0") if type(value) is str else value,
    )  # fmt: skip
    environment.filters["kind"] = lambda block: type(block).__name__
    html = environment.get_template("page.html.j2").render(
        title=fit.reference, verdict=" ".join(scores.verdicts().values()), blocks=blocks,
        subtitle=f"Calibration of adaptive-temperature softmax, scored on {of.name}",
    )  # fmt: skip
    write_atomically(path, html.encode())


def _answers_section(scores: ScoresRecord) -> Iterable[Block | Sample]:
    """A few examples of a model, before and after; nothing without any."""
    if scores.samples:
        yield Heading("Answers before and after")
        yield Text("A few held-out examples; right: each token of the answer has the highest p.")
    for sample in scores.samples:
        yield sample
        yield Facts([_answer(scores, rule, sample.item) for rule in (PLAIN, scores.fits[0])])


def _answer(scores: ScoresRecord, rule: str, item: int) -> tuple[str, str]:
    """A rule, and what an answer is worth under it: "12.3 %, log p -2.096: wrong"."""
    log_p, right = (scores.evidence.scores(rule, measure)[item] for measure in (LOG_P, RIGHT))
    state = "right" if right else "wrong"
    return scores.label(rule), f"{100 * math.exp(log_p):.3g} %, log p {log_p:.3f}: {state}"


def _polynomial_section(fit: Coefficients, solved: SolvedHead | None) -> Iterable[Block | Figures]:
    """The optimal temperature of each misranked input, under the polynomial fitted to them."""
    if solved is None or solved.polynomial is None:
        return
    others = {"published": paper()} | ({} if fit.has_heads else {"selected": fit})
    heading, facts = polynomial_blocks(solved.polynomial)
    yield heading
    picture = _picture(
        "Optimal temperatures",
        "Each point is a misranked input: its entropy, and the temperature at which the target is "
        "most probable. Rules are thin outside their domain.",
        plot_optimal_beta,
        solved.rows,
        solved.polynomial,
        others,
        size=WIDE,
    )
    yield Figures([picture])
    yield facts


def _selection_section(fit: Coefficients) -> Iterable[Block]:
    """The choice in the words of the fit's file; nothing if the file has none."""
    if tables := selection_tables(fit):
        verdict = value_text(fit.quality.get("verdict", ""))
        yield Heading("Which kind of rule")
        yield Text(f"{verdict[:1].upper()}{verdict[1:]}.")
        yield from [*trade_tables(fit), *tables]


def _rule_section(fit: Coefficients) -> Iterable[Block]:
    rule, constant = fit.rule, all_constant(fit)
    yield Heading("The rule")
    yield Facts([*rule_facts(fit), *([] if constant else [("guards", guards(rule))])])
    if not constant:
        used = (("H", rule.by_entropy), ("n", rule.by_size))
        yield Text(" ".join(SYMBOLS[symbol] for symbol, uses in used if uses))
    if fit.has_heads:
        yield Text("A head that the fit does not name keeps beta = 1.")


def _score_pictures(scores: ScoresRecord, fit: Coefficients) -> Iterable[Picture]:
    """The measure that decides, by size and template; protected text; gains of heads."""
    own, items = scores.fits[0], judged_items(scores.evidence)
    measure, what = main_measure(scores.evidence), items.of.items

    def by(key: str, part: Evidence, measure: str, gain: bool, title: str) -> Picture:
        beyond = "; rules far beyond this fit are in the tables alone" if gain else ""
        caption = f"On the same {what}; bars of two standard errors{beyond}."
        look: dict[str, Any] = {"by": key, "own": own, "gain": gain, "name": fit.reference}
        return _picture(title, caption, plots.plot_scores, part, measure, **look)

    yield by("size", items, measure, False, "Every size")
    yield by("size", items, measure, True, "Gain over the baseline")
    if CONFIDENCE in items.values:
        yield _reliability_picture(items, own, fit.reference)
    if len(items.by("template")) > 1:
        yield by("template", items, measure, True, "Gain by template")
    text = scores.evidence.text
    if text.n and text.n < scores.evidence.n:
        yield by("size", text, LOG_P, True, "Protected text: below 0 it is worse")
    if len(items.heads) > 1 and LOG_P in items.values:
        caption = "Nats of log p; orange gains, purple loses. x: unchanged."
        yield _picture("Gain by layer and head", caption, plots.plot_gain_map, items, own)


def _reliability_picture(items: Evidence, own: str, name: str) -> Picture:
    before, after = (items.reliability(rule) for rule in (PLAIN, own))
    caption = (
        f"{len(before.n)} bins of {before.n.min():,} {items.of.items} or more. Expected "
        f"calibration error: {100 * before.error:.1f} -> {100 * after.error:.1f} points; "
        f"{100 * before.chance:.1f} and {100 * after.chance:.1f} would be chance."
    )
    return _picture("Reliability", caption, plots.plot_reliability, items, own, name)


def _rule_pictures(fit: Coefficients) -> Iterable[Picture]:
    if fit.has_heads:
        caption = "At the largest n of the fit and half the entropy it can have; x: no rule."
        yield _picture("Beta of the heads", caption, plots.plot_head_betas, fit)
    else:
        caption = "Beta over the domain that it was fitted on."
        yield _picture("The rule", caption, plots.plot_rule, fit)


def _picture(
    title: str,
    caption: str,
    plot: Any,
    *arguments: Any,
    size: tuple[float, float] = NARROW,
    **options: Any,
) -> Picture:
    """A picture of what `plot` draws on its first argument, an `ax`."""
    figure = plot_style.draw(plot, *arguments, size=size, **options)
    source = "data:image/png;base64," + base64.b64encode(plot_style.png(figure)).decode()
    return Picture(source, title, caption)
