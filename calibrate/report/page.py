"""The page on a fit, one self-contained HTML file."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.core.rule import CONSTANT
from calibrate.errors import printable
from calibrate.evidence.baselines import one_constant, paper
from calibrate.evidence.calibration_error import reliability_of
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RIGHT, SETS, Metric
from calibrate.report import plot_style, plots
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.collection_record import Solved, SolvedHead, SolvedOne, theta_facts
from calibrate.report.comparison import ECE, NEW_INPUTS_NOTE
from calibrate.report.fit_record import (
    IN_YOUR_CODE,
    advises_constant,
    input_facts,
    over_constant_facts,
    source_facts,
    usage,
)
from calibrate.report.fit_tables import held_out_tables, kinds_tables
from calibrate.report.labels import THIS_FIT, capitalised, metric_label
from calibrate.report.plot_scatter import (
    MAX_POINTS,
    PUBLISHED_RULE,
    depends_on_size,
    edge_caption,
    plot_optimal_beta,
    points_caption,
    rules_caption,
)
from calibrate.report.rules import rule_facts
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.sentences import first_sentence, harm_sentence
from calibrate.rows.rows import head_label
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
    """Blocks that a reader opens by their title."""

    title: str
    blocks: Sequence["PageBlock"]


PageBlock = Block | Figures | Tables | Folded


def write_fit_page(
    path: Path, fit: Fit, scores: ScoresRecord | None, solved: Solved = None
) -> None:
    """Writes the page, whole or not at all. All text is escaped, as are control characters.

    Args:
      path: of the page.
      fit: the first of the fits that were scored.
      scores: preferably on items that it was not fitted to; None shows the scores in its file.
      solved: inputs of the head, or of the heads with the largest gains, for the scatter plots.
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
    on = f", scored on {scores.evidence.of.name}" if scores else ""
    html = environment.get_template("page.html.j2").render(
        title=f"Calibration report: {fit.reference}",
        subtitle=f"A fit for adaptive-temperature softmax{on}",
        verdict=_verdict(fit, scores),
        blocks=_page_blocks(fit, scores, solved),
    )
    write_atomically(path, html.encode())


def _verdict(fit: Fit, scores: ScoresRecord | None) -> str:
    """The verdict in the file, or on new scores; and the rules whose NLL is worse there."""
    if scores is None:
        return fit.verdict
    own, names = scores.fits[0], scores.names
    verdict = fit.verdict
    if not verdict:
        verdict = first_sentence(scores.evidence, own, names.pop(own))
    harm = harm_sentence(scores.judged, names)
    return f"{verdict.rstrip('.')}.\n{harm}" if harm else verdict


def _page_blocks(fit: Fit, scores: ScoresRecord | None, solved: Solved) -> list[PageBlock]:
    """The sections of the page on a fit, in reading order."""
    return [
        Heading(IN_YOUR_CODE),
        *_constant_section(fit, solved),
        usage(fit),
        Heading("Scores"),
        *(_scores_section(scores, fit) if scores else held_out_tables(fit)),
        *temperatures_section(fit, solved),
        Heading("The rule"),
        *_rule_section(fit, isinstance(solved, SolvedHead)),
        *_kinds_section(fit),
        *_inputs_section(fit, solved),
        Heading("Provenance"),
        Facts([*source_facts(fit), *_scored_facts(scores)]),
    ]


def _scores_section(scores: ScoresRecord, fit: Fit) -> Iterable[PageBlock]:
    """The comparison of rules, their names explained, figures, and tables by size and head."""
    table = scores.comparison()
    explained = "; ".join(f"{name}: {text}" for name, text in scores.explained_rules())
    is_new = scores.evidence.of.items == SETS and fit.evidence.get("kinds")
    note = f"{table.note} {NEW_INPUTS_NOTE}" if is_new else table.note
    yield replace(table, note=note, more=f"{table.more} {capitalised(explained)}.")
    yield Figures([*_score_pictures(scores)])
    means = scores.means_by_size()
    folded = [x for x in [means.pop(ECE, None), scores.gains_by_size()] if x]
    yield Tables([replace(x, note="") for x in means.values()])
    yield Folded("ECE and gain by n" if len(folded) > 1 else "Gain by n", [Tables(folded)])
    yield from scores.other_tables()


