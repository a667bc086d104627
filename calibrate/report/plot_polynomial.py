"""The scatter plot of optimal temperatures against entropy, with the polynomial fitted to it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.fitting.fit_rule import applied_beta
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
from calibrate.solver.optimal_beta import FLAT, INTERIOR
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 4_000
POINTS = 600  # of a curve
N_TICKS = 6  # of the sizes that colours stand for, at most
N_BINS = 16  # of entropies, over which a rule of n is averaged
BOUNDS = (1 / 4, 64.0)  # of beta, beyond which points are drawn at the edge
CURVES = {  # by what is drawn: colour, dash, width
    "polynomial": (OURS, "-", 2.6),
    "selected": ("#009E73", "--", 2.0),
    "published": (STYLES["paper"][0], "-.", 1.6),
}


def plot_optimal_beta(
    ax: "Axes",
    rows: Rows,
    polynomial: Coefficients | None,
    others: Mapping[str, Coefficients],
    max_points: int = MAX_POINTS,
) -> "Axes":
    """Entropy against the optimal beta of misranked inputs, coloured by n, under the rules.

    The domain of the polynomial is shaded; where it has a threshold, beta is 1 up to there. The
    axis on the right is theta = 1 / beta. A rule that depends on n is shown by its mean over the
    inputs of similar entropy.

    Args:
      ax: where to draw.
      rows: solved.
      polynomial: that was fitted to them; None where they are too few.
      others: rules to compare, by "selected" or "published".
      max_points: the inputs that are drawn; of more, a random sample.
    """
    shown = _sample(rows.take(with_finite_optimum(rows)), max_points)
    _plot_points(ax, shown.entropy, np.clip(shown.beta, *BOUNDS), shown.items)
    curves = dict(others) | ({} if polynomial is None else {"polynomial": polynomial})
    _plot_curves(ax, curves, shown, float(rows.entropy.max(initial=1.0)))
    if polynomial is not None:
        _plot_domain(ax, polynomial)
    ax.set_yscale("log", base=2)
    ax.set_ylim(BOUNDS[0] / 1.1, 1.1 * BOUNDS[1])
    ticks = [2.0**k for k in range(-2, 7)]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    theta = ax.secondary_yaxis("right", functions=(_inverse, _inverse))
    labels = [f"1/{tick:g}" if tick > 1 else f"{1 / tick:g}" for tick in ticks]
    theta.set_yticks([1 / tick for tick in ticks], labels)
    theta.set_ylabel(r"temperature $\theta$")
    theta.minorticks_off()
    ax.set(xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL)
    ax.minorticks_off()
    legend_below(ax)
    return ax


def with_finite_optimum(rows: Rows) -> np.ndarray:
    """(rows,) bool: the misranked inputs that have a finite optimal beta above 0."""
    return np.asarray(rows.misranked & (rows.status == INTERIOR))


def points_caption(rows: Rows, max_points: int = MAX_POINTS) -> str:
    """A caption: which solved inputs are drawn, which are not, and which at the edge."""
    finite = with_finite_optimum(rows)
    n, beta = int(finite.sum()), rows.beta[finite]
    at_edge, at_zero = (
        int(((beta < BOUNDS[0]) | (beta > BOUNDS[1])).sum()),
        int((rows.misranked & (rows.status == FLAT)).sum()),
    )
    text = (
        f"Each point is one of {n:,} misranked inputs: its entropy H, and the beta = 1/theta at "
        "which its target is most probable."
    )
    if n > max_points:
        text += f" A random {max_points:,} of them are drawn."
    if at_edge:
        text += (
            f" {at_edge:,} have an optimal beta below {BOUNDS[0]:g} or above {BOUNDS[1]:g}, and "
            "are drawn at the edge."
        )
    if at_zero:
        text += f" {at_zero:,} more have their optimum at beta = 0, and are not drawn."
    return text


def _sample(rows: Rows, max_points: int) -> Rows:
    """All rows, or as many as are drawn."""
    n = len(rows.beta)
    if n <= max_points:
        return rows
    return rows.take(np.sort(np.random.default_rng(0).choice(n, max_points, replace=False)))


def _plot_domain(ax: "Axes", polynomial: Coefficients) -> None:
    """The entropies that a polynomial was fitted to, and those at which it is off."""
    lo, hi = polynomial.only.domain
    ax.axvspan(lo, hi, color=SHADE, alpha=0.12, lw=0, label="domain of the polynomial")
    if least := polynomial.rule.min_entropy:
        label = f"threshold: beta = 1 up to {least:g}"
        ax.axvline(least, color=PAPER, ls=":", lw=1.2, label=label)


def _inverse(x: Any) -> Any:
    with np.errstate(divide="ignore"):
        return 1 / np.asarray(x, float)


def _plot_points(ax: "Axes", entropy: np.ndarray, beta: np.ndarray, items: np.ndarray) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    # Without the yellow end, which is hard to see on white, and on black when it is inverted.
    colours = colormaps["viridis_r"](np.linspace(0.2, 1, 256))
    low, high = items.min(initial=1 << 30), items.max(initial=1)
    image = ax.scatter(
        entropy,
        beta,
        c=items,
        norm=LogNorm(0.9 * low, 1.1 * high),
        cmap=LinearSegmentedColormap.from_list("sizes", colours.tolist()),
        s=7,
        alpha=0.55,
        lw=0,
        zorder=2,
    )
    sizes = np.unique(items)
    if len(sizes) > N_TICKS:  # of many, powers of two
        sizes = 2 ** np.arange(np.ceil(np.log2(sizes[0])), np.log2(sizes[-1]) + 1e-9).astype(int)
        sizes = sizes[:: max(1, -(-len(sizes) // N_TICKS))]
    bar = ax.figure.colorbar(
        image, ax=ax, label="items n", location="top", pad=0.02, aspect=40, fraction=0.04
    )
    bar.ax.minorticks_off()
    bar.set_ticks(sizes.tolist(), labels=[f"{n:,}" for n in sizes])


def _plot_curves(ax: "Axes", curves: Mapping[str, Coefficients], shown: Rows, most: float) -> None:
    """Each rule as it is applied, thin outside the domain of its own."""
    names = {
        "polynomial": "fitted polynomial",
        "selected": "selected rule",
        "published": "published polynomial",
    }
    for what, fit in curves.items():
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
