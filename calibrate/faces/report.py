"""The report: one self-contained HTML page on a fit, with its scores, figures and provenance."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined

from calibrate.faces import head_plots, plots, score_plots
from calibrate.faces.comparison_views import NOTHING, p_value
from calibrate.faces.fit_views import facts, guards, left_out, load_line, polynomial
from calibrate.faces.verdict import beside_rivals, verdict
from calibrate.files.coefficients import Coefficients
from calibrate.files.whole import write_whole
from calibrate.heads import Head
from calibrate.pipeline.closeup import (
    Closeup,
    estimated_dispersal,
    look_closely,
    measured_dispersal,
    misranked_rows,
    reach,
    shares,
)
from calibrate.pipeline.compare import Comparison
from calibrate.pipeline.rules import label, paper

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("report.html.j2")
CLOSEUP_SETS = 128
FITTED_RIVALS = ("kappa-log-n", "constant")  # they need the collection that the fit is made of
NARROW = (5.4, 4.2)  # inches: two side by side on a wide screen


class Picture(NamedTuple):
    """A figure of the page."""

    source: str  # a data: URL
    title: str
    caption: str
    wide: bool


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
    page = _environment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    html = page.render(
        fit=fit,
        head=head.name,
        verdict=verdict(comparison, fit.reference),
        rivals=beside_rivals(comparison),
        highlights=_highlights(comparison, closeups, fit),
        sizes=comparison.sizes,
        sets=comparison.sets,
        rules=_rule_rows(comparison, fit.reference),
        missing=[label(rule) for rule in FITTED_RIVALS if rule not in comparison.rules],
        pictures=_pictures(closeups, fit, comparison),
        lets_go=_draw(
            head_plots.plot_reach,
            closeups,
            title="When this head lets go",
            caption="The coefficient of the target under plain softmax, the estimate "
            "1 / (1 + (n - 1) m) from the longest sets, and the bound of Lemma 2.1, which is "
            "true and says little at these sizes.",
        ),
        polynomial=polynomial(fit.only.coefficients),
        domain=fit.only.domain,
        guards=guards(fit.rule),
        outside=fit.rule.outside,
        left_out=left_out(fit.quality.get("rows", {})),
        rows=fit.quality.get("rows", {}),
        reach=reach(closeups),
        dispersal=_dispersal_in_words(closeups),
        closeup_sets=CLOSEUP_SETS,
        load_line=load_line(fit),
        facts=list(facts(fit)),
        seed=seed,
    )
    write_whole(path, html.encode())


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["thousands"] = lambda value: f"{value:,.0f}"
    environment.filters["number"] = lambda value: NOTHING if value is None else f"{value:.3g}"
    return environment


def _highlights(
    comparison: Comparison, closeups: Sequence[Closeup], fit: Coefficients
) -> list[tuple[str, str]]:
    """(a figure, what it is): the page in three numbers."""
    plain, own = (comparison.accuracy[comparison.rules.index(r)] for r in ("plain", "own"))
    best = int(np.argmax(own - plain))
    found = shares(closeups, fit)
    gated = 100 * np.mean([share.gated for share in found])
    outside = 100 * np.mean([share.below + share.above for share in found])
    clamped = "clamped at an end of the domain" if fit.rule.outside == "clamp" else "1 beyond it"
    return [
        (
            f"{100 * (own - plain)[best]:+.1f} points",
            f"of accuracy over plain softmax at n = {comparison.sizes[best]:,}, the largest gain "
            f"({100 * plain[best]:.1f} % to {100 * own[best]:.1f} %)",
        ),
        _letting_go(closeups),
        (
            f"{100 - gated - outside:.0f} %",
            f"of the sets lie in the domain of the fit; for {outside:.1f} % beta is {clamped}, and "
            f"for {gated:.0f} % it is 1, as their entropy is low (mean over the sizes)",
        ),
    ]


def _letting_go(closeups: Sequence[Closeup]) -> tuple[str, str]:
    """Where the target loses half of the attention: as measured, or else as estimated."""
    measured = measured_dispersal(closeups)
    where = "from there on plain softmax gives the target less than half of its attention"
    if measured is not None:
        return f"{measured:,.0f} items", f"{where}, in half of the sets"
    longest = max(closeup.size for closeup in closeups)
    estimate = estimated_dispersal(closeups)
    return f"{estimate:,.0f} items", f"{where}: an estimate from sets of {longest:,}"


def _dispersal_in_words(closeups: Sequence[Closeup]) -> str:
    measured, longest = measured_dispersal(closeups), max(c.size for c in closeups)
    seen = "not within these sizes" if measured is None else f"about {measured:,.0f} items"
    return f"measured: {seen}; estimated from sets of {longest:,} items: n* = " + (
        f"{estimated_dispersal(closeups):,.0f}"
    )


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
        _draw(score_plots.plot_accuracy, comparison, fit.reference,
              title="Accuracy against set size",
              caption="The share of sets that the head gets right; bands of two standard errors "
              "around plain softmax and this fit."),
        _draw(score_plots.plot_gain, comparison, fit.reference, title="Gain against set size",
              caption="The same, less the accuracy of plain softmax on the same sets: what tells "
              "the rules apart."),
        *_polynomial_picture(closeups, fit),
        _draw(head_plots.plot_beta_applied, closeups, fit, title="Beta applied",
              caption="The inverse temperature that this fit gives to sets of each size (dots are "
              "spread a little for legibility). Beyond the domain the curve is "
              + ("held at its end." if fit.rule.outside == "clamp" else "1.")),
        _draw(head_plots.plot_shares, closeups, fit, title="Which sets the fit reaches",
              caption="Sets at or below the gate are left alone; sets outside the domain get what "
              "the rule says for its ends."),
        _draw(head_plots.plot_entropy_by_size, closeups, fits, title="Entropy against set size",
              caption="Medians and the middle 80 % of the sets. Dispersion is the rise of the "
              "plain curve; the adapted ones should stay below it."),
    ]  # fmt: skip
    heatmap = Picture(
        _encode(head_plots.heatmap_figure(closeups, [None, fit])),
        "Coefficients, without and with the fit",
        f"{head_plots.N_SETS} sets (rows) and their 16 largest keys (columns), the target "
        "rightmost. A head that retrieves puts all its weight there.",
        wide=True,
    )
    return [*pictures, heatmap]


def _polynomial_picture(closeups: Sequence[Closeup], fit: Coefficients) -> list[Picture]:
    """The fit among misranked sets; nothing if there are none."""
    rows = misranked_rows(closeups)
    if not len(rows.interior().beta):
        return []
    explained = fit.quality.get("residuals", {}).get("beta_r_squared")
    share = "" if explained is None else (
        f" On the rows of the fit, entropy explains {100 * max(explained, 0):.0f} % of the "
        "variance of the optimal beta."
    )  # fmt: skip
    caption = (
        f"Each dot is one of {CLOSEUP_SETS} other sets of each size, one that the head misranks, "
        "at the temperature that serves its target best. Sets of one entropy want very different "
        f"temperatures; the curve is a compromise between them.{share}"
    )
    return [_draw(plots.plot_fit, rows, fit, paper(), title="The polynomial", caption=caption)]


def _draw(draw: "Callable[..., Axes]", *arguments: Any, title: str, caption: str) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=NARROW, layout="constrained")
    draw(figure.add_subplot(), *arguments)
    return Picture(_encode(figure), title, caption, wide=False)


def _encode(figure: "Figure") -> str:
    return "data:image/png;base64," + base64.b64encode(plots.png(figure)).decode()
