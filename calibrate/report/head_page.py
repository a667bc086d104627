"""The page on a fit of one head: its scores, figures, and the sets that it was made of."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from calibrate.evidence.baselines import label, paper
from calibrate.evidence.evidence import Evidence as Comparison
from calibrate.files.coefficients import Coefficients
from calibrate.report import example_plots, fit_plots, score_plots
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.comparison_record import ComparisonRecord
from calibrate.report.fit_record import advice_on_rows, log_p_gains
from calibrate.report.fit_verdict import compare_rivals, describe_fit, verdict
from calibrate.report.page import (
    Figures,
    Highlights,
    Page,
    Picture,
    domain_text,
    draw,
    picture,
    provenance_section,
    rule_section,
    usage_section,
    write_page,
)
from calibrate.report.rule_curves import all_constant, of_both
from calibrate.report.selection import selection_section
from calibrate.report.wording import NOTHING, left_out, outside, percent, variable, with_error
from calibrate.rows.example_sets import (
    STREAM,
    ExampleSets,
    draw_examples,
    estimated_dispersal,
    measured_dispersal,
    misranked_rows,
    reach,
    shares,
)
from calibrate.rows.heads import Head

SHORT = ("plain", "paper", "own", "hard")
N_EXAMPLES = 128  # sets of each size, for figures and estimates
# They need the collection that the fit is made of.
FITTED_RIVALS = ("procedure", "entropy-and-size", "polynomial", "kappa-log-n", "constant")


def write_head_page(
    path: Path, fit: Coefficients, head: Head, comparison: Comparison, seed: int
) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: what was calibrated; one entry.
      head: what it is for.
      comparison: of the rules "plain", "paper", "own" (this fit), "hindsight" and others on it.
      seed: of the example sets.
    """
    examples = draw_examples(head, comparison.sizes, N_EXAMPLES, seed)
    scored_on = (
        f'seed {seed}, stream "evaluate"; example sets: stream "{STREAM}", '
        f"{N_EXAMPLES} of each size"
    )
    blocks = [
        Text(compare_rivals(comparison)),
        Text(describe_fit(fit, comparison)),
        Highlights(
            [_largest_gain(comparison), _half_attention(examples), *_in_domain(examples, fit)]
        ),
        *usage_section(fit),
        Heading("Accuracy"),
        _short_table(comparison, fit),
        *selection_section(fit),
        Heading("Figures"),
        Figures(_pictures(examples, fit, comparison)),
        *rule_section(fit),
        *_every_rule_section(comparison, fit),
        *_left_out_section(fit),
        *_sharpness_section(examples),
        *provenance_section(fit, scored_on),
    ]
    subtitle = f"Calibration of adaptive-temperature softmax for the head {head.name}"
    write_page(path, Page(fit.reference, subtitle, verdict(comparison, fit), blocks))


def _largest_gain(comparison: Comparison) -> tuple[str, str]:
    plain, own = (comparison.accuracy[comparison.rules.index(r)] for r in ("plain", "own"))
    best = int(np.argmax(own - plain))
    return (
        f"{100 * (own - plain)[best]:+.1f} points",
        f"of accuracy over plain softmax at n = {comparison.sizes[best]:,}, the largest gain "
        f"({100 * plain[best]:.1f} % to {100 * own[best]:.1f} %)",
    )


def _half_attention(examples: Sequence[ExampleSets]) -> tuple[str, str]:
    """The size at which the target loses half of the attention: measured, or else estimated."""
    measured = measured_dispersal(examples)
    less = "plain softmax gives the target less than half of its attention"
    if measured is not None:
        return f"{measured:,.0f} items", f"from there on {less}, in half of the sets"
    estimate, longest = estimated_dispersal(examples), max(sets.size for sets in examples)
    source = f"(estimate from sets of {longest:,})"
    if not np.isfinite(estimate):
        return "at no size", f"{less} {source}"
    return f"{estimate:,.0f} items", f"from there on {less} {source}"


