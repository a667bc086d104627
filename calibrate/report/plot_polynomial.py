"""The scatter plot of optimal temperatures against entropy, with the polynomial fitted to it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.files.coefficients import Coefficients
from calibrate.maths import solver
from calibrate.report.plot_style import (
    BETA_LABEL,
    ENTROPY_LABEL,
    OURS,
    PAPER,
    SHADE,
    STYLES,
    legend_below,
)
from calibrate.report.rules import rule_curve
from calibrate.rows.solved_rows import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 4_000  # more are shown by their density
POINTS = 600  # of a curve
BOUNDS = (1 / 4, 64.0)  # of beta, beyond which points are drawn at the edge
CURVES = {  # by what is drawn: colour, dash, width
    "polynomial": (OURS, "-", 2.6),
    "selected": ("#009E73", "--", 2.0),
    "published": (STYLES["paper"][0], "-.", 1.6),
}


def plot_optimal_beta(
    ax: "Axes", rows: Rows, polynomial: Coefficients, others: Mapping[str, Coefficients]
) -> "Axes":
    """Entropy against the optimal beta of misranked inputs, coloured by n, under the rules.

    The domain of the polynomial is shaded; where it has a threshold, beta is 1 up to there. The
    axis on the right is theta = 1 / beta.

    Args:
      ax: where to draw.
      rows: solved.
      polynomial: that was fitted to them.
      others: rules to compare, by "selected" or "published".
    """
    shown = rows.take(rows.misranked & (rows.status == solver.INTERIOR))
    entropy, beta = shown.entropy, np.clip(shown.beta, *BOUNDS)
    if len(beta) > MAX_POINTS:
        _plot_density(ax, entropy, beta)
    else:
        _plot_points(ax, entropy, beta, shown.items)
    _plot_curves(ax, polynomial, others, float(rows.entropy.max(initial=1.0)))
    lo, hi = polynomial.only.domain
    ax.axvspan(lo, hi, color=SHADE, alpha=0.12, lw=0, label="domain of the polynomial")
    if polynomial.rule.min_entropy:
        ax.axvline(
            polynomial.rule.min_entropy, color=PAPER, ls=":", lw=1.2, label="threshold: beta = 1"
        )
    ax.set_yscale("log", base=2)
    ax.set_ylim(BOUNDS[0], 1.1 * BOUNDS[1])
    ticks = [2.0**k for k in range(-2, 7)]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    theta = ax.secondary_yaxis("right", functions=(_inverse, _inverse))
    theta.set_yticks([1 / tick for tick in ticks], [f"{1 / tick:.3g}" for tick in ticks])
    theta.set_ylabel(r"temperature $\theta$")
    theta.minorticks_off()
    ax.set(xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL)
    ax.minorticks_off()
    legend_below(ax)
    return ax


def _inverse(x: Any) -> Any:
    with np.errstate(divide="ignore"):
        return 1 / np.asarray(x, float)


def _plot_points(ax: "Axes", entropy: np.ndarray, beta: np.ndarray, items: np.ndarray) -> None:
    from matplotlib.colors import LogNorm

    low, high = items.min(initial=1 << 30), items.max(initial=1)
    image = ax.scatter(
        entropy,
        beta,
        c=items,
        norm=LogNorm(0.9 * low, 1.1 * high),
        cmap="viridis_r",
        s=7,
        alpha=0.55,
        lw=0,
        zorder=2,
    )
    sizes = np.unique(items)
    sizes = sizes[:: max(1, -(-len(sizes) // 6))]
    bar = ax.figure.colorbar(image, ax=ax, label="items n", pad=0.02)
    bar.ax.minorticks_off()
    bar.set_ticks(sizes.tolist(), labels=[f"{n:,}" for n in sizes])


def _plot_density(ax: "Axes", entropy: np.ndarray, beta: np.ndarray) -> None:
    image = ax.hexbin(
        entropy, beta, gridsize=55, yscale="log", bins="log", mincnt=1, cmap="Greys", zorder=1
    )
    ax.figure.colorbar(image, ax=ax, label="misranked inputs", pad=0.02)


def _plot_curves(
    ax: "Axes", polynomial: Coefficients, others: Mapping[str, Coefficients], most: float
) -> None:
    """Each rule as it is applied, thin outside the domain of its own."""
    names = {
        "polynomial": "fitted polynomial",
        "selected": "selected rule",
        "published": "the paper's published polynomial",
    }
    for what, fit in {**others, "polynomial": polynomial}.items():
        colour, dash, width = CURVES[what]
        entry = fit.only
        x = np.linspace(0, most, POINTS)
        _, beta = rule_curve(fit, entry, x)
        inside = (entry.domain[0] <= x) & (x <= entry.domain[1])
        ax.plot(x, beta, color=colour, ls=dash, lw=0.5 * width, alpha=0.5, zorder=4)
        bold = np.where(inside, beta, np.nan)
        ax.plot(x, bold, color=colour, ls=dash, lw=width, label=names[what], zorder=5)