def _constant_section(fit: Fit, solved: Solved) -> Iterable[Block]:
    """The line of code of the constant that the verdict of a fit of one head names."""
    if isinstance(solved, SolvedHead) and solved.constant is not None and advises_constant(fit):
        line = f"`query = {solved.constant:.3g} * query`"
        yield Text(f"The constant needs no package: {line} before attention. The fit itself:")


def _kinds_section(fit: Fit) -> Iterable[Block]:
    """Scores of the kinds of rule."""
    if tables := kinds_tables(fit):
        yield Heading("Which kind of rule")
        yield from tables


def temperatures_section(fit: Fit, solved: Solved) -> Iterable[Block | Figures]:
    """The optimal temperatures of misranked inputs, and the rules; nothing without inputs."""
    if isinstance(solved, SolvedHead):
        return _section_of_a_head(fit, solved)
    return _section_of_heads(fit, solved) if solved else ()


def rules_beside(fit: Fit, constant: float | None) -> dict[str, Fit]:
    """The published polynomial, and the best constant if it is known; without the fit itself."""
    rules = {PUBLISHED_RULE: paper()}
    if constant is not None and not fit.ignores_inputs:
        rules[CONSTANT] = one_constant(constant)
    return {name: rule for name, rule in rules.items() if rule != fit}


def _section_of_a_head(fit: Fit, solved: SolvedHead) -> Iterable[Block | Figures]:
    yield Heading(TEMPERATURES)
    caption = f"{points_caption(solved.rows)} {rules_caption(fit)}"
    others = rules_beside(fit, solved.constant)
    picture = draw_picture(
        TEMPERATURES, caption, plot_optimal_beta, solved.rows, fit, others, size=TALL_FIGURE
    )
    yield Figures([picture, _rule_picture(fit, size=TALL_FIGURE)])


def _section_of_heads(fit: Fit, heads: Sequence[SolvedOne]) -> Iterable[Block | Figures]:
    rules = [_rule_of_head(fit, head) for head in heads]
    of_size = next(filter(depends_on_size, rules), rules[0])
    which = "The head with the largest held-out gain."
    if len(heads) > 1:
        which = f"The {len(heads)} heads with the largest held-out gains."
    yield Heading(TEMPERATURES)
    yield Text(
        f"{which} Each point is a misranked input: its entropy H, and the beta = "
        f"1/theta at which its target is most probable. {rules_caption(of_size)}"
    )
    yield Figures([_picture_of_head(head, rule) for head, rule in zip(heads, rules, strict=True)])


def _rule_of_head(fit: Fit, head: SolvedOne) -> Fit:
    """The entry of a head, as a fit of one entry."""
    entry = fit.entry_of(head.layer, head.head)
    assert entry is not None  # a head without a rule gains nothing
    return replace(fit, entries=(replace(entry, layer=None, head=None),))


def _picture_of_head(head: SolvedOne, rule: Fit) -> Picture:
    label = head_label(head.layer, head.head)
    n = int(head.rows.has_finite_optimum().sum())
    drawn = f"; drawn is a random subset of {MAX_POINTS:,}" if n > MAX_POINTS else ""
    caption = (
        f"The rule gains {head.gain:.3f} nats. Misranked inputs with a finite optimal beta: {n:,}"
        f"{drawn}.{edge_caption(head.rows)}"
    )
    others = rules_beside(rule, head.constant)
    return draw_picture(capitalised(label), caption, plot_optimal_beta, head.rows, rule, others)


def _rule_section(fit: Fit, is_drawn: bool) -> Iterable[Block | Figures]:
    rule = fit.rule
    if not is_drawn:
        yield Figures([_rule_picture(fit)])
    yield Facts([*rule_facts(fit), *over_constant_facts(fit)])
    if not fit.ignores_inputs:
        used = (("H", rule.by_entropy), ("n", rule.by_size))
        yield Text(" ".join(SYMBOLS[symbol] for symbol, uses in used if uses))
    if fit.has_heads:
        yield Text("A head that the fit does not name keeps beta = 1.")