def _in_domain(examples: Sequence[ExampleSets], fit: Coefficients) -> Iterable[tuple[str, str]]:
    """The share of the sets in the domain of the fit, where that matters."""
    if all_constant(fit):
        return
    by_size = shares(examples, fit)
    gated, beyond, other_size = (
        round(100 * float(np.mean(part)), 1)
        for part in zip(*((x.gated, x.below + x.above, x.other_size) for x in by_size), strict=True)
    )
    inside = f"{100 - gated - beyond - other_size:.4g} %"
    if not fit.rule.by_entropy:
        yield inside, f"of the sets are of sizes that the fit was made of, {domain_text(fit)}"
        return
    parts = ["of the sets lie in the domain of the fit"]
    if of_both(fit.rule):
        parts.append(f"{other_size:g} % are of other sizes, and {beyond:g} % of other entropies")
    else:
        beta = "clamped at an end of the domain" if fit.rule.outside == "clamp" else "1"
        parts.append(f"{beyond:g} % lie outside, where beta is {beta}")
    if fit.rule.min_entropy:
        parts.append(f"for {gated:g} % beta is 1, as their entropy is low")
    yield inside, "; ".join(parts) + " (mean over the sizes)"


def _every_rule_section(comparison: Comparison, fit: Coefficients) -> Iterable[Block]:
    """Every rule with its p-values, and what it recovers."""
    yield Heading("Every rule")
    yield from ComparisonRecord(comparison, fit.reference).blocks()
    if not set(FITTED_RIVALS) & set(comparison.rules):
        rivals = ", ".join(f"“{label(rule)}”" for rule in FITTED_RIVALS)
        yield Text(
            f"Left out are {rivals}: they are fitted to the collection of this fit, which is not "
            "in ./runs."
        )


def _short_table(comparison: Comparison, fit: Coefficients) -> Table:
    """A row per set size: the accuracy of what people compare, and what log p gains."""
    shown = [rule for rule in SHORT if rule in comparison.rules]
    log_p, own = log_p_gains(fit), comparison.rules.index("own")
    rows = []
    for k, size in enumerate(comparison.sizes):
        shares = (percent(comparison.accuracy[comparison.rules.index(r), k]) for r in shown)
        gain, error = 100 * comparison.gain[own, k], 100 * comparison.gain_error[own, k]
        points = with_error(gain, error, "+.1f")
        rows.append([f"{size:,}", *shares, points, log_p.get(size, NOTHING)])
    labels = (label(rule, fit.reference) for rule in shown)
    return Table(
        ["n", *labels, "gain over plain", "log p gain"], rows,
        "Accuracy in %, on sets that no fit has seen",
        "Gain over plain softmax in points, paired set by set, and in nats of log p of the target "
        "on held-out rows of the fit's collection, each ± standard error.",
    )  # fmt: skip


def _pictures(
    examples: Sequence[ExampleSets], fit: Coefficients, comparison: Comparison
) -> list[Picture]:
    fits = {"plain softmax": None, "the paper's numbers": paper(), fit.reference: fit}
    heatmap = picture(
        example_plots.heatmap_figure(examples, [None, fit]),
        "Coefficients, without and with the fit",
        f"{example_plots.N_SETS} sets (rows) and their 16 largest keys (columns), the target "
        "rightmost. A head that retrieves puts all its weight there.",
        wide=True,
    )
    return [
        draw(score_plots.plot_accuracy, comparison, fit.reference,
             title="Accuracy against set size",
             caption="The share of sets that the head gets right; bands of two standard errors "
             "around plain softmax and this fit."),
        draw(score_plots.plot_gain, comparison, fit.reference, title="Gain against set size",
             caption="Accuracy less that of plain softmax on the same sets."),
        *_rule_picture(examples, fit),
        *([] if all_constant(fit) else _beta_pictures(examples, fit)),
        draw(example_plots.plot_entropy_by_size, examples, fits, title="Entropy against set size",
             caption="Medians and the middle 80 % of the sets. Dispersion is the rise of the "
             "plain curve; the adapted curves should stay below it."),
        *_evidence_pictures(fit),
        heatmap,
    ]  # fmt: skip


def _beta_pictures(examples: Sequence[ExampleSets], fit: Coefficients) -> list[Picture]:
    """Where on a rule that is not constant the sets lie."""
    beyond = outside(fit.rule, fit.entries)
    ends = "A curve ends at the greatest entropy of its sets, log n. " * of_both(fit.rule)
    return [
        draw(example_plots.plot_beta_applied, examples, fit, title="Beta applied",
             caption="The inverse temperature that this fit gives to sets of each size (dots are "
             f"spread a little for legibility). {ends}The domain is {domain_text(fit)}; {beyond}."),
        draw(example_plots.plot_shares, examples, fit, title="Sets in the domain of the fit",
             caption="Sets outside the domain are unlike those that the fit was made of"
             + ("; at or below the gate, beta is 1." if fit.rule.min_entropy else f": {beyond}.")),
    ]  # fmt: skip


