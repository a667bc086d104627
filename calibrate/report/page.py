"""The page on a fit, one self-contained HTML file."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.core.rule import CONSTANT
from calibrate.errors import printable
from calibrate.evidence.baselines import PAPER, one_constant, paper
from calibrate.evidence.calibration_error import reliability_of
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RIGHT, SETS
from calibrate.fitting.options import LIKELIHOOD
from calibrate.report import plot_style, plots
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.collection_record import theta_facts
from calibrate.report.fit_record import (
    IN_YOUR_CODE,
    advises_constant,
    input_facts,
    source_facts,
    usage,
)
from calibrate.report.fit_tables import held_out_tables, kinds_tables
from calibrate.report.labels import THIS_FIT, capitalised, metric_label
from calibrate.report.plot_scatter import MAX_POINTS, depends_on_size, plot_optimal_beta
from calibrate.report.rule_text import rule_facts
from calibrate.report.score_tables import ECE, NEW_INPUTS_NOTE
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.sentences import finding
from calibrate.rows.solve import SolvedInputs
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit

# Size of a figure in inches. Text of ten points has 11 pixels in a figure that is 350 pixels wide,
# on a phone of 400.
FIGURE_SIZE = (4.3, 3.9)
TALL_FIGURE = (4.3, 4.5)  # under a scale of colours

SYMBOLS = {
    "H": "H is the Shannon entropy, in nats, of softmax(z) over the unmasked items.",
    "n": "n is the number of unmasked items; log is the natural logarithm.",
}
TEMPERATURES = "Optimal temperatures"


class SolvedHead(NamedTuple):
    """The solved inputs of the only head of a fit."""

    rows: SolvedInputs
    constant: float | None  # the beta of highest likelihood for them; None if it is unknown


class Picture(NamedTuple):
    """A figure with its caption."""

    source: str  # a data: URL
    title: str
    caption: str


@dataclass(frozen=True)
class Figures:
    """Figures side by side, two in a row of a wide screen."""

    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Tables:
    """Tables side by side where they fit."""

    tables: Sequence[Table]


@dataclass(frozen=True)
class Folded:
    """Tables that a reader opens by their title."""

    title: str
    tables: Sequence[Table]


PageBlock = Block | Figures | Tables | Folded


def write_fit_page(
    path: Path, fit: Fit, scores: ScoresRecord | None, solved: SolvedHead | None = None
) -> None:
    """Writes the page, whole or not at all. All text is escaped, as are control characters.

    Args:
      path: of the page.
      fit: the first of the fits that were scored.
      scores: preferably on items that it was not fitted to; None shows the scores in its file.
      solved: the inputs of a fit of one head, for the scatter plot.
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
    scores = scores and replace(scores, own=THIS_FIT)
    verdict = fit.verdict
    if scores and not verdict:
        verdict = finding(scores.evidence, scores.fits[0], THIS_FIT)
    on = f", scored on {scores.evidence.of.name}" if scores else ""
    html = environment.get_template("page.html.j2").render(
        title=f"Calibration report: {fit.reference}",
        subtitle=f"A fit for adaptive-temperature softmax{on}",
        verdict=verdict,
        blocks=_page_blocks(fit, scores, solved),
    )
    write_atomically(path, html.encode())


def _page_blocks(
    fit: Fit, scores: ScoresRecord | None, solved: SolvedHead | None
) -> list[PageBlock]:
    """The sections of the page on a fit, in reading order."""
    return [
        Heading(IN_YOUR_CODE),
        *_constant_section(fit, solved),
        usage(fit),
        Heading("Scores"),
        *(_scores_section(scores, fit) if scores else held_out_tables(fit)),
        *temperatures_section(fit, solved),
        Heading("The rule" if solved is None else "The rule in numbers"),
        *_rule_section(fit, is_drawn=solved is not None),
        *_kinds_section(fit),
        *_inputs_section(fit, solved),
        Heading("Provenance"),
        Facts([*source_facts(fit), *_scored_facts(scores)]),
    ]


def _constant_section(fit: Fit, solved: SolvedHead | None) -> Iterable[Block]:
    """The line of code of the constant that the verdict of a fit of one head names."""
    if solved and solved.constant is not None and advises_constant(fit):
        line = f"`query = {solved.constant:.3g} * query`"
        yield Text(
            f"The verdict prefers a constant, which needs no package: {line} before attention. To "
            f"load this fit, of the kind {fit.rule.kind}:"
        )


def _scores_section(scores: ScoresRecord, fit: Fit) -> Iterable[PageBlock]:
    """The comparison of rules, their names explained, figures, and tables by size and head."""
    is_new = scores.evidence.of.items == SETS and fit.evidence.get("kinds")
    table = scores.comparison(NEW_INPUTS_NOTE if is_new else "")
    explained = "; ".join(f"{name}: {text}" for name, text in scores.explained_rules())
    yield replace(table, more=f"{table.more} {capitalised(explained)}.")
    yield Figures([*_score_pictures(scores)])
    means = scores.means_by_size()
    folded = [x for x in [means.pop(ECE, None), scores.gains_by_size()] if x]
    yield Tables([replace(x, note="") for x in means.values()])
    yield Folded("ECE and gain by n" if len(folded) > 1 else "Gain by n", folded)
    yield from scores.other_tables()


