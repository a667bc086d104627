"""The page on a fit of one head or many, scored on logits on disk."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.evaluation.score_logits import LogitScores
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.fitting.rule_fitting import ENOUGH_ROWS
from calibrate.fitting.solved_rows import head_in_words
from calibrate.maths.rule import LOG_SIZE
from calibrate.report import fit_plots, plot_style, score_plots
from calibrate.report.fit_views import facts, load_line
from calibrate.report.logits_views import FIRST_FIT, TOLD, head_cells, rows_in_words, size_cells
from calibrate.report.page import Picture, draw, write_page
from calibrate.report.per_head_views import SHOWN
from calibrate.report.rule_text import guards, looked_at, outside, polynomial, span
from calibrate.report.verdict import heads_moved, verdict_on_logits


def write_logits_report(path: Path, fit: Coefficients, scores: LogitScores) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: what was calibrated; the first fit of the scores.
      scores: of rows that it was, if possible, not made of.
    """
    layered = any(entry.layer is not None for entry in fit.entries)
    write_page(
        path,
        "logits_report.html.j2",
        fit=fit,
        whose=_whose(fit),
        logits=scores.name,
        verdict=verdict_on_logits(scores, FIRST_FIT),
        highlights=_highlights(scores),
        load_line=load_line(fit) + ".layer(i)" * layered,
        per_head=fit.has_heads or layered,
        layered=layered,
        sizes=scores.sizes,
        weighed=scores.weighed,
        enough=ENOUGH_ROWS,
        tables=[
            (told[0].upper() + told[1:], *size_cells(scores, measure))
            for measure, (told, *_) in TOLD.items()
        ],
        by_head=_head_table(scores, fit) if len(scores.heads) > 1 else None,
        left_alone=not all(scores.names(FIRST_FIT, i) for i in range(len(scores.heads))),
        pictures=_pictures(scores, fit),
        by_size=fit.rule.kind == LOG_SIZE,
        polynomial=_rule_in_words(fit),
        domain=_domain_in_words(fit),
        outside=outside(fit.rule),
        guards=guards(fit.rule),
        facts=list(facts(fit)),
        scored_on=f"{scores.name} ({scores.fingerprint}): {rows_in_words(scores)}",
    )


def _whose(fit: Coefficients) -> str:
    """Whom the entries are for."""
    first, *others = fit.entries
    if not others:
        return head_in_words(first.layer, first.head) or "all heads alike"
    of_layers = [entry.head is None for entry in fit.entries]
    words = "heads" if not any(of_layers) else "layers" if all(of_layers) else "heads and layers"
    return f"{len(fit.entries):,} {words}"


def _rule_in_words(fit: Coefficients) -> str:
    """The rule of the only entry, or what the rules of several have in common."""
    if len(fit.entries) == 1:
        return polynomial(fit.entries[0].coefficients)
    form = "kappa log n + b" if fit.rule.kind == LOG_SIZE else "a polynomial of degree 4 in H"
    return f"{form}, of each head its own"


def _domain_in_words(fit: Coefficients) -> str:
    """The domain, or what the domains of several entries span."""
    lows, highs = zip(*(entry.domain for entry in fit.entries), strict=True)
    return span((min(lows), max(highs)), fit.rule.kind).replace("..", "to")


def _highlights(scores: LogitScores) -> list[tuple[str, str]]:
    """(a figure, what it is): the page in three numbers."""
    found = scores.estimate()
    gain, error = found.of(FIRST_FIT, "log_p_gain")
    before, after = (100 * found.of(rule, "p")[0] for rule in (0, FIRST_FIT))
    return [
        (
            f"{gain:+.4f} nats",
            "of log p of the target over plain softmax" + f", ± {error:.4f}" * math.isfinite(error),
        ),
        (
            f"{before:.1f} % to {after:.1f} %",
            "the mean probability of the target, under plain softmax and with this fit",
        ),
        _most(scores),
    ]


def _most(scores: LogitScores) -> tuple[str, str]:
    """How many heads gain; of one head alone, at which size it gains most."""
    if len(scores.heads) > 1:
        _, up, down = heads_moved(scores, FIRST_FIT)
        best = scores.ranked(FIRST_FIT)[0]
        gain, _ = scores.estimate(head=best).of(FIRST_FIT, "log_p_gain")
        most = f"; the most {scores.head_in_words(best)}, {gain:+.4f} nats" * math.isfinite(gain)
        return f"{up:,} of {len(scores.heads):,} heads", f"gain measurably, {down:,} lose{most}"
    gains = [
        scores.estimate(size=i).of(FIRST_FIT, "log_p_gain")[0] for i in range(len(scores.sizes))
    ]
    best = int(np.nanargmax(gains))  # NaN of a size none of whose rows counts
    return f"{gains[best]:+.4f} nats", f"at n = {scores.sizes[best]:,}, the largest gain"


def _head_table(scores: LogitScores, fit: Coefficients) -> tuple[list[str], list[list[str]], int]:
    """The heads with what they gain, and the rule of each."""
    headings, rows, rest = head_cells(scores)
    for row, head in zip(rows, scores.ranked(FIRST_FIT)[:SHOWN], strict=True):
        entry = fit.entry_of(*scores.heads[head])
        row.append(_entry_in_words(fit, entry) if entry else "1")
    return [*headings, "beta(n)" if fit.rule.kind == LOG_SIZE else "beta, over H"], rows, rest


def _entry_in_words(fit: Coefficients, entry: Entry) -> str:
    """A line in log n; of a polynomial, which has no room in a table, the least and most."""
    if fit.rule.kind == LOG_SIZE:
        return polynomial(entry.coefficients)
    _, beta = plot_style.rule_curve(fit, entry, np.linspace(*entry.domain, 201))
    return f"{beta.min():.2f} to {beta.max():.2f}"


def _pictures(scores: LogitScores, fit: Coefficients) -> list[Picture]:
    by_size: dict[str, Any] = {
        "log_p": (
            "Log-probability against set size",
            "The mean over the rows of each size; bars of two standard errors.",
        ),
        "log_p_gain": (
            "Gain against set size",
            "The same, less that of plain softmax on the same rows: above 0 the target is more "
            "probable than without a fit.",
        ),
    }
    pictures = [
        draw(score_plots.plot_by_size, scores, FIRST_FIT, measure, title=title, caption=caption)
        for measure, (title, caption) in by_size.items()
    ]
    if len(scores.heads) > 1:
        pictures.append(
            draw(score_plots.plot_gain_map, scores, FIRST_FIT, title="Gain by layer and head",
                 caption="What this fit adds to log p on these rows, set sizes alike; orange "
                 "gains, purple loses. x: left as it is.")
        )  # fmt: skip
    order = _by_gain(scores, fit)
    crowd = (
        f" Coloured are the {len(plot_style.HEAD_STYLES)} heads that gain most here."
        if len(order) > fit_plots.MAX_COLOURED
        else ""
    )
    pictures.append(
        draw(fit_plots.plot_betas, fit, order, title="Beta",
             caption=f"The inverse temperature by {looked_at(fit.rule)}, over what each rule was "
             f"fitted on.{crowd}")
    )  # fmt: skip
    return pictures


def _by_gain(scores: LogitScores, fit: Coefficients) -> list[Entry]:
    """Every entry once: those of heads that gain most first, those that no row was of last."""
    ranked = (fit.entry_of(*scores.heads[head]) for head in scores.ranked(FIRST_FIT))
    return list(dict.fromkeys(entry for entry in (*ranked, *fit.entries) if entry is not None))
