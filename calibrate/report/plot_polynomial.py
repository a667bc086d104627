"""The scatter plot of optimal temperatures against entropy, under the rule fitted to the inputs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.core.rule import CONSTANT
from calibrate.fitting.options import LIKELIHOOD
from calibrate.report.plot_inputs import MAX_POINTS, plot_inputs
from calibrate.report.plot_style import (
    BETA_LABEL,
    BLACK,
    ENTROPY_LABEL,
    OURS,
    SHADE,
    STYLES,
    legend_below,
)
from calibrate.report.rules import bound_text, rule_curve
from calibrate.solver.optimal_beta import FLAT, INTERIOR
from calibrate.solver.solved_rows import Rows
from calibrate.store.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 600  # of a curve
N_BINS = 16  # of entropies, over which a rule of n is averaged
BOUNDS = (1 / 4, 64.0)  # of the axis of beta, unless many inputs lie beyond
QUANTILES = (0.05, 0.95)  # of the optimal beta, which the axis holds
MAX_TICKS = 10  # of the axis of beta
# By what is drawn: colour, dash, width.
FITTED = "fitted"
PUBLISHED = "published"
CURVES = {
    FITTED: (OURS, "-", 2.6),
    PUBLISHED: (STYLES["paper"][0], "-.", 1.6),
    CONSTANT: (STYLES["constant"][0], "--", 1.8),
}


def plot_optimal_beta(
    ax: "Axes",
    rows: Rows,
    fit: Fit,
    others: Mapping[str, Fit],
    max_points: int = MAX_POINTS,
) -> "Axes":
    """Entropy against the optimal beta of misranked inputs, coloured by n, under the rules.

    The domain of the fitted rule is shaded; where it has a threshold, beta is 1 up to there. The
    axis on the right is theta = 1 / beta. A rule that depends on n is shown by its mean over the
    inputs of similar entropy. Many inputs are shown by their density; see `plot_inputs`.

    Args:
      ax: where to draw.
      rows: solved.
      fit: that was fitted to them, with one entry for all heads.
      others: rules to compare, by "published" or "constant".
      max_points: the most inputs that are all drawn as points.
    """
    shown, most = rows.take(with_finite_optimum(rows)), float(rows.entropy.max(initial=1.0))
    bounds = beta_bounds(shown.beta)
    beta = np.clip(shown.beta, *bounds)
    plot_inputs(ax, shown.entropy, beta, shown.items, bounds, max_points)
    for what, rule in {**others, FITTED: fit}.items():
        _plot_curve(ax, what, rule, shown, most)
    _plot_domain(ax, fit)
    ax.set_xlim(-0.02 * most, 1.02 * most)
    ax.set(xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL)
    _set_beta_axes(ax, bounds)
    legend_below(ax)
    return ax


def beta_bounds(beta: np.ndarray) -> tuple[float, float]:
    """The range of the axis: `BOUNDS`, or powers of 2 that hold 1 and nine of ten optimal betas."""
    low, high = np.quantile(beta, QUANTILES) if len(beta) else BOUNDS
    if low >= BOUNDS[0] and high <= BOUNDS[1]:
        return BOUNDS
    low, high = np.floor(np.log2(min(low, 0.5))), np.ceil(np.log2(max(high, 2.0)))
    return float(2.0**low), float(2.0**high)


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
    low, high = beta_bounds(beta)
    at_edge = int(((beta < low) | (beta > high)).sum())
    at_zero = int((rows.misranked & (rows.status == FLAT)).sum())
    text = ""
    if at_edge:
        ends = f"below {bound_text(low)} or above {bound_text(high)}"
        text += f" Drawn at the edge, with a beta {ends}: {at_edge:,}."
    if at_zero:
        text += f" Not drawn, with the optimum at beta = 0: {at_zero:,}."
    return text


def rules_caption(fit: Fit) -> str:
    """A caption: how rules are drawn, and what the fitted one was fitted to."""
    text = "Rules are thin outside their domain."
    if fit.source.get("options", {}).get("loss") == LIKELIHOOD:
        text += (
            " The rule is fitted to all inputs: those that are ranked right, whose targets gain "
            "from every larger beta, are not drawn."
        )
    if depends_on_size(fit):
        text += (
            " The fitted rule depends on n: the curve is its mean over inputs of similar entropy."
        )
    return text


def depends_on_size(fit: Fit) -> bool:
    """True where beta is no function of the entropy alone, and so no single curve over it."""
    return fit.rule.by_size and not fit.ignores_inputs


def _curve_label(what: str, fit: Fit) -> str:
    """The name of a curve in the legend."""
    if what == FITTED:
        kind = fit.rule.kind
        return f"fitted {kind} rule, mean over n" if depends_on_size(fit) else f"fitted {kind}"
    if what == PUBLISHED:
        return "published polynomial"
    return f"constant, beta = {fit.only.constant_beta(fit.rule):.3g}"


def _plot_curve(ax: "Axes", what: str, fit: Fit, shown: Rows, most: float) -> None:
    """A rule as it is applied, thin outside its domain."""
    colour, dash, width = CURVES[what]
    if depends_on_size(fit):
        applied = fit.only.beta_at(shown.entropy, np.log(shown.items), fit.rule)
        entropy, beta = bold = _mean_by_entropy(shown.entropy, applied)
    else:
        entropy = np.linspace(0, most, POINTS)
        _, beta = rule_curve(fit, fit.only, entropy)
        ax.plot(entropy, beta, color=colour, ls=dash, lw=0.5 * width, alpha=0.5, zorder=4)
        bold = entropy, np.where(_in_domain(fit, entropy), beta, np.nan)
    look: dict[str, Any] = {"color": colour, "ls": dash, "lw": width, "zorder": 5}
    ax.plot(*bold, **look, label=_curve_label(what, fit), path_effects=_outline(width))


def _in_domain(fit: Fit, entropy: np.ndarray) -> np.ndarray:
    """(points,) bool; a constant applies at every entropy."""
    if fit.ignores_inputs:
        return np.ones(len(entropy), bool)
    lo, hi = fit.only.domain[:2]
    return np.asarray((lo <= entropy) & (entropy <= hi))


def _plot_domain(ax: "Axes", fit: Fit) -> None:
    """The entropies that a rule was fitted to, and those at which it is off; none of a constant."""
    if not fit.needs_entropy:
        return
    lo, hi = fit.only.domain[:2]
    ax.axvspan(lo, hi, color=SHADE, alpha=0.12, lw=0, label="domain of the fitted rule")
    if least := fit.rule.min_entropy:
        label = f"threshold: beta = 1 up to {least:g}"
        ax.axvline(least, color=BLACK, ls=":", lw=1.2, label=label)


def _set_beta_axes(ax: "Axes", bounds: tuple[float, float]) -> None:
    """beta on the left and theta on the right, both with powers of 2."""
    ax.set_yscale("log", base=2)
    ax.set_ylim(bounds[0] / 1.1, 1.1 * bounds[1])
    low, high = (round(x) for x in np.log2(bounds))
    step = -(-(high - low) // MAX_TICKS)
    ticks = [2.0**k for k in range(low, high + 1) if k % step == 0]
    ax.set_yticks(ticks, [bound_text(tick) for tick in ticks])
    theta = ax.secondary_yaxis("right", functions=(_inverse, _inverse))
    theta.set_yticks([1 / tick for tick in ticks], [bound_text(1 / tick) for tick in ticks])
    theta.set_ylabel(r"temperature $\theta$")
    theta.minorticks_off()
    ax.minorticks_off()


def _inverse(x: Any) -> Any:
    with np.errstate(divide="ignore"):
        return 1 / np.asarray(x, float)


def _outline(width: float) -> list[Any]:
    """White at both sides of a curve, which stands out on points of any colour."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width + 1.4, foreground="white"), Normal()]


def _mean_by_entropy(entropy: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean entropy and mean beta of bins of as many inputs each."""
    order = np.argsort(entropy, kind="stable")
    bins = [part for part in np.array_split(order, N_BINS) if len(part)]
    return np.array([entropy[i].mean() for i in bins]), np.array([beta[i].mean() for i in bins])
