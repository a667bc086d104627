"""Plots of a fit: its curve, the rows it was made of, and what its file says of its quality."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.files.coefficients import Coefficients, Entry
from calibrate.report.plot_style import (
    BETA_LABEL,
    ENTROPY_LABEL,
    GATED,
    HEAD_STYLES,
    OURS,
    PAPER,
    SHADE,
    draw,
    draw_size_curves,
    legend_below,
    new_figure,
    plot_gain_map,
    powers_of_two,
    rule_axis,
    save_figure,
    scatter_by_size,
    short,
    sizes_axis,
)
from calibrate.report.rule_curves import (
    domain_curve,
    largest_size,
    of_both,
    rule_curve,
    size_curves,
)
from calibrate.rows.solved_rows import head_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from calibrate.rows.per_head import PerHeadResult
    from calibrate.rows.solved_rows import Rows

MAX_COLOURED = 10  # curves: of more, five are coloured
WIDE_RANGE = 10  # of beta: from there on its axis is logarithmic


def save_fit_figure(path: Path, rows: "Rows", fit: Coefficients, paper: Coefficients) -> None:
    """What a fit gains on held-out rows, and its rule, as PNG.

    Of a fit without held-out rows, as the paper's: its Figure 5, the rows that it was made of.
    """
    if not fit.quality.get("held_out"):
        save_figure(path, draw(plot_fit, rows, fit, paper))
        return
    figure = new_figure(9.6, 4.2)
    gain, rule = figure.subplots(1, 2)
    plot_held_out(gain, fit)
    plot_band(rule, fit) if fit.quality.get("band") else plot_beta(rule, fit)
    gain.set_title("what it gains on held-out rows")
    rule.set_title("the rule")
    save_figure(path, figure)


def save_beta_figure(path: Path, coefficients: Coefficients) -> None:
    """beta over entropy, or over set size, as PNG."""
    save_figure(path, draw(plot_beta, coefficients, size=(7.2, 4.2)))


def plot_fit(ax: "Axes", rows: "Rows", coefficients: Coefficients, paper: Coefficients) -> "Axes":
    """Optimal theta of every interior row against entropy, with the curves of both fits.

    A log-size fit is drawn against set size, without the paper's curve; a fit by entropy and size
    as a curve for each of a few set sizes.
    """
    if not coefficients.rule.by_entropy:
        return _plot_fit_by_size(ax, rows, coefficients)
    used, entry = rows.interior(), coefficients.only
    lo, hi = entry.domain[:2]
    curves = size_curves(coefficients, entry) if of_both(coefficients.rule) else []
    hi = min([hi, *(float(curve.entropy[-1]) for curve in curves[-1:])])  # log n, of the largest
    right = max(hi, float(used.entropy.max(initial=0))) * 1.08
    ax.axvspan(lo, hi, color=SHADE, alpha=0.15, lw=0, label="domain of the fit")
    sizes = sorted({*rows.size.tolist(), *(curve.size for curve in curves)})
    scatter_by_size(ax, used.entropy, 1 / used.beta, used.size, sizes, s=5, alpha=0.4)
    draw_size_curves(ax, curves, sizes, np.reciprocal)
    H = np.linspace(0, right, 600)
    for fit, colour, style, label in (
        (coefficients, OURS, "-", f"this fit ({short(coefficients.reference)})"),
        (paper, PAPER, "--", "the paper's fit"),
    )[bool(curves) :]:
        _, beta = rule_curve(fit, fit.only, H)
        ax.plot(H, 1 / beta, style, color=colour, lw=2, label=label)
    ax.set_xlim(0, right)
    return _theta_axes(ax, used, coefficients, sizes)


def _plot_fit_by_size(ax: "Axes", rows: "Rows", coefficients: Coefficients) -> "Axes":
    """Optimal theta of every interior row against set size, with the fitted curve."""
    used, entry = rows.interior(), coefficients.only
    n = np.geomspace(rows.items.min() / 1.5, rows.items.max() * 1.5, 400)
    spread = 1.15 ** np.random.default_rng(0).uniform(-1, 1, len(used.size))
    ax.axvspan(*np.exp(entry.domain), color=GATED, alpha=0.2, lw=0, label="domain of the fit")
    ax.scatter(
        used.items * spread, 1 / used.beta, c=SHADE, s=6, alpha=0.4, lw=0, rasterized=True,
        label="rows, spread a little",
    )  # fmt: skip
    _, beta = rule_curve(coefficients, entry, np.log(n))
    label = f"this fit ({short(coefficients.reference)})"
    ax.plot(n, 1 / beta, color=OURS, lw=2, label=label)
    return _theta_axes(ax, used, coefficients, np.unique(rows.size).tolist())


def _theta_axes(ax: "Axes", used: "Rows", fit: Coefficients, sizes: Sequence[int]) -> "Axes":
    """Both axes; optimal temperatures along y, up to where most rows lie."""
    theta = 1 / used.beta
    top = max(1.25, float(np.percentile(theta, 98))) if len(theta) else 1.25
    hidden = int((theta > top).sum())
    of_all = fit.source.get("options", {}).get("rows") == "all"
    rule_axis(ax, fit.rule, sizes)
    ax.set(
        ylim=(0, top),
        ylabel=r"optimal temperature $\theta^* = 1/\beta^*$",
        title=f"{len(used.beta):,} misranked rows"
        + (f"; {hidden:,} with $\\theta^*$ > {top:.2f} lie above" if hidden else "")
        + ("\n(the fit is made of all rows, not of these alone)" if of_all else ""),
    )  # fmt: skip
    if of_both(fit.rule):
        legend_below(ax)
    else:
        ax.legend(loc="upper right", framealpha=0.9)
    return ax


def plot_beta(ax: "Axes", coefficients: Coefficients) -> "Axes":
    """beta of every entry against entropy, or set size, past both ends of the domain.

    Of one entry by entropy and size: a curve for each of a few set sizes; of several, a curve for
    each entry, at the largest size that they were fitted on.
    """
    entries, rule = coefficients.entries, coefficients.rule
    if of_both(rule):
        return _plot_beta_of_both(ax, coefficients)
    x = np.linspace(0, 1.15 * max(entry.domain[1] for entry in entries), 1200)
    for i, entry in enumerate(entries):
        across, beta = rule_curve(coefficients, entry, x)
        inside = (entry.domain[0] <= x) & (entry.domain[1] >= x)
        label = None if i else ("beta" if len(entries) == 1 else f"beta, {len(entries)} heads")
        beyond = None if i else "outside the domain"
        ax.plot(across, beta, color=OURS, lw=1, alpha=0.6, label=beyond)
        ax.plot(across[inside], beta[inside], color=OURS, lw=2.5, label=label)
    ax.axhline(1, color=PAPER, ls="--", lw=1, label="plain softmax")
    if rule.by_entropy:
        ax.axvline(rule.min_entropy, color=SHADE, ls=":", lw=1.5, label="gate: beta = 1 up to here")
    rule_axis(ax, rule, powers_of_two(1, across[-1]))
    ax.set(xlim=(across[0], across[-1]), ylabel=BETA_LABEL, title=short(coefficients.reference))
    ax.legend(framealpha=0.9)
    return ax


def _plot_beta_of_both(ax: "Axes", fit: Coefficients) -> "Axes":
    if len(fit.entries) == 1:
        curves = size_curves(fit, fit.only)
        draw_size_curves(ax, curves, [curve.size for curve in curves])
        ax.plot([], [], color=GATED, lw=0.8, label="outside the domain")
    else:
        for i, entry in enumerate(fit.entries):
            label = f"beta, {len(fit.entries)} heads, n = {largest_size(fit):,}"
            ax.plot(*domain_curve(fit, entry), color=OURS, lw=1.5, label=None if i else label)
    ax.axhline(1, color=PAPER, ls="--", lw=1, label="plain softmax")
    ax.set(xlim=0, xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL, title=short(fit.reference))
    legend_below(ax)
    return ax


def plot_betas(ax: "Axes", fit: Coefficients, order: Sequence[Entry]) -> "Axes":
    """beta of every entry over its domain; the first of `order` are coloured, the others grey.

    Of rules of entropy and size, as `plot_beta`.
    """
    if of_both(fit.rule) and len(order) == 1:
        return _plot_beta_of_both(ax, fit)
    coloured = len(order) if len(order) <= MAX_COLOURED else len(HEAD_STYLES)
    curves = [domain_curve(fit, entry) for entry in order]
    for curve in curves[coloured:]:
        ax.plot(*curve, color=GATED, lw=0.8, alpha=0.8, zorder=1)
    for i, (entry, curve) in enumerate(zip(order[:coloured], curves, strict=False)):
        colour, marker = HEAD_STYLES[i % len(HEAD_STYLES)]
        ax.plot(
            *curve, "--" if i >= len(HEAD_STYLES) else "-", color=colour,
            marker=marker, markevery=(i * 5, 50), ms=5, lw=1.5, zorder=3,
            label=head_label(entry.layer, entry.head) or short(fit.reference),
        )  # fmt: skip
    if len(order) > coloured:
        ax.plot([], [], color=GATED, lw=0.8, label=f"{len(order) - coloured:,} other heads")
    ax.axhline(1, color=PAPER, ls=":", lw=1, label="plain softmax", zorder=2)
    betas = np.concatenate([beta for _, beta in curves])
    if betas.max() > WIDE_RANGE * min(1.0, betas.min()):
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    across = np.concatenate([x for x, _ in curves])
    rule_axis(ax, fit.rule, powers_of_two(across.min(), across.max()))
    ax.set_ylabel(BETA_LABEL)
    legend_below(ax)
    return ax


def plot_band(ax: "Axes", fit: Coefficients) -> "Axes":
    """beta with the interval that holds it when the rows are drawn anew."""
    x, low, high = np.array(fit.quality["band"]).T
    across, beta = rule_curve(fit, fit.only, x)
    ax.fill_between(across, low, high, color=SHADE, alpha=0.4, lw=0, label="95 % bootstrap band")
    ax.plot(across, beta, color=OURS, lw=2, label=short(fit.reference))
    ax.axhline(1, color=PAPER, ls="--", lw=1, label="plain softmax")
    rule_axis(ax, fit.rule, powers_of_two(0.99 * across[0], across[-1]))
    ax.set(ylabel=BETA_LABEL, ylim=(0, 1.15 * float(high.max())))
    ax.legend(loc="lower left", fontsize=8)
    return ax


def plot_held_out(ax: "Axes", fit: Coefficients) -> "Axes":
    """Gain in the target's log-probability by set size, on held-out rows."""
    held_out = fit.quality["held_out"]
    sizes = [size["size"] for size in held_out]
    gain = np.array([size["after"] - size["before"] for size in held_out])
    error = 2 * np.array([size["error"] for size in held_out])
    ax.axhline(0, color=PAPER, lw=0.8)
    ax.errorbar(sizes, gain, error, fmt="o-", color=OURS, capsize=3, ms=4)
    sizes_axis(ax, sizes)
    ax.set_ylabel("gain in log p of the target (nats)")
    return ax


def save_gains_figure(path: Path, fits: "PerHeadResult") -> None:
    """Writes the gain of each head as PNG."""
    save_figure(path, draw(plot_gains, fits))


def plot_gains(ax: "Axes", fits: "PerHeadResult") -> "Axes":
    """Draws the gain of each head; heads without a rule are marked with an x."""
    gains = {(head.layer, head.head): head.gain if head.rule else None for head in fits.heads}
    n = len(fits.calibrated)
    ax.set_title(f"{n} of {len(fits.heads)} heads gain by a rule\n(x: plain softmax)")
    label = "gain in nats of log p, held out"
    return plot_gain_map(ax, gains, "all", label)
