"""The scatter plot of optimal temperatures against entropy, and the rules as curves over it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import PAPER
from calibrate.fitting.options import LIKELIHOOD
from calibrate.report.labels import THIS_FIT, label
from calibrate.report.plot_style import (
    BETA_LABEL,
    BLACK,
    DOMAIN_SHADE,
    ENTROPY_LABEL,
    OURS,
    STYLES,
    add_size_bar,
    legend_below,
    size_colours,
)
from calibrate.report.rules import bound_text, rule_curve
from calibrate.rows.optimal_beta import FLAT
from calibrate.rows.solve import SolvedInputs
from calibrate.store.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULE_POINTS = 600  # of a curve
N_BINS = 16  # of entropies, over which a rule of n is averaged
BETA_BOUNDS = (1 / 4, 64.0)  # of the axis, unless many inputs lie beyond
BETA_QUANTILES = (0.05, 0.95)  # of the optimal beta, which the axis holds
MAX_BETA_TICKS = 10  # of the axis of beta
# Colour, dash and width by the role of a rule.
FITTED_RULE = "fitted"
PUBLISHED_RULE = "published"
CURVES = {
    FITTED_RULE: (OURS, "-", 2.6),
    PUBLISHED_RULE: (STYLES["paper"][0], "-.", 1.6),
    CONSTANT: (STYLES["constant"][0], "--", 1.8),
}
MAX_POINTS = 2_000  # of more inputs, a random subset is drawn


def plot_optimal_beta(
    ax: "Axes",
    rows: SolvedInputs,
    fit: Fit,
    others: Mapping[str, Fit],
    max_points: int = MAX_POINTS,
) -> "Axes":
    """Draws entropy against the optimal beta of misranked inputs, and the rules as curves.

    Colours of points show n. The domain of the fitted rule is shaded. The
    axis on the right is theta = 1 / beta. A rule that depends on n is shown by its mean over the
    inputs of similar entropy.

    Args:
      ax: where to draw.
      rows: solved inputs.
      fit: fitted to them, with one entry for all heads.
      others: rules to compare, by PUBLISHED_RULE or CONSTANT.
      max_points: of more inputs, a random subset of so many is drawn.
    """
    shown, most = rows.take(rows.has_finite_optimum()), float(rows.entropy.max(initial=1.0))
    bounds = beta_bounds(shown.beta)
    beta = np.clip(shown.beta, *bounds)
    _plot_inputs(ax, shown.entropy, beta, shown.n, max_points)
    for role, rule in {**others, FITTED_RULE: fit}.items():
        _plot_curve(ax, role, rule, shown, most)
    _plot_domain(ax, fit)
    ax.set_xlim(-0.02 * most, 1.02 * most)
    ax.set(xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL)
    _add_theta_axis(ax, set_beta_axis(ax, bounds))
    legend_below(ax)
    return ax


def beta_bounds(beta: np.ndarray) -> tuple[float, float]:
    """The range of the axis: `BETA_BOUNDS`, or powers of 2 around 1 and nine of ten betas."""
    low, high = np.quantile(beta, BETA_QUANTILES) if len(beta) else BETA_BOUNDS
    if low >= BETA_BOUNDS[0] and high <= BETA_BOUNDS[1]:
        return BETA_BOUNDS
    low, high = np.floor(np.log2(min(low, 0.5))), np.ceil(np.log2(max(high, 2.0)))
    return float(2.0**low), float(2.0**high)


def points_caption(rows: SolvedInputs, max_points: int = MAX_POINTS) -> str:
    """A caption: the inputs that are drawn, at the edge, or not at all."""
    n = int(rows.has_finite_optimum().sum())
    inputs = f"{n:,} misranked inputs"
    if n > max_points:
        inputs = f"{max_points:,} inputs, a random subset of the {n:,} misranked ones"
    text = (
        f"Each point is one of {inputs}: its entropy H, and the beta = 1/theta at which its target "
        "is most probable."
    )
    return text + edge_caption(rows)


def edge_caption(rows: SolvedInputs) -> str:
    """The end of a caption: numbers of inputs at the edge, and of inputs that are not drawn."""
    beta = rows.beta[rows.has_finite_optimum()]
    low, high = beta_bounds(beta)
    at_edge = int(((beta < low) | (beta > high)).sum())
    at_zero = int((rows.misranked & (rows.status_code == FLAT)).sum())
    text = ""
    if at_edge:
        ends = f"{bound_text(low)} or {bound_text(high)}"
        points, are = ("point", "is") if at_edge == 1 else ("points", "are")
        text += f" {at_edge:,} {points} beyond {ends} {are} drawn at the edge."
    if at_zero:
        inputs, are = ("input", "is") if at_zero == 1 else ("inputs", "are")
        text += f" {at_zero:,} {inputs} with an optimal beta of 0 {are} not drawn."
    return text


def rules_caption(fit: Fit) -> str:
    """A caption: the look of rules, and the inputs of the fitted one."""
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
    """True if beta depends on n as well: it is no single curve over the entropy."""
    return fit.rule.by_size and not fit.ignores_inputs


def _curve_label(role: str, fit: Fit) -> str:
    """The name of a curve in the legend."""
    if role == FITTED_RULE:
        return f"{THIS_FIT}, mean over n" if depends_on_size(fit) else THIS_FIT
    if role == PUBLISHED_RULE:
        return label(PAPER)
    return f"constant, beta = {fit.only.constant_beta(fit.rule):.3g}"


def _plot_curve(ax: "Axes", role: str, fit: Fit, shown: SolvedInputs, most: float) -> None:
    """Draws a rule as it is applied, thin outside its domain."""
    colour, dash, width = CURVES[role]
    if depends_on_size(fit):
        applied = fit.only.beta_at(shown.entropy, np.log(shown.n), fit.rule)
        entropy, beta = bold = _mean_by_entropy(shown.entropy, applied)
    else:
        entropy = np.linspace(0, most, RULE_POINTS)
        _, beta = rule_curve(fit, fit.only, entropy)
        ax.plot(entropy, beta, color=colour, ls=dash, lw=0.5 * width, alpha=0.5, zorder=4)
        bold = entropy, np.where(_in_domain(fit, entropy), beta, np.nan)
    look: dict[str, Any] = {"color": colour, "ls": dash, "lw": width, "zorder": 5}
    if role == CONSTANT:  # dashes over a fit that is nearly constant, which stays visible
        look["zorder"] = 6
    else:
        look["path_effects"] = outline(width)
    ax.plot(*bold, **look, label=_curve_label(role, fit))


def _in_domain(fit: Fit, entropy: np.ndarray) -> np.ndarray:
    """(points,) bool; a constant applies at every entropy."""
    if fit.ignores_inputs:
        return np.ones(len(entropy), bool)
    lo, hi = fit.only.domain[:2]
    return np.asarray((lo <= entropy) & (entropy <= hi))


def _plot_domain(ax: "Axes", fit: Fit) -> None:
    """Shades the domain of a rule, and marks its threshold; a constant has neither."""
    if not fit.needs_entropy:
        return
    lo, hi = fit.only.domain[:2]
    ax.axvspan(lo, hi, color=DOMAIN_SHADE, lw=0, zorder=0.5, label=f"domain of {THIS_FIT}")
    if least := fit.rule.min_entropy:
        text = f"threshold: beta = 1 up to {least:g}"
        ax.axvline(least, color=BLACK, ls=":", lw=1.2, label=text)


def set_beta_axis(ax: "Axes", bounds: tuple[float, float]) -> list[float]:
    """Puts beta on the left, at powers of 2, which are returned."""
    ax.set_yscale("log", base=2)
    ax.set_ylim(bounds[0] / 1.1, 1.1 * bounds[1])
    low, high = (round(x) for x in np.log2(bounds))
    step = -(-(high - low) // MAX_BETA_TICKS)
    ticks = [2.0**k for k in range(low, high + 1) if k % step == 0]
    ax.set_yticks(ticks, [bound_text(tick) for tick in ticks])
    ax.minorticks_off()
    return ticks


def _add_theta_axis(ax: "Axes", ticks: list[float]) -> None:
    """Puts theta on the right, at the same places."""
    theta = ax.secondary_yaxis("right", functions=(_inverse, _inverse))
    theta.set_yticks([1 / tick for tick in ticks], [bound_text(1 / tick) for tick in ticks])
    theta.set_ylabel(r"temperature $\theta$")
    theta.minorticks_off()


def _inverse(x: Any) -> Any:
    with np.errstate(divide="ignore"):
        return 1 / np.asarray(x, float)


def outline(width: float) -> list[Any]:
    """White edges, so that a curve stands out on points of any colour."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width + 1.4, foreground="white"), Normal()]


def _mean_by_entropy(entropy: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean entropy and mean beta of bins of as many inputs each."""
    order = np.argsort(entropy, kind="stable")
    bins = [part for part in np.array_split(order, N_BINS) if len(part)]
    return np.array([entropy[i].mean() for i in bins]), np.array([beta[i].mean() for i in bins])


def _plot_inputs(
    ax: "Axes",
    entropy: np.ndarray,
    beta: np.ndarray,
    items: np.ndarray,
    max_points: int = MAX_POINTS,
) -> None:
    """Draws points coloured by n; of more than `max_points`, a random subset."""
    image = size_colours(items.min(initial=1 << 30), items.max(initial=1))
    norm: Any = image.norm  # its declared type is wider than the one that `scatter` takes
    chosen = np.arange(len(items))
    if len(items) > max_points:
        chosen = np.random.default_rng(0).choice(len(items), max_points, replace=False)
    ax.scatter(
        entropy[chosen],
        beta[chosen],
        c=items[chosen],
        norm=norm,
        cmap=image.cmap,
        s=7,
        alpha=0.55,
        lw=0,
        zorder=2,
    )
    add_size_bar(ax.figure, image, items, ax=ax, location="top", fraction=0.04)
