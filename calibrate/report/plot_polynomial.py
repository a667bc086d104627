"""The scatter plot of optimal temperatures against entropy, with the polynomial fitted to it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.fitting.fit_rule import applied_beta
from calibrate.report.plot_inputs import MAX_POINTS, plot_inputs
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

POINTS = 600  # of a curve
N_BINS = 16  # of entropies, over which a rule of n is averaged
BOUNDS = (1 / 4, 64.0)  # of beta, beyond which points are drawn at the edge
CURVES = {  # by what is drawn: colour, dash, width
    "polynomial": (OURS, "-", 2.6),
    "selected": ("#009E73", "--", 2.0),
    "published": (STYLES["paper"][0], "-.", 1.6),
}
NAMES = {
    "polynomial": "fitted polynomial",
    "selected": "selected rule",
    "published": "published polynomial",
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
    inputs of similar entropy. Many inputs are shown by their density; see `plot_inputs`.

    Args:
      ax: where to draw.
      rows: solved.
      polynomial: that was fitted to them; None where they are too few.
      others: rules to compare, by "selected" or "published".
      max_points: the most inputs that are all drawn as points.
    """
    shown, most = rows.take(with_finite_optimum(rows)), float(rows.entropy.max(initial=1.0))
    beta = np.clip(shown.beta, *BOUNDS)
    plot_inputs(ax, shown.entropy, beta, shown.items, BOUNDS, max_points)
    curves = dict(others) | ({} if polynomial is None else {"polynomial": polynomial})
    _plot_curves(ax, curves, shown, most)
    if polynomial is not None:
        _plot_domain(ax, polynomial)
    ax.set_yscale("log", base=2)
    ax.set_xlim(-0.02 * most, 1.02 * most)
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
    n = int(with_finite_optimum(rows).sum())
    text = (
        f"Each point is one of {n:,} misranked inputs: its entropy H, and the beta = 1/theta at "
        "which its target is most probable."
    )
    if n > max_points:
        text += (
            " Where many lie close together, a cell stands for them: the more inputs, the more "
            "opaque it is; its colour is their mean n."
        )
    return text + edge_caption(rows)


def edge_caption(rows: Rows) -> str:
    """The end of a caption: inputs that are drawn at the edge, and those that are not drawn."""
    beta = rows.beta[with_finite_optimum(rows)]
    at_edge = int(((beta < BOUNDS[0]) | (beta > BOUNDS[1])).sum())
    at_zero = int((rows.misranked & (rows.status == FLAT)).sum())
    text = ""
    if at_edge:
        low, high = BOUNDS
        text += f" Drawn at the edge, with a beta below {low:g} or above {high:g}: {at_edge:,}."
    if at_zero:
        text += f" Not drawn, with the optimum at beta = 0: {at_zero:,}."
    return text


def rules_caption(others: Mapping[str, Coefficients]) -> str:
    """A caption: how rules are drawn that a curve over the entropy cannot show as they are."""
    text = "Rules are thin outside their domain."
    for what, fit in others.items():
        if depends_on_size(fit):
            text += (
                f" The {NAMES[what]} depends on n: the curve is its mean over inputs of similar "
                "entropy."
            )
    return text


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


def _plot_curves(ax: "Axes", curves: Mapping[str, Coefficients], shown: Rows, most: float) -> None:
    """Each rule as it is applied, thin outside the domain of its own."""
    for what, fit in curves.items():
        colour, dash, width = CURVES[what]
        if depends_on_size(fit):
            entropy, beta = _mean_by_entropy(shown.entropy, applied_beta(fit, shown))
            bold, name = beta, f"{NAMES[what]}, mean over n"
        else:
            entropy = np.linspace(0, most, POINTS)
            beta, inside = _curve(fit, entropy)
            ax.plot(entropy, beta, color=colour, ls=dash, lw=0.5 * width, alpha=0.5, zorder=4)
            bold, name = np.where(inside, beta, np.nan), NAMES[what]
        look: dict[str, Any] = {"color": colour, "ls": dash, "lw": width, "label": name}
        ax.plot(entropy, bold, **look, zorder=5, path_effects=_outline(width))


def depends_on_size(fit: Coefficients) -> bool:
    """True where beta is no function of the entropy alone, and so no single curve over it."""
    return fit.rule.by_size and not fit.ignores_inputs


def _curve(fit: Coefficients, entropy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """beta at each entropy, and whether that is in the domain; a constant is at home everywhere."""
    entry = fit.only
    beta = entry.constant_beta(fit.rule)
    if beta is not None:
        return np.full(len(entropy), beta), np.ones(len(entropy), bool)
    inside = (entry.domain[0] <= entropy) & (entropy <= entry.domain[1])
    return rule_curve(fit, entry, entropy)[1], inside


def _outline(width: float) -> list[Any]:
    """White at both sides of a curve, which stands out on points of any colour."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width + 1.4, foreground="white"), Normal()]


def _mean_by_entropy(entropy: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean entropy and mean beta of bins of as many inputs each."""
    order = np.argsort(entropy, kind="stable")
    bins = [part for part in np.array_split(order, N_BINS) if len(part)]
    return np.array([entropy[i].mean() for i in bins]), np.array([beta[i].mean() for i in bins])