def _inputs_section(fit: Fit, solved: Solved) -> Iterable[PageBlock]:
    """The inputs of the fit by class, and misranked inputs by n; nothing without any."""
    facts, head = [*input_facts(fit)], solved if isinstance(solved, SolvedHead) else None
    if head:
        facts += theta_facts(head.rows)
    if facts:
        yield Heading("Inputs")
        yield Facts(facts)
    if head:
        by_size = [(f"n = {n:,}", text) for n, text in head.misranked.items()]
        yield Folded("Misranked inputs by n", [Facts(by_size)])


def _scored_facts(scores: ScoresRecord | None) -> Iterable[tuple[str, str]]:
    """The source of the scored items, with its fingerprint."""
    if scores:
        of = scores.evidence.of
        yield "scored on", f"{of.name} ({of.fingerprint}): {scores.scored_items()}"


def _score_pictures(scores: ScoresRecord) -> Iterable[Picture]:
    """Scores by size, reliability, and gains of heads."""
    own, items = scores.fits[0], scores.judged

    def draw_scores(metric: Metric, gain: bool, title: str) -> Picture:
        caption = "Bars: two standard errors."
        if gain and plots.leaves_figure(items, own, metric):
            caption += f" {plots.BEYOND_NOTE}"
        look: dict[str, Any] = {"own": own, "gain": gain, "name": THIS_FIT}
        return draw_picture(title, caption, plots.plot_scores, items, metric, **look)

    yield draw_scores(LOG_P, True, "Gain over the baseline by size")
    if RIGHT in items.values:
        title = f"{capitalised(metric_label(RIGHT, items.of.items))} by size"
        yield draw_scores(RIGHT, False, title)
    if CONFIDENCE in items.values:
        yield _reliability_picture(items, own)
        caption = "Errors of opposite sign at several n cancel in the ECE of all."
        look: dict[str, Any] = {"own": own, "name": THIS_FIT}
        yield draw_picture("ECE by size", caption, plots.plot_scores, items, ECE, **look)
    if len(items.heads) > 1:
        caption = "Log-likelihood, nats. Orange: gains; purple: loses; x: unchanged."
        yield draw_picture("Gain by layer and head", caption, plots.plot_gain_map, items, own)


def _reliability_picture(items: Evidence, own: str) -> Picture:
    bins, chance = reliability_of(items, BASELINE).n, reliability_of(items, own).chance
    caption = (
        f"{len(bins)} bins of {bins.min():,} {items.of.items.name} or more. Above the diagonal: "
        "under-confident; below: over-confident. The ECE is the mean distance from the diagonal; "
        f"with so many {items.of.items.name}, perfectly calibrated probabilities would have one "
        f"of {100 * chance:.1f} %."
    )
    look: dict[str, Any] = {"own": own, "name": THIS_FIT}
    return draw_picture("Reliability diagram", caption, plots.plot_reliability, items, **look)


def _rule_picture(fit: Fit, size: tuple[float, float] = FIGURE_SIZE) -> Picture:
    if fit.has_heads:
        caption = (
            f"{_place_of_betas(fit)}Red: beta > 1, sharper than the baseline; blue: more diffuse; "
            "x: no rule."
        )
        return draw_picture("Beta of the heads", caption, plots.plot_head_betas, fit)
    caption = "Beta over the domain of the fit, and beyond."
    if fit.ignores_inputs:
        caption = "Beta is the same for every input."
    return draw_picture("The rule", caption, plots.plot_rule, fit, size=size)


def _place_of_betas(fit: Fit) -> str:
    """A sentence on the entropy and n at which the map shows beta; see `typical_betas`."""
    if fit.ignores_inputs:
        return ""
    if not fit.rule.by_size:
        return "In the middle of the entropies of the fit. "
    half = " and half of the entropy that is possible there" if fit.rule.by_entropy else ""
    return f"At the largest n of the fit{half}. "


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
