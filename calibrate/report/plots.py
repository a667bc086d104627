"""Figures: scores of rules, the rule of a fit, maps of heads, and what a diagnosis measured."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibrate.evidence.baselines import label
from calibrate.evidence.evidence import LOG_P, OWN, PLAIN, RIGHT, Evidence, Head
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.report.plot_style import (
    BETA_LABEL,
    GATED,
    HEAD_STYLES,
    OTHERS,
    OURS,
    PAPER,
    SHADE,
    STYLES,
    legend_below,
    plot_head_map,
    plot_size_curves,
    powers_of_two,
    rule_axis,
    short,
    sizes_axis,
)
from calibrate.report.rule_curves import (
    domain_curve,
    of_both,
    rule_curve,
    size_curves,
    typical_betas,
)
from calibrate.report.rule_words import through_a_model
from calibrate.rows.solved_rows import head_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from calibrate.model.first_look import HeadLook
    from calibrate.rows.diagnosis import HeadDiagnosis

# What people compare, in this order: of more curves than these, none can be told from another.
COMPARED = (OWN, PLAIN, "paper", "hard", "log-n", "constant", "kappa-log-n")
MOST_CURVES = 5
SPREAD = {"size": 0.2, "template": 0.4}  # of the rules around their place: no bar hides another
FAR = 10.0  # times the largest gain of the fit: what gains or loses more is out of the figure
MAX_COLOURED = 10  # curves: of more, five are coloured
WIDE_RANGE = 10  # of beta: from there on its axis is logarithmic


def plot_scores(
    ax: "Axes", evidence: Evidence, measure: str, by: str = "size", own: str = OWN,
    gain: bool = False, name: str = "",
) -> "Axes":  # fmt: skip
    """A measure of the rules that people compare; bars of two standard errors on either side.

    Args:
      ax: where to draw.
      evidence: of the rules.
      measure: LOG_P, P or RIGHT.
      by: "size" or "template".
      own: the rule that is highlighted.
      gain: whether gains over plain softmax are drawn, and not means.
      name: of `own`, for people.
    """
    parts, factor = evidence.by(by), 1 if measure == LOG_P else 100
    rules = [rule for rule in _compared(evidence, own) if not (gain and rule == PLAIN)]
    others, places = iter(OTHERS * len(rules)), np.arange(len(parts))
    for i, rule in enumerate(rules):
        colour, marker, dash = STYLES.get(OWN if rule == own else rule) or next(others)
        found = [x.gain(rule, measure) if gain else x.mean(rule, measure) for x in parts.values()]
        mean, error = factor * np.array([(one.mean, one.error) for one in found], float).T
        at = places + SPREAD[by] * ((i + 0.5) / len(rules) - 0.5)
        ax.errorbar(
            at, mean, 2 * np.nan_to_num(error), color=colour, marker=marker, ms=5, lw=1.4,
            ls=dash if by == "size" else "", capsize=2, zorder=3 if rule == own else 2,
            label=short(name if rule == own and name else label(rule)),
        )  # fmt: skip
    ax.set_xticks(places, [f"{x:,}" if by == "size" else str(x) for x in parts], rotation=45)
    if by == "size":
        ax.set_xlabel("tokens" if evidence.of.items == "answers" else "set size n")
    ax.grid(alpha=0.25, lw=0.5)
    if gain:
        ax.axhline(0, color="#777777", lw=0.8)
        _limit(ax, [factor * float(x.gain(own, measure).mean) for x in parts.values()])
    what = {LOG_P: "log p", RIGHT: "share right"}.get(measure, "p of the target")
    unit = "nats" if measure == LOG_P else "points" if gain else "%"
    ax.set_ylabel(f"gain in {what} over plain softmax ({unit})" if gain else f"{what} ({unit})")
    legend_below(ax)
    return ax


def _compared(evidence: Evidence, own: str) -> list[str]:
    """The rules that are drawn, in their own order."""
    known = [rule for rule in (own, *COMPARED, *evidence.rules) if rule in evidence.rules]
    shown = list(dict.fromkeys(known))[:MOST_CURVES]
    return [rule for rule in evidence.rules if rule in shown]


def _limit(ax: "Axes", gains: Sequence[float]) -> None:
    """Leaves what is far beyond the fit's own gains out of the axis: it would hide them."""
    reach = max(map(abs, np.nan_to_num(gains)), default=0)
    low, high = ax.get_ylim()
    if reach > 0:
        ax.set_ylim(max(low, -FAR * reach), min(high, FAR * reach))


