"""Figures: each function draws on an `ax` and returns it."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.files.atomic_io import write_atomically
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import LOG_SIZE, beta_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from calibrate.fitting.fit_collection import Rows

# Okabe and Ito's palette: told apart by the colour-blind.
OURS, PAPER, SHADE, GATED = "#D55E00", "#000000", "#56B4E9", "#BBBBBB"
MOST_LETTERS = 20  # of a name: more have no room in the legends of narrow figures
ENTROPY_LABEL = "Shannon entropy H of softmax(z) (nats)"


def save_fit_figure(
    path: Path, rows: "Rows", coefficients: Coefficients, paper: Coefficients
) -> None:
    """The paper's Figure 5 for this fit, as PNG; over set size for a log-size fit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    plot_fit(figure.add_subplot(), rows, coefficients, paper)
    save_figure(path, figure)


def save_beta_figure(path: Path, coefficients: Coefficients) -> None:
    """beta over entropy, or over set size, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    plot_beta(figure.add_subplot(), coefficients)
    save_figure(path, figure)


def save_figure(path: Path, figure: "Figure") -> None:
    """Writes a figure as PNG, whole or not at all."""
    write_atomically(path, png(figure))


def png(figure: "Figure") -> bytes:
    """A figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def short(name: str) -> str:
    """A name as a figure has room for, its end kept; a dollar sign is no mathematics here."""
    if len(name) > MOST_LETTERS:
        name = f"{name[: MOST_LETTERS - 7]}…{name[-6:]}"
    return name.replace("$", r"\$")


