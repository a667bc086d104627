"""The report: one self-contained HTML page on a fit, with its scores, figures and provenance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.evaluation.baselines import label, paper
from calibrate.evaluation.comparison import Comparison
from calibrate.evaluation.examples import (
    Closeup,
    estimated_dispersal,
    look_closely,
    measured_dispersal,
    misranked_rows,
    reach,
    shares,
)
from calibrate.files.coefficients import Coefficients
from calibrate.fitting.model_selection import in_words
from calibrate.heads import Head
from calibrate.maths.rule import LOG_SIZE
from calibrate.report import example_plots, fit_plots, score_plots
from calibrate.report.comparison_views import p_value
from calibrate.report.fit_views import facts, left_out, load_line
from calibrate.report.page import Picture, draw, encode, write_page
from calibrate.report.rule_text import guards, looked_at, outside, polynomial, span
from calibrate.report.verdict import beside_rivals, verdict

CLOSEUP_SETS = 128
FITTED_RIVALS = (
    "procedure",
    "polynomial",
    "kappa-log-n",
    "constant",
)  # they need the collection that the fit is made of


def write_report(
    path: Path, fit: Coefficients, head: Head, comparison: Comparison, seed: int
) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: what was calibrated; one entry.
      head: what it is for.
      comparison: of the rules "plain", "paper", "own" (this fit), "hindsight" and others on it.
      seed: of the sets shown item by item.
    """
    closeups = look_closely(head, comparison.sizes, CLOSEUP_SETS, seed)
    write_page(
        path,
        "head_report.html.j2",
        fit=fit,
        head=head.name,
        verdict=verdict(comparison, fit.reference),
        rivals=beside_rivals(comparison),
        highlights=_highlights(comparison, closeups, fit),
        choice=fit.quality.get("verdict"),
        candidates=_candidate_rows(fit),
        sizes=comparison.sizes,
        sets=comparison.sets,
        rules=_rule_rows(comparison, fit.reference),
        missing=[label(rule) for rule in FITTED_RIVALS]
        if not set(FITTED_RIVALS) & set(comparison.rules)
        else [],
        pictures=[*_pictures(closeups, fit, comparison), *_evidence_pictures(fit)],
        lets_go=draw(
            example_plots.plot_reach,
            closeups,
            title="When this head lets go",
            caption="The coefficient of the target under plain softmax, the estimate "
            "1 / (1 + (n - 1) m) from the longest sets, and the bound of Lemma 2.1, which is "
            "true and says little at these sizes.",
        ),
        by_size=fit.rule.kind == LOG_SIZE,
        polynomial=polynomial(fit.only.coefficients),
        domain=span(fit.only.domain, fit.rule.kind).replace("..", "to"),
        guards=guards(fit.rule),
        outside=outside(fit.rule),
        left_out=left_out(fit.quality.get("rows", {})),
        rows=fit.quality.get("rows", {}),
        reach=reach(closeups),
        dispersal=_dispersal_in_words(closeups),
        closeup_sets=CLOSEUP_SETS,
        load_line=load_line(fit),
        facts=list(facts(fit)),
        seed=seed,
    )


def _highlights(
    comparison: Comparison, closeups: Sequence[Closeup], fit: Coefficients
) -> list[tuple[str, str]]:
    """(a figure, what it is): the page in three numbers."""
    plain, own = (comparison.accuracy[comparison.rules.index(r)] for r in ("plain", "own"))
    best = int(np.argmax(own - plain))
    return [
        (
            f"{100 * (own - plain)[best]:+.1f} points",
            f"of accuracy over plain softmax at n = {comparison.sizes[best]:,}, the largest gain "
            f"({100 * plain[best]:.1f} % to {100 * own[best]:.1f} %)",
        ),
        _letting_go(closeups),
        _share_in_domain(closeups, fit),
    ]


def _share_in_domain(closeups: Sequence[Closeup], fit: Coefficients) -> tuple[str, str]:
    """How many of the sets are like those that the fit was made of."""
    found = shares(closeups, fit)
    gated = 100 * np.mean([share.gated for share in found])
    beyond = 100 * np.mean([share.below + share.above for share in found])
    figure = f"{100 - gated - beyond:.0f} %"
    if fit.rule.kind == LOG_SIZE:
        sizes = span(fit.only.domain, LOG_SIZE).replace("..", "to")
        return figure, f"of the sets are of sizes that the fit was made of, {sizes}"
    clamped = "clamped at an end of the domain" if fit.rule.outside == "clamp" else "1 beyond it"
    return (
        figure,
        f"of the sets lie in the domain of the fit; for {beyond:.1f} % beta is {clamped}, and "
        f"for {gated:.0f} % it is 1, as their entropy is low (mean over the sizes)",
    )


def _letting_go(closeups: Sequence[Closeup]) -> tuple[str, str]:
    """Where the target loses half of the attention: as measured, or else as estimated."""
    measured = measured_dispersal(closeups)
    less = "plain softmax gives the target less than half of its attention"
    where = f"from there on {less}"
    if measured is not None:
        return f"{measured:,.0f} items", f"{where}, in half of the sets"
    longest = max(closeup.size for closeup in closeups)
    estimate = estimated_dispersal(closeups)
    said = f"an estimate from sets of {longest:,}"
    if not np.isfinite(estimate):
        return "at no size", f"{less}: {said}"
    return f"{estimate:,.0f} items", f"{where}: {said}"


