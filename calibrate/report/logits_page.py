"""The page on a fit of one head or many, scored on logits on disk."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from calibrate.evidence.evidence import ENOUGH_ROWS
from calibrate.evidence.evidence import Evidence as LogitScores
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.report import fit_plots, score_plots
from calibrate.report.blocks import Block, Heading, Text
from calibrate.report.fit_verdict import heads_moved, verdict_on_logits
from calibrate.report.logits_record import FIRST_FIT, LogitsRecord
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
from calibrate.report.plot_style import HEAD_STYLES
from calibrate.report.rule_curves import largest_size, of_both
from calibrate.report.selection import selection_section
from calibrate.report.wording import variable
from calibrate.rows.solved_rows import head_label


def write_logits_page(path: Path, fit: Coefficients, scores: LogitScores) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: what was calibrated; the first fit of the scores.
      scores: of rows that it was, if possible, not made of.
    """
    record = LogitsRecord(scores)
    scored_on = f"{scores.name} ({scores.fingerprint}): {record.scored_rows()}"
    blocks = [
        Highlights([*_mean_gain(scores), _heads_or_best_size(scores)]),
        *usage_section(fit),
        *_score_sections(record),
        *selection_section(fit),
        Heading("Figures"),
        Figures(_pictures(scores, fit)),
        *rule_section(fit),
        *provenance_section(fit, scored_on),
    ]
    subtitle = (
        f"Calibration of adaptive-temperature softmax for {_heads_of(fit, scores)}, scored on the "
        f"logits of {scores.name}"
    )
    write_page(path, Page(fit.reference, subtitle, verdict_on_logits(scores, FIRST_FIT), blocks))


def _heads_of(fit: Coefficients, scores: LogitScores) -> str:
    """The heads that the entries are for; of an entry for all, those that were scored."""
    first, *others = fit.entries
    if not others:
        alike = "all heads" if len(scores.heads) > 1 else "one head"
        return head_label(first.layer, first.head) or alike
    of_layers = [entry.head is None for entry in fit.entries]
    words = "heads" if not any(of_layers) else "layers" if all(of_layers) else "heads and layers"
    return f"{len(fit.entries):,} {words}"


def _mean_gain(scores: LogitScores) -> list[tuple[str, str]]:
    estimate = scores.estimate()
    gain, error = estimate.of(FIRST_FIT, "log_p_gain")
    before, after = (100 * estimate.of(rule, "p")[0] for rule in (0, FIRST_FIT))
    return [
        (
            f"{gain:+.4f} nats",
            "of log p of the target over plain softmax" + f", ± {error:.4f}" * math.isfinite(error),
        ),
        (
            f"{before:.1f} % to {after:.1f} %",
            "the mean probability of the target, under plain softmax and with this fit",
        ),
    ]


def _heads_or_best_size(scores: LogitScores) -> tuple[str, str]:
    """How many heads gain; of one head alone, at which size it gains most."""
    if len(scores.heads) > 1:
        _, up, down = heads_moved(scores, FIRST_FIT)
        best = scores.ranked(FIRST_FIT)[0]
        gain, _ = scores.estimate(head=best).of(FIRST_FIT, "log_p_gain")
        most = f"; the most {scores.head_label(best)}, {gain:+.4f} nats" * math.isfinite(gain)
        verb = "gains" if up == 1 else "gain"
        loss = f"{down:,} {'loses' if down == 1 else 'lose'}"
        return f"{up:,} of {len(scores.heads):,} heads", f"{verb} measurably, {loss}{most}"
    gains = [
        scores.estimate(size=i).of(FIRST_FIT, "log_p_gain")[0] for i in range(len(scores.sizes))
    ]
    best = int(np.nanargmax(gains))  # NaN of a size none of whose rows counts
    return f"{gains[best]:+.4f} nats", f"at n = {scores.sizes[best]:,}, the largest gain"


def _score_sections(record: LogitsRecord) -> Iterable[Block]:
    scores = record.scores
    rows = "are weighted" if scores.weighed else "have equal weight"
    sizes = f"; sizes too, or less weight where they have fewer than {ENOUGH_ROWS} rows"
    yield Heading("By set size")
    yield Text(
        "The probability of the target (of several targets, their total). Rows of one size "
        f"{rows}{sizes * (len(scores.sizes) > 1)}."
    )
    yield from record.size_tables()
    if len(scores.heads) > 1:
        if not scores.n_groups:
            yield Text(
                "Standard errors assume independent rows. Rows that several heads make of one "
                "prompt are not: give an array group, or the errors over all heads are too small."
            )
        yield Heading("By head")
        if not all(scores.names(FIRST_FIT, i) for i in range(len(scores.heads))):
            yield Text("Heads without a rule in the fit are unchanged.")
        yield record.head_table()


def _pictures(scores: LogitScores, fit: Coefficients) -> list[Picture]:
    by_size = {
        "log_p": (
            "Log-probability against set size",
            "The mean over the rows of each size; bars of two standard errors.",
        ),
        "log_p_gain": (
            "Gain against set size",
            "Log-probability less that of plain softmax on the same rows: above 0 the target is "
            "more probable than without a fit.",
        ),
    }
    pictures = [
        draw(score_plots.plot_by_size, scores, FIRST_FIT, measure, title=title, caption=caption)
        for measure, (title, caption) in by_size.items()
    ]
    if len(scores.heads) > 1:
        pictures.append(
            draw(score_plots.plot_gain_map, scores, FIRST_FIT, title="Gain by layer and head",
                 caption="What this fit adds to log p on these rows, with equal weight per set "
                 "size; orange gains, purple loses. x: unchanged.")
        )  # fmt: skip
    order = _by_gain(scores, fit)
    many = len(order) > fit_plots.MAX_COLOURED
    shown = "over the domain of each rule"
    if of_both(fit.rule) and len(order) > 1:
        shown += f", for sets of {largest_size(fit):,} items, the largest that they were fitted on"
    elif of_both(fit.rule):
        shown = "for sets of a few sizes, each up to their greatest entropy, log n"
    coloured = f" Coloured: the {len(HEAD_STYLES)} heads that gain most here." * many
    pictures.append(
        draw(fit_plots.plot_betas, fit, order, title="Beta",
             caption=f"The inverse temperature by {variable(fit.rule)}, {shown}.{coloured}")
    )  # fmt: skip
    return pictures


def _by_gain(scores: LogitScores, fit: Coefficients) -> list[Entry]:
    """Every entry once: those of heads that gain most first, those without any rows last."""
    ranked = (fit.entry_of(*scores.heads[head]) for head in scores.ranked(FIRST_FIT))
    return list(dict.fromkeys(entry for entry in (*ranked, *fit.entries) if entry is not None))
