"""The section of a page on optimal temperatures: of a head with its rule, or of several heads."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import one_constant, paper
from calibrate.fitting.fit_rule import fit_best_constant
from calibrate.report.blocks import Block, Heading, Text
from calibrate.report.pictures import WIDE, Figures, Picture, draw_picture
from calibrate.report.plot_polynomial import (
    PUBLISHED,
    depends_on_size,
    edge_caption,
    plot_optimal_beta,
    points_caption,
    rules_caption,
    with_finite_optimum,
)
from calibrate.report.run_record import SolvedHead
from calibrate.solver.solved_rows import Rows, head_label
from calibrate.store.fit import Fit

HEADING = "Optimal temperatures"


class SolvedOne(NamedTuple):
    """One of the heads of a collection, with a rule of its own.

    Attributes:
      layer: its layer, None where unknown.
      head: its number in the layer, None where unknown.
      gain: log-likelihood that its rule gains, held out, nats.
      rows: its inputs, solved.
    """

    layer: int | None
    head: int | None
    gain: float
    rows: Rows


# Inputs of a head, or inputs of several heads; None: of a model.
Solved = SolvedHead | Sequence[SolvedOne] | None


def temperatures_section(fit: Fit, solved: Solved) -> Iterable[Block | Figures]:
    """The optimal temperature of each misranked input, under the rules; nothing without inputs."""
    if isinstance(solved, SolvedHead):
        return _section_of_a_head(fit, solved.rows)
    return _section_of_heads(fit, solved) if solved else ()


def rules_beside(fit: Fit, rows: Rows) -> dict[str, Fit]:
    """The published polynomial, and the constant of highest likelihood; without the fit itself."""
    rules = {PUBLISHED: paper()}
    constant = None if fit.ignores_inputs else best_constant(rows)
    if constant is not None:
        rules[CONSTANT] = one_constant(constant)
    return {name: rule for name, rule in rules.items() if rule != fit}


def best_constant(rows: Rows) -> float | None:
    """The constant of highest likelihood; None of misranked inputs alone, where it is biased."""
    return None if rows.misranked[rows.weight > 0].all() else fit_best_constant(rows)


def _section_of_a_head(fit: Fit, rows: Rows) -> Iterable[Block | Figures]:
    yield Heading(HEADING)
    picture = draw_picture(
        HEADING,
        f"{points_caption(rows)} {rules_caption(fit)}",
        plot_optimal_beta,
        rows,
        fit,
        rules_beside(fit, rows),
        size=WIDE,
    )
    yield Figures([picture], wide=True)


def _section_of_heads(fit: Fit, heads: Sequence[SolvedOne]) -> Iterable[Block | Figures]:
    rules = [_rule_of(fit, head) for head in heads]
    of_size = next(filter(depends_on_size, rules), rules[0])
    yield Heading(HEADING)
    yield Text(
        f"{_which(heads)} Each point is a misranked input: its entropy H, and the beta = "
        f"1/theta at which its target is most probable. {rules_caption(of_size)}"
    )
    yield Figures([_picture_of(head, rule) for head, rule in zip(heads, rules, strict=True)])


def _which(heads: Sequence[SolvedOne]) -> str:
    if len(heads) == 1:
        return "The head with the largest held-out gain."
    return f"The {len(heads)} heads with the largest held-out gains."


def _rule_of(fit: Fit, head: SolvedOne) -> Fit:
    """The entry of a head, as a fit of one entry."""
    entry = fit.entry_of(head.layer, head.head)
    assert entry is not None  # a head without a rule gains nothing
    return replace(fit, entries=(replace(entry, layer=None, head=None),))


def _picture_of(head: SolvedOne, rule: Fit) -> Picture:
    label = head_label(head.layer, head.head)
    n = int(with_finite_optimum(head.rows).sum())
    caption = (
        f"The rule gains {head.gain:.3f} nats. Misranked inputs with a finite optimal beta: {n:,}."
        f"{edge_caption(head.rows)}"
    )
    title = f"{label[:1].upper()}{label[1:]}"
    others = rules_beside(rule, head.rows)
    return draw_picture(title, caption, plot_optimal_beta, head.rows, rule, others)
