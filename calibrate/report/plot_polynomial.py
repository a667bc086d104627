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
from calibrate.rows.rule_fitting import applied_beta
from calibrate.rows.solved_rows import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 4_000  # more are shown by their density
N_CELLS = 48  # of the density, along each axis
POINTS = 600  # of a curve
N_BINS = 16  # of entropies, over which a rule of n is averaged
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
    axis on the right is theta = 1 / beta. A rule that depends on n is shown by its mean over the
    inputs of similar entropy.

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
    most = float(rows.entropy.max(initial=1.0))
    _plot_curves(ax, polynomial, others, shown, most)
    lo, hi = polynomial.only.domain
    ax.axvspan(lo, hi, color=SHADE, alpha=0.12, lw=0, label="domain of the polynomial")
    if least := polynomial.rule.min_entropy:
        label = r"threshold, up to which $\beta$ = 1"
        ax.axvline(least, color=PAPER, ls=":", lw=1.2, label=label)
    ax.set(xlim=(0, 1.02 * most), xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL)
    ax.set_title(_title(polynomial, shown.beta), fontsize=9)
    _scale_beta(ax)
    legend_below(ax)
    return ax


def _title(polynomial: Coefficients, beta: np.ndarray) -> str:
    """The number of points, those beyond the axis, and R^2 if the file has it."""
    beyond = int(((beta < BOUNDS[0]) | (beta > BOUNDS[1])).sum())
    parts = [f"{len(beta):,} misranked inputs"]
    parts += [f"{beyond:,} beyond the axis are drawn at its edge"] if beyond else []
    r_squared = polynomial.r_squared
    parts += [] if r_squared is None else [rf"R$^2$ of log $\beta$ {r_squared:.2f}"]
    return "; ".join(parts)


def _scale_beta(ax: "Axes") -> None:
    """Powers of two of beta on the left, and the temperatures on the right."""
    ticks = [2.0**k for k in range(-2, 7)]
    ax.set_yscale("log", base=2)
    ax.set_ylim(BOUNDS[0] / 1.1, 1.1 * BOUNDS[1])
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    theta = ax.secondary_yaxis("right", functions=(_inverse, _inverse))
    labels = [f"1/{tick:g}" if tick > 1 else f"{1 / tick:g}" for tick in ticks]
    theta.set_yticks([1 / tick for tick in ticks], labels)
    theta.set_ylabel(r"temperature $\theta$")
    theta.minorticks_off()
    ax.minorticks_off()


def _inverse(x: Any) -> Any:
    with np.errstate(divide="ignore"):
        return 1 / np.asarray(x, float)


def _plot_points(ax: "Axes", entropy: np.ndarray, beta: np.ndarray, items: np.ndarray) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    norm = LogNorm(0.9 * items.min(initial=1 << 30), 1.1 * items.max(initial=1))
    look: dict[str, Any] = {"norm": norm, "cmap": "viridis_r"}
    ax.scatter(entropy, beta, c=items, s=7, alpha=0.55, lw=0, zorder=2, **look)
    sizes = np.unique(items)
    sizes = sizes[:: max(1, -(-len(sizes) // 6))]
    bar = ax.figure.colorbar(ScalarMappable(**look), ax=ax, label="items n", pad=0.02)
    bar.ax.minorticks_off()
    bar.set_ticks(sizes.tolist(), labels=[f"{n:,}" for n in sizes])


def _plot_density(ax: "Axes", entropy: np.ndarray, beta: np.ndarray) -> None:
    from matplotlib.colors import LogNorm

    edges = np.linspace(0, entropy.max(), N_CELLS + 1), np.geomspace(*BOUNDS, N_CELLS + 1)
    count, x, y = np.histogram2d(entropy, beta, edges)
    most = max(count.max(), 2)
    norm = LogNorm(0.5, 4 * most)  # one input is light grey, and curves stand out from many
    shown = np.ma.masked_equal(count.T, 0)
    image = ax.pcolormesh(x, y, shown, norm=norm, cmap="Greys", zorder=1)
    bar = ax.figure.colorbar(image, ax=ax, label="misranked inputs of a cell", pad=0.02)
    bar.ax.set_ylim(1, most)
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:g}")


def _plot_curves(
    ax: "Axes",
    polynomial: Coefficients,
    others: Mapping[str, Coefficients],
    shown: Rows,
    most: float,
) -> None:
    """Each rule as it is applied, thin outside the domain of its own."""
    names = {
        "polynomial": "fitted polynomial",
        "selected": "selected rule",
        "published": "the paper's published polynomial",
    }
    for what, fit in {**others, "polynomial": polynomial}.items():
        colour, dash, width = CURVES[what]
        if fit.rule.by_size:
            entropy, beta = _mean_by_entropy(shown.entropy, applied_beta(fit, shown))
            name = f"{names[what]}, mean over n"
            ax.plot(entropy, beta, color=colour, ls=dash, lw=width, label=name, zorder=5)
            continue
        entry = fit.only
        x = np.linspace(0, most, POINTS)
        _, beta = rule_curve(fit, entry, x)
        inside = (entry.domain[0] <= x) & (x <= entry.domain[1])
        ax.plot(x, beta, color=colour, ls=dash, lw=0.5 * width, alpha=0.5, zorder=4)
        bold = np.where(inside, beta, np.nan)
        ax.plot(x, bold, color=colour, ls=dash, lw=width, label=names[what], zorder=5)


def _mean_by_entropy(entropy: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean entropy and mean beta of bins of as many inputs each."""
    order = np.argsort(entropy, kind="stable")
    bins = [part for part in np.array_split(order, N_BINS) if len(part)]
    return np.array([entropy[i].mean() for i in bins]), np.array([beta[i].mean() for i in bins])