def plot_gain_map(ax: "Axes", evidence: Evidence, rule: str) -> "Axes":
    """A map of layers and heads: what a fit adds to log p; x where it has no rule for a head."""
    gains = {
        head: float(part.gain(rule, LOG_P).mean) if evidence.names(rule, head) else None
        for head, part in evidence.by("head").items()
    }
    most = float(np.nanmax([0.0, *(abs(x) for x in gains.values() if x is not None)])) or 1.0
    label = "gain in log p of the target (nats)"
    return plot_head_map(ax, gains, label, cmap="PuOr_r", vmin=-most, vmax=most)


def plot_held_out(ax: "Axes", fit: Coefficients) -> "Axes":
    """Gain in the target's log-probability by set size, on held-out rows."""
    held_out = fit.quality["held_out"]
    sizes = [size["size"] for size in held_out]
    gain = np.array([size["after"] - size["before"] for size in held_out])
    error = 2 * np.array([size["error"] for size in held_out])
    ax.axhline(0, color=PAPER, lw=0.8)
    ax.errorbar(sizes, gain, error, fmt="o-", color=OURS, capsize=3, ms=4)
    sizes_axis(ax, sizes)
    if through_a_model(fit):
        ax.set_xlabel("tokens")
    ax.set(ylabel="gain in log p (nats)", title="Held out: gain over plain softmax")
    return ax


def plot_rule(ax: "Axes", fit: Coefficients, order: Sequence[Entry] = ()) -> "Axes":
    """beta against entropy, or set size, past both ends of the domain; with its band if known.

    A rule of entropy and size is a curve for each of a few set sizes. Rules of several heads are
    curves over their domains, the first of `order` coloured, the others grey.
    """
    entries = list(order or fit.entries)
    if len(entries) > 1:
        _plot_rules_of_heads(ax, fit, entries)
    elif of_both(fit.rule):
        curves = size_curves(fit, fit.entries[0])
        plot_size_curves(ax, curves)
        ax.plot([], [], color=GATED, lw=0.8, label="outside the domain")
        ax.set_xlim(left=0)
    else:
        _plot_one_rule(ax, fit, entries[0])
    ax.axhline(1, color=PAPER, ls="--", lw=1, label="plain softmax")
    ax.set(ylabel=BETA_LABEL, title=short(fit.reference))
    legend_below(ax)
    return ax


def _plot_one_rule(ax: "Axes", fit: Coefficients, entry: Entry) -> None:
    rule = fit.rule
    x = np.linspace(0, 1.15 * entry.domain[1], 1200)
    across, beta = rule_curve(fit, entry, x)
    inside = (entry.domain[0] <= x) & (entry.domain[1] >= x)
    if fit.quality.get("band"):
        at, low, high = np.array(fit.quality["band"]).T
        at = at if rule.by_entropy else np.exp(at)
        ax.fill_between(at, low, high, color=SHADE, alpha=0.4, lw=0, label="95 % bootstrap band")
    ax.plot(across, beta, color=OURS, lw=1, alpha=0.6, label="outside the domain")
    ax.plot(across[inside], beta[inside], color=OURS, lw=2.5, label="beta")
    if rule.min_entropy:
        ax.axvline(rule.min_entropy, color=SHADE, ls=":", lw=1.5, label="gate: beta = 1 up to here")
    rule_axis(ax, rule, powers_of_two(1, across[-1]))
    ax.set_xlim(across[0], across[-1])


def _plot_rules_of_heads(ax: "Axes", fit: Coefficients, entries: Sequence[Entry]) -> None:
    coloured = len(entries) if len(entries) <= MAX_COLOURED else len(HEAD_STYLES)
    curves = [domain_curve(fit, entry) for entry in entries]
    for curve in curves[coloured:]:
        ax.plot(*curve, color=GATED, lw=0.8, alpha=0.8, zorder=1)
    for i, (entry, curve) in enumerate(zip(entries[:coloured], curves, strict=False)):
        colour, marker = HEAD_STYLES[i % len(HEAD_STYLES)]
        ax.plot(
            *curve, "--" if i >= len(HEAD_STYLES) else "-", color=colour,
            marker=marker, markevery=(i * 5, 50), ms=5, lw=1.5, zorder=3,
            label=head_label(entry.layer, entry.head),
        )  # fmt: skip
    if len(entries) > coloured:
        ax.plot([], [], color=GATED, lw=0.8, label=f"{len(entries) - coloured:,} other heads")
    betas, across = (np.concatenate(column) for column in zip(*((b, x) for x, b in curves)))  # noqa: B905
    if betas.max() > WIDE_RANGE * min(1.0, betas.min()):
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    rule_axis(ax, fit.rule, powers_of_two(across.min(), across.max()))


