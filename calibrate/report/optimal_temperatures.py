"""The section of a page on optimal temperatures: of a head with its polynomial, or of heads."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from calibrate.evidence.baselines import paper
from calibrate.report.blocks import Block, Facts, Heading, Text
from calibrate.report.pictures import WIDE, Figures, Picture, draw_picture
from calibrate.report.plot_polynomial import (
    depends_on_size,
    edge_caption,
    plot_optimal_beta,
    points_caption,
    rules_caption,
    with_finite_optimum,
)
from calibrate.report.polynomial_record import polynomial_blocks
from calibrate.report.run_record import SolvedHead
from calibrate.solver.solved_rows import Rows, head_label
from calibrate.store.coefficients import Coefficients

HEADING = "Optimal temperatures"


class SolvedOne(NamedTuple):
    """One of the heads of a collection, with a rule of its own.

    Attributes:
      layer: its layer, None where unknown.
      head: its number in the layer, None where unknown.
      gain: log-likelihood that its rule gains, nats.
      rows: its inputs, solved.
      held_out: whether the gain is on other rows than the rule was fitted to.
    """

    layer: int | None
    head: int | None
    gain: float
    rows: Rows
    held_out: bool


# Inputs of a head with their polynomial, or inputs of several heads; None: of a model.
Solved = SolvedHead | Sequence[SolvedOne] | None


def temperatures_section(fit: Coefficients, solved: Solved) -> Iterable[Block | Figures]:
    """The optimal temperature of each misranked input, under the rules; nothing without inputs."""
    if isinstance(solved, SolvedHead):
        return _section_of_a_head(fit, solved)
    return _section_of_heads(fit, solved) if solved else ()


def _section_of_a_head(fit: Coefficients, solved: SolvedHead) -> Iterable[Block | Figures]:
    others = {"published": paper(), "selected": fit}
    heading: Block = Heading(HEADING)
    numbers: list[Block] = [Text(solved.no_polynomial)]
    if solved.polynomial is not None:
        heading, *blocks = polynomial_blocks(solved.polynomial)
        facts = [row for block in blocks if isinstance(block, Facts) for row in block.rows]
        numbers = [Facts(facts)]
    yield heading
    picture = draw_picture(
        HEADING,
        f"{points_caption(solved.rows)} {rules_caption(others)}",
        plot_optimal_beta,
        solved.rows,
        solved.polynomial,
        others,
        size=WIDE,
    )
    yield Figures([picture], wide=True)
    yield from numbers


def _section_of_heads(fit: Coefficients, heads: Sequence[SolvedOne]) -> Iterable[Block | Figures]:
    rules = [_rule_of(fit, head) for head in heads]
    of_size = next(filter(depends_on_size, rules), rules[0])
    yield Heading(HEADING)
    yield Text(
        f"{_which(heads)} Each point is a misranked input: its entropy H, and the beta = "
        f"1/theta at which its target is most probable. {rules_caption({'selected': of_size})}"
    )
    yield Figures([_picture_of(head, rule) for head, rule in zip(heads, rules, strict=True)])


def _which(heads: Sequence[SolvedOne]) -> str:
    gain = "held-out gain" if all(head.held_out for head in heads) else "gain"
    if len(heads) == 1:
        return f"The head with the largest {gain}."
    return f"The {len(heads)} heads with the largest {gain}s."


def _rule_of(fit: Coefficients, head: SolvedOne) -> Coefficients:
    """The entry of a head, as a fit of one entry."""
    entry = fit.entry_of(head.layer, head.head)
    assert entry is not None  # a head without a rule gains nothing
    return replace(fit, entries=(replace(entry, layer=None, head=None),))


def _picture_of(head: SolvedOne, rule: Coefficients) -> Picture:
    label = head_label(head.layer, head.head)
    n = int(with_finite_optimum(head.rows).sum())
    caption = (
        f"The rule gains {head.gain:.3f} nats. Misranked inputs with a finite optimal beta: {n:,}."
        f"{edge_caption(head.rows)}"
    )
    others = {"published": paper(), "selected": rule}
    title = f"{label[:1].upper()}{label[1:]}"
    return draw_picture(title, caption, plot_optimal_beta, head.rows, None, others)
