"""The scatter plot of optimal temperatures against entropy, and the rules as curves over it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import PAPER
from calibrate.evidence.evidence import OWN
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
from calibrate.report.rule_text import bound_text
from calibrate.rows.solve import SolvedInputs
from calibrate.store.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULE_POINTS = 600  # of a curve
N_BINS = 16  # of entropies, over which a rule of n is averaged
BETA_BOUNDS = (1 / 4, 64.0)  # of the axis, unless many inputs lie beyond
BETA_QUANTILES = (0.05, 0.95)  # of the optimal beta, which the axis holds
MAX_BETA_TICKS = 10  # of the axis of beta
CURVES = {  # by rule: colour, dash and width
    OWN: (OURS, "-", 2.6),
    PAPER: (STYLES[PAPER][0], "-.", 1.6),
    CONSTANT: (STYLES[CONSTANT][0], "--", 1.8),
}
MAX_POINTS = 2_000  # of more inputs, a random subset is drawn


def plot_optimal_beta(
    ax: "Axes", rows: SolvedInputs, fit: Fit, others: Mapping[str, Fit]
) -> "Axes":
    """Draws entropy against the optimal beta of misranked inputs, and the rules as curves.

    Colours of points show n; points beyond the axis are at its edge. The domain of the fit is
    shaded. The axis on the right is theta = 1 / beta. A rule that depends on n is shown by its mean
    over the inputs of similar entropy.

    Args:
      ax: where to draw.
      rows: solved inputs.
      fit: fitted to them, with one entry for all heads.
      others: rules to compare, by PAPER or CONSTANT.
    """
    shown, most = rows.take(rows.has_finite_optimum()), float(rows.entropy.max(initial=1.0))
    bounds = beta_bounds(shown.beta)
    _plot_inputs(ax, shown.entropy, np.clip(shown.beta, *bounds), shown.n)
    for name, rule in {**others, OWN: fit}.items():
        _plot_curve(ax, name, rule, shown, most)
    if fit.needs_entropy:
        lo, hi = fit.only.domain[:2]
        ax.axvspan(lo, hi, color=DOMAIN_SHADE, lw=0, zorder=0.5, label=f"domain of {THIS_FIT}")
        if least := fit.rule.min_entropy:
            text = f"threshold: beta = 1 up to {least:g}"
            ax.axvline(least, color=BLACK, ls=":", lw=1.2, label=text)
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


def depends_on_size(fit: Fit) -> bool:
    """True if beta depends on n as well: it is no single curve over the entropy."""
    return fit.rule.by_size and not fit.ignores_inputs


def _plot_curve(ax: "Axes", name: str, fit: Fit, shown: SolvedInputs, most: float) -> None:
    """Draws a rule as it is applied, thin outside its domain."""
    colour, dash, width = CURVES[name]
    text = THIS_FIT if name == OWN else label(name)
    if depends_on_size(fit):
        text = f"{text}, mean over n"
        applied = fit.only.beta_at(shown.entropy, np.log(shown.n), fit.rule)
        bold = _mean_by_entropy(shown.entropy, applied)
    else:
        entropy = np.linspace(0, most, RULE_POINTS)
        beta = fit.only.beta_at(entropy, entropy, fit.rule)
        ax.plot(entropy, beta, color=colour, ls=dash, lw=0.5 * width, alpha=0.5, zorder=4)
        lo, hi = (0.0, np.inf) if fit.ignores_inputs else fit.only.domain[:2]
        bold = entropy, np.where((lo <= entropy) & (entropy <= hi), beta, np.nan)
    look: dict[str, Any] = {"color": colour, "ls": dash, "lw": width, "zorder": 5}
    if name == CONSTANT:  # dashes over a fit that is nearly constant, which stays visible
        text = f"{text}, beta = {fit.only.constant_beta(fit.rule):.3g}"
        look["zorder"] = 6
    else:
        look["path_effects"] = outline(width)
    ax.plot(*bold, **look, label=text)


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


def _plot_inputs(ax: "Axes", entropy: np.ndarray, beta: np.ndarray, n: np.ndarray) -> None:
    """Draws points coloured by n; of more than `MAX_POINTS`, a random subset."""
    image = size_colours(n.min(initial=1 << 30), n.max(initial=1))
    norm: Any = image.norm  # its declared type is wider than the one that `scatter` takes
    chosen = np.arange(len(n))
    if len(n) > MAX_POINTS:
        chosen = np.random.default_rng(0).choice(len(n), MAX_POINTS, replace=False)
    look: dict[str, Any] = {"s": 7, "alpha": 0.55, "lw": 0, "zorder": 2}
    points = entropy[chosen], beta[chosen]
    ax.scatter(*points, c=n[chosen], norm=norm, cmap=image.cmap, **look)
    add_size_bar(ax.figure, image, n, ax=ax, location="top", fraction=0.04)