def _dispersal_in_words(closeups: Sequence[Closeup]) -> str:
    measured, longest = measured_dispersal(closeups), max(c.size for c in closeups)
    seen = "not within these sizes" if measured is None else f"about {measured:,.0f} items"
    estimate = estimated_dispersal(closeups)
    where = f"n* = {estimate:,.0f}" if np.isfinite(estimate) else "nowhere"
    return f"measured: {seen}; estimated from sets of {longest:,} items: {where}"


def _rule_rows(comparison: Comparison, own: str) -> list[dict[str, Any]]:
    """Per rule, cells of (accuracy, its error, p against plain softmax) as they are printed."""
    best = comparison.accuracy[[r != "hindsight" for r in comparison.rules]].max(axis=0)
    return [
        {
            "label": label(rule, own),
            "own": rule == "own",
            "yardstick": rule == "hindsight",
            "cells": [
                {
                    "accuracy": f"{100 * comparison.accuracy[i, k]:.1f}",
                    "error": f"{100 * comparison.error[i, k]:.1f}",
                    "p": p_value(comparison.p_plain[i, k]),
                    "best": rule != "hindsight" and comparison.accuracy[i, k] == best[k],
                }
                for k in range(len(comparison.sizes))
            ],
        }
        for i, rule in enumerate(comparison.rules)
    ]


def _pictures(
    closeups: Sequence[Closeup], fit: Coefficients, comparison: Comparison
) -> list[Picture]:
    fits = {"plain softmax": None, "the paper's numbers": paper(), fit.reference: fit}
    pictures = [
        draw(score_plots.plot_accuracy, comparison, fit.reference,
              title="Accuracy against set size",
              caption="The share of sets that the head gets right; bands of two standard errors "
              "around plain softmax and this fit."),
        draw(score_plots.plot_gain, comparison, fit.reference, title="Gain against set size",
              caption="The same, less the accuracy of plain softmax on the same sets: what tells "
              "the rules apart."),
        *_rule_picture(closeups, fit),
        draw(example_plots.plot_beta_applied, closeups, fit, title="Beta applied",
              caption="The inverse temperature that this fit gives to sets of each size (dots are "
              f"spread a little for legibility). As for the domain, {outside(fit.rule)}."),
        draw(example_plots.plot_shares, closeups, fit, title="Which sets the fit reaches",
              caption="Sets outside the domain are unlike those that the fit was made of"
              + (": there its line is trusted to go on." if fit.rule.kind == LOG_SIZE else
                 ", and get what the rule says; those at or below the gate are left alone.")),
        draw(example_plots.plot_entropy_by_size, closeups, fits, title="Entropy against set size",
              caption="Medians and the middle 80 % of the sets. Dispersion is the rise of the "
              "plain curve; the adapted ones should stay below it."),
    ]  # fmt: skip
    heatmap = Picture(
        encode(example_plots.heatmap_figure(closeups, [None, fit])),
        "Coefficients, without and with the fit",
        f"{example_plots.N_SETS} sets (rows) and their 16 largest keys (columns), the target "
        "rightmost. A head that retrieves puts all its weight there.",
        wide=True,
    )
    return [*pictures, heatmap]


def _rule_picture(closeups: Sequence[Closeup], fit: Coefficients) -> list[Picture]:
    """The fit among misranked sets; nothing if there are none."""
    rows = misranked_rows(closeups)
    if not len(rows.interior().beta):
        return []
    explained = fit.quality.get("residuals", {}).get("beta_r_squared")
    share = "" if explained is None else (
        f" On the rows of the fit, {looked_at(fit.rule)} explains "
        f"{100 * max(explained, 0):.0f} % of the variance of the optimal beta."
    )  # fmt: skip
    caption = (
        f"Each dot is one of {CLOSEUP_SETS} other sets of each size, one that the head misranks, "
        f"at the temperature that serves its target best. Sets of one {looked_at(fit.rule)} want "
        f"very different temperatures; the curve is a compromise between them.{share}"
    )
    title = "The line" if fit.rule.kind == LOG_SIZE else "The polynomial"
    return [draw(fit_plots.plot_fit, rows, fit, paper(), title=title, caption=caption)]


def _candidate_rows(fit: Coefficients) -> list[dict[str, str]]:
    """The kinds of rule that were fitted, as they are printed; none if the file is silent."""
    objective = fit.source.get("options", {}).get("objective", "likelihood")
    unit = "nats" if objective == "likelihood" else f"of {objective}"
    return [
        {
            "label": in_words(one["kind"]),
            "log_p": f"{one['log_p']:.4f}",
            "gain": f"{one['gain']:+.4f} {unit}",
            "interval": f"{one['low']:+.4f} to {one['high']:+.4f}",
        }
        for one in fit.quality.get("candidates", [])
        if one.keys() >= {"kind", "log_p", "gain", "low", "high"}
    ]


def _evidence_pictures(fit: Coefficients) -> list[Picture]:
    """What the file says of how sure the fit is, as far as it does."""
    found = {
        "held_out": (
            fit_plots.plot_held_out,
            "Gain in log-probability, held out",
            "How much more probable the fit makes the target, by set size, on rows that its folds "
            "left out; bars of two standard errors. Plain softmax is 0.",
        ),
        "band": (
            fit_plots.plot_band,
            "How sure the curve is",
            "The fit, and the band that holds 95 % of the fits to rows drawn anew.",
        ),
        "learning_curve": (
            fit_plots.plot_learning_curve,
            "Would more rows help?",
            "The held-out score of fits to a share of the rows (mean of five folds). Where the "
            "curve is level, more rows of this kind bring nothing.",
        ),
    }
    return [
        draw(plot, fit, title=title, caption=caption)
        for key, (plot, title, caption) in found.items()
        if fit.quality.get(key)
    ]