def plot_head_betas(ax: "Axes", fit: Coefficients, heads: Sequence[Head] | None = None) -> "Axes":
    """A map of log2 beta at the largest n of the fit and half the entropy it can have; x: no rule.

    Args:
      ax: where to draw.
      fit: with entries for layers or heads.
      heads: of the model; None for as many as the fit shows there are.
    """
    if heads is None:
        layers, columns = ([getattr(e, x) for e in fit.entries] for x in ("layer", "head"))
        heads = [(layer, head) for layer in _upto(layers) for head in _upto(columns)]
    betas = typical_betas(fit, heads)
    values = {name: None if beta is None else math.log2(beta) for name, beta in betas.items()}
    most = max([0.1, *(abs(value) for value in values.values() if value is not None)])
    plot_head_map(ax, values, r"$\log_2 \beta$", cmap="RdBu_r", vmin=-most, vmax=most)
    ax.set_title("red is sharper, blue more diffuse than plain softmax", fontsize=10)
    return ax


def _upto(numbers: list[int | None]) -> list[int | None]:
    """All numbers up to the largest; None alone if there is no number."""
    known = [number for number in numbers if number is not None]
    return [*range(max(known) + 1)] if known else [None]


def plot_entropy(ax: "Axes", heads: "Sequence[HeadDiagnosis]") -> "Axes":
    """Mean entropy against set size, the paper's Figure 3; the five of most gain are coloured.

    For one head or two, the standard deviation over rows is shown as a band.
    """
    by_size = [np.array([(x.items, x.entropy, x.entropy_spread) for x in h.sizes]).T for h in heads]
    for n, H, _ in by_size[len(HEAD_STYLES) :]:
        ax.plot(n, H, "-", color=GATED, lw=0.8, alpha=0.7, zorder=1)
    for head, (n, H, spread), (colour, marker) in zip(heads, by_size, HEAD_STYLES, strict=False):
        ax.plot(n, H, "-", color=colour, marker=marker, ms=5, label=short(head.name), zorder=3)
        if len(heads) <= 2:
            ax.fill_between(n, H - spread, H + spread, color=colour, alpha=0.15, lw=0)
    if len(heads) > len(HEAD_STYLES):
        ax.plot([], [], "-", color=GATED, label=f"{len(heads) - len(HEAD_STYLES)} other heads")
    sizes = sorted({at.size for head in heads for at in head.sizes})
    ends = np.array([min(n[0] for n, *_ in by_size), sizes[-1]])
    ax.plot(ends, np.log(ends), "--", color=PAPER, lw=1, label="log n: uniform attention", zorder=2)
    sizes_axis(ax, sizes)
    ax.set(xlabel="set size n (items)", ylabel="mean Shannon entropy H (nats)")
    ax.set_ylim(bottom=-0.02 * np.log(sizes[-1]))  # markers at 0 are shown whole
    ax.set_title("Entropy that grows with the set is dispersion")
    ax.legend(framealpha=0.9, fontsize=8)
    return ax


def plot_slopes(ax: "Axes", heads: "Sequence[HeadLook]", kind: str, wants: str) -> "Axes":
    """A map of slopes, red where a head wants to be sharper; a dot where that is beyond chance.

    Args:
      ax: where to draw.
      heads: of a model.
      kind: "answers" or "text".
      wants: the field of HeadLook that says what they want by it.
    """
    values: dict[Head, float | None] = {(h.layer, h.head): getattr(h, kind)[0] for h in heads}
    most = max(map(abs, filter(None, values.values())), default=1.0)
    label = r"d log p / d log $\beta$ (nats)"
    plot_head_map(ax, values, label, cmap="RdBu_r", vmin=-most, vmax=most)
    rows, columns = sorted({h.layer for h in heads}), sorted({h.head for h in heads})
    clear = [head for head in heads if getattr(head, wants) != "unclear"]
    at = [(columns.index(head.head), rows.index(head.layer)) for head in clear]
    ax.plot([x for x, _ in at], [y for _, y in at], "k.", ms=4, ls="")
    title = "answers" if kind == "answers" else "protected text, per token"
    ax.set_title(f"{title}: red wants to be sharper, blue more diffuse", fontsize=10)
    return ax