def _rule_picture(examples: Sequence[ExampleSets], fit: Coefficients) -> list[Picture]:
    """A fit to misranked sets among such sets; nothing of other fits, or if there are none."""
    rows = misranked_rows(examples)
    of_all = fit.source.get("options", {}).get("rows") == "all"
    if of_all or not len(rows.interior().beta):
        return []
    curves = "curve is a compromise"
    if of_both(fit.rule):
        curves = "curves, one for each set size, are a compromise"
    explained = fit.quality.get("residuals", {}).get("beta_r_squared")
    share = "" if explained is None else (
        f" On the rows of the fit, {variable(fit.rule)} explains "
        f"{100 * max(explained, 0):.0f} % of the variance of the optimal beta."
    )  # fmt: skip
    caption = (
        f"Each dot is a misranked set, of {N_EXAMPLES} example sets of each size, at the "
        f"temperature that is best for its target. Sets of one {variable(fit.rule)} need very "
        f"different temperatures; the {curves} between them.{share}"
    )
    return [draw(
        fit_plots.plot_fit, rows, fit, paper(), title="The rule among misranked sets",
        caption=caption,
    )]  # fmt: skip


def _evidence_pictures(fit: Coefficients) -> list[Picture]:
    """The evidence for the fit that the file has."""
    evidence = {
        "held_out": (
            fit_plots.plot_held_out,
            "Gain in log-probability, held out",
            "How much more probable the fit makes the target, by set size, on rows that its folds "
            "left out; bars of two standard errors. Plain softmax is 0.",
        ),
        "band": (
            fit_plots.plot_band,
            "How certain the curve is",
            "The fit, and the band that holds 95 % of the fits to resampled rows.",
        ),
    }
    return [
        draw(plot, fit, title=title, caption=caption)
        for key, (plot, title, caption) in evidence.items()
        if fit.quality.get(key)
    ]


def _left_out_section(fit: Coefficients) -> Iterable[Block]:
    rows = fit.quality.get("rows", {})
    reasons = left_out(rows)
    used = rows.get("used", rows.get("interior"))
    yield Heading("Which sets made the fit")
    if reasons:
        yield Text(f"{used:,} of {rows['rows']:,} sets. The others:")
        yield Facts([(f"{count:,}", reason) for count, reason in reasons])
    elif used is not None and used == rows.get("rows"):
        yield Text(f"All {used:,} sets: none was left out.")
    else:
        yield Text("The file does not say which sets were left out.")
    if fit.quality.get("learning_curve"):
        yield Text(f"More of them: {advice_on_rows(fit.quality)}.")


def _sharpness_section(examples: Sequence[ExampleSets]) -> Iterable[Block | Figures]:
    """Bounds and measurements of the coefficients, and where the target loses half of them."""
    measured, longest = measured_dispersal(examples), max(sets.size for sets in examples)
    seen = "not within these sizes" if measured is None else f"about {measured:,.0f} items"
    estimate = estimated_dispersal(examples)
    at = f"n* = {estimate:,.0f}" if np.isfinite(estimate) else "nowhere"
    yield Heading("How sharp this head can be")
    yield Figures([
        draw(example_plots.plot_reach, examples, title="Where the target loses half its attention",
             caption="The coefficient of the target under plain softmax, the estimate "
             "1 / (1 + (n - 1) m) from the longest sets, and the bound of Lemma 2.1, which holds "
             "but is loose at these sizes.")
    ])  # fmt: skip
    yield Text(
        "Where the target's coefficient under plain softmax falls below one half (median of "
        f"{N_EXAMPLES} sets of each size): measured: {seen}; estimated from sets of {longest:,} "
        f"items: {at}. Proposition 3.1 bounds the spread of the logits by the head's weights, and "
        "Lemma 2.1 every coefficient by the spread: both hold, and both are loose."
    )
    columns = ("n", "spread", "its bound (3.1)", "highest coefficient", "its bound (2.1)",
               "target, median")  # fmt: skip
    rows = [
        (f"{row.size:,}", *map(_number, (row.spread, row.spread_bound, row.highest,
                                         row.highest_bound, row.target)))
        for row in reach(examples)
    ]  # fmt: skip
    yield Table(columns, rows, "Spread of the logits and largest coefficients, by set size")


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"