def _score_pictures(scores: ScoresRecord) -> Iterable[Picture]:
    """Scores by size, and reliability."""
    own, items = scores.fits[0], scores.judged
    bars = "Bars: ± two standard errors."
    ends = f"{bars} Gains beyond {plots.MAX_GAIN} times the largest of this fit are cut off."
    yield draw_picture(
        "Gain over the baseline by size", ends, plots.plot_scores, items, LOG_P, own, gain=True
    )
    if RIGHT in items.values:
        title = f"{capitalised(metric_label(RIGHT, items.of.items))} by size"
        yield draw_picture(title, bars, plots.plot_scores, items, RIGHT, own)
    if CONFIDENCE in items.values:
        chance = reliability_of(items, own).chance
        caption = (
            "Above the diagonal: under-confident; below: over-confident. The ECE is the mean "
            "distance from the diagonal; with so many inputs, even perfectly calibrated "
            f"probabilities would have an ECE of {100 * chance:.1f} % by chance."
        )
        yield draw_picture("Reliability diagram", caption, plots.plot_reliability, items, own)
        caption = "Errors of opposite sign at several n cancel in the ECE of all."
        yield draw_picture("ECE by size", caption, plots.plot_scores, items, ECE, own)


def temperatures_section(fit: Fit, solved: SolvedHead | None) -> Iterable[Block | Figures]:
    """The optimal temperatures of misranked inputs, and the rules; nothing without inputs."""
    if solved is None:
        return
    text = (
        "Each point is a misranked input: its entropy H, and the beta = 1/theta at which its "
        "target is most probable. Points beyond the axis are drawn at its edge. A rule is drawn "
        "thin outside its domain."
    )
    if fit.source.get("options", {}).get("loss") == LIKELIHOOD:
        text += (
            " The rule is fitted to all inputs, also to those that are ranked correctly. These are "
            "not drawn, since every larger beta makes their target more probable."
        )
    if depends_on_size(fit):
        text += " A rule that depends on n is drawn as its mean over inputs of similar entropy."
    n = int(solved.rows.has_finite_optimum().sum())
    caption = f"{n:,} misranked inputs."
    if n > MAX_POINTS:
        caption = f"A sample of {MAX_POINTS:,} of the {n:,} misranked inputs."
    drawn = solved.rows, fit, rules_beside(fit, solved.constant)
    picture = draw_picture(TEMPERATURES, caption, plot_optimal_beta, *drawn, size=TALL_FIGURE)
    yield Heading(f"{TEMPERATURES} and the rule")
    yield Text(text)
    yield Figures([picture, *_rule_pictures(fit, size=TALL_FIGURE)])


def rules_beside(fit: Fit, constant: float | None) -> dict[str, Fit]:
    """The published polynomial, and the best constant if it is known; without the fit itself."""
    rules = {PAPER: paper()}
    if constant is not None and not fit.ignores_inputs:
        rules[CONSTANT] = one_constant(constant)
    return {name: rule for name, rule in rules.items() if rule != fit}


def _rule_section(fit: Fit, is_drawn: bool) -> Iterable[Block | Figures]:
    rule = fit.rule
    if not is_drawn and (pictures := _rule_pictures(fit)):
        yield Figures(pictures)
    yield Facts([*rule_facts(fit)])
    if not fit.ignores_inputs:
        used = (("H", rule.by_entropy), ("n", rule.by_size))
        yield Text(" ".join(SYMBOLS[symbol] for symbol, uses in used if uses))
    if fit.has_heads:
        yield Text("A head that the fit does not name keeps beta = 1.")


def _rule_pictures(fit: Fit, size: tuple[float, float] = FIGURE_SIZE) -> list[Picture]:
    """The rule as a curve, or as a map of heads; nothing for one constant."""
    if fit.has_heads:
        place = "" if fit.ignores_inputs else " At the largest n or half of the entropy of the fit."
        caption = f"Red: sharper than the baseline; blue: more diffuse; x: no rule.{place}"
        return [draw_picture("Beta of the heads", caption, plots.plot_head_betas, fit)]
    if fit.ignores_inputs:
        return []
    caption = "Beta over the domain of the fit, and beyond."
    return [draw_picture("The rule", caption, plots.plot_rule, fit, size=size)]


def _kinds_section(fit: Fit) -> Iterable[Block]:
    """Scores of the kinds of rule."""
    if tables := kinds_tables(fit):
        yield Heading("Which kind of rule")
        yield from tables


def _inputs_section(fit: Fit, solved: SolvedHead | None) -> Iterable[Block]:
    """The inputs of the fit by class; nothing if the file does not have them."""
    if facts := [*input_facts(fit), *(theta_facts(solved.rows) if solved else ())]:
        yield Heading("Inputs")
        yield Facts(facts)


def _scored_facts(scores: ScoresRecord | None) -> Iterable[tuple[str, str]]:
    """The source of the scored items, with its fingerprint."""
    if scores:
        of = scores.evidence.of
        yield "scored on", f"{of.name} ({of.fingerprint}): {scores.scored_items()}"


def draw_picture(
    title: str,
    caption: str,
    plot: Any,
    *arguments: Any,
    size: tuple[float, float] = FIGURE_SIZE,
    **options: Any,
) -> Picture:
    """A picture of a function that draws on its first argument, an `ax`."""
    figure = plot_style.draw(plot, *arguments, size=size, **options)
    source = "data:image/png;base64," + base64.b64encode(plot_style.png(figure)).decode()
    return Picture(source, title, caption)