def plot_fit(ax: "Axes", rows: "Rows", coefficients: Coefficients, paper: Coefficients) -> "Axes":
    """Optimal theta of every interior row against entropy, with the fitted curves.

    Against set size for a log-size fit, which the paper's has no curve beside.
    """
    if coefficients.rule.kind == LOG_SIZE:
        return _plot_fit_by_size(ax, rows, coefficients)
    used = rows.interior()
    lo, hi = coefficients.only.domain
    right = max(hi, float(used.entropy.max(initial=0))) * 1.08
    ax.axvspan(lo, hi, color=SHADE, alpha=0.15, lw=0, label="domain of the fit")
    points = ax.scatter(
        used.entropy, 1 / used.beta, c=np.log2(used.size), s=5, alpha=0.4, lw=0, cmap="viridis_r",
        rasterized=True,
    )  # fmt: skip
    sizes = np.unique(rows.size)
    shown = sizes[:: max(1, len(sizes) // 6)]
    points.set_clim(*np.log2(sizes[[0, -1]]))
    bar = ax.figure.colorbar(points, ax=ax, ticks=np.log2(shown), label="set size n", pad=0.02)
    bar.ax.set_yticklabels([f"{n:,}" for n in shown])
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    H = np.linspace(1e-6, right, 600)  # at 0 any beta gives the same, and a gate there does nothing
    for fit, colour, style, label in (
        (coefficients, OURS, "-", f"this fit ({short(coefficients.reference)})"),
        (paper, PAPER, "--", "the paper's fit"),
    ):
        beta = beta_of(H, H, fit.only.coefficients, fit.only.domain, fit.rule, np)
        ax.plot(H, 1 / beta, style, color=colour, lw=2, label=label)
    ax.set(xlim=(0, right), xlabel=ENTROPY_LABEL)
    return _theta_axis(ax, used, coefficients)


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
    beta = beta_of(None, np.log(n), entry.coefficients, entry.domain, coefficients.rule, np)
    label = f"this fit ({short(coefficients.reference)})"
    ax.plot(n, 1 / beta, color=OURS, lw=2, label=label)
    sizes_axis(ax, np.unique(rows.size).tolist())
    return _theta_axis(ax, used, coefficients)


def _theta_axis(ax: "Axes", used: "Rows", fit: Coefficients) -> "Axes":
    """Optimal temperatures along y, up to where most rows lie."""
    theta = 1 / used.beta
    top = max(1.25, float(np.percentile(theta, 98))) if len(theta) else 1.25
    hidden = int((theta > top).sum())
    of_all = fit.source.get("options", {}).get("rows") == "all"
    ax.set(
        ylim=(0, top),
        ylabel=r"optimal temperature $\theta^* = 1/\beta^*$",
        title=f"{len(used.beta):,} misranked rows"
        + (f"; {hidden:,} with $\\theta^*$ > {top:.2f} lie above" if hidden else "")
        + ("\n(the fit is made of the others too, which want less)" if of_all else ""),
    )  # fmt: skip
    ax.legend(loc="upper right", framealpha=0.9)
    return ax


def plot_beta(ax: "Axes", coefficients: Coefficients) -> "Axes":
    """beta of every entry against entropy, or set size, past both ends of the domain."""
    entries, rule = coefficients.entries, coefficients.rule
    by_size = rule.kind == LOG_SIZE
    x = np.linspace(0, 1.15 * max(entry.domain[1] for entry in entries), 1200)
    shown = np.exp(x) if by_size else x
    for i, entry in enumerate(entries):
        beta = beta_of(x, x, entry.coefficients, entry.domain, rule, np)
        inside = (entry.domain[0] <= x) & (entry.domain[1] >= x)
        label = None if i else ("beta" if len(entries) == 1 else f"beta, {len(entries)} heads")
        beyond = None if i else "outside the domain"
        ax.plot(shown, beta, color=OURS, lw=1, alpha=0.6, label=beyond)
        ax.plot(shown[inside], beta[inside], color=OURS, lw=2.5, label=label)
    ax.axhline(1, color=PAPER, ls="--", lw=1, label="plain softmax")
    if by_size:
        sizes_axis(ax, powers_of_two(shown[-1]))
    else:
        ax.axvline(rule.min_entropy, color=SHADE, ls=":", lw=1.5, label="gate: beta = 1 up to here")
        ax.set_xlabel(ENTROPY_LABEL)
    ax.set(
        xlim=(shown[0], shown[-1]),
        ylabel=r"inverse temperature $\beta = 1/\theta$",
        title=short(coefficients.reference),
    )
    ax.legend(framealpha=0.9)
    return ax


def powers_of_two(largest: float) -> list[int]:
    """At most a dozen, evenly spaced, up to the largest size."""
    exponents = range(0, int(np.log2(largest) + 1e-9) + 1)
    return [2**k for k in exponents[:: max(1, len(exponents) // 8)]]


def plot_head_map(
    ax: "Axes",
    values: Mapping[tuple[int | None, int | None], float | None],
    unknown: str,
    **look: Any,
) -> "AxesImage":
    """A map of a number of each (layer, head), and x where there is none; the image, for its bar.

    Args:
      values: of the heads.
      unknown: what to call a layer or head that has no number.
      look: of the image: its colours and their range.
    """
    rows, columns = (
        sorted({name[axis] for name in values}, key=lambda i: -1 if i is None else i)
        for axis in (0, 1)
    )
    grid = np.full((len(rows), len(columns)), np.nan)
    for (layer, head), value in values.items():
        at = rows.index(layer), columns.index(head)
        if value is None:
            ax.plot(at[1], at[0], "x", color="#777777", ms=5)
        else:
            grid[at] = value
    image = ax.imshow(grid, aspect="auto", interpolation="nearest", **look)
    for axis, found, word in ((ax.xaxis, columns, "head"), (ax.yaxis, rows, "layer")):
        step = max(1, len(found) // 16)
        names = [unknown if i is None else str(i) for i in found[::step]]
        axis.set_ticks(range(0, len(found), step), names)
        axis.set_label_text(word)
    return image


def sizes_axis(ax: "Axes", sizes: Sequence[int]) -> None:
    """Set sizes along x, doubling from tick to tick."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45)
    ax.minorticks_off()
    ax.set_xlabel("set size n")
