"""Figures of what a file says of its own fit; each function draws on an `ax` and returns it."""

from typing import TYPE_CHECKING

import numpy as np

from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import LOG_SIZE, beta_of
from calibrate.report.plots import OURS, PAPER, SHADE, powers_of_two, short, sizes_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_SPAN = 0.02  # nats along y: what is less than any head's gain should look level


def plot_band(ax: "Axes", fit: Coefficients) -> "Axes":
    """beta with the interval that holds it when the rows are drawn anew."""
    x, low, high = np.array(fit.quality["band"]).T
    entry = fit.only
    beta = beta_of(x, x, entry.coefficients, entry.domain, fit.rule, np)
    by_size = fit.rule.kind == LOG_SIZE
    across = np.exp(x) if by_size else x
    ax.fill_between(across, low, high, color=SHADE, alpha=0.4, lw=0, label="95 % bootstrap band")
    ax.plot(across, beta, color=OURS, lw=2, label=short(fit.reference))
    if by_size:
        sizes_axis(ax, [n for n in powers_of_two(across[-1]) if n >= across[0] * 0.99])
    else:
        ax.set_xlabel("entropy H (nats)")
    ax.set_ylabel("beta = 1/theta")
    ax.set_ylim(0, 1.15 * float(high.max()))
    ax.legend(loc="lower left", fontsize=8)
    return ax


def plot_held_out(ax: "Axes", fit: Coefficients) -> "Axes":
    """Gain in the target's log-probability by set size, on rows that folds left out."""
    held_out = fit.quality["held_out"]
    sizes = [size["size"] for size in held_out]
    gain = np.array([size["after"] - size["before"] for size in held_out])
    error = 2 * np.array([size["error"] for size in held_out])
    ax.axhline(0, color=PAPER, lw=0.8)
    ax.errorbar(sizes, gain, error, fmt="o-", color=OURS, capsize=3, ms=4)
    sizes_axis(ax, sizes)
    ax.set_ylabel("gain in log p of the target (nats)")
    return ax


def plot_learning_curve(ax: "Axes", fit: Coefficients) -> "Axes":
    """Held-out log-probability against how many rows the fit is made of."""
    curve = fit.quality["learning_curve"]
    log_p = [point["log_p"] for point in curve]
    ax.plot([point["rows"] for point in curve], log_p, "o-", color=OURS, ms=4)
    middle, half = (max(log_p) + min(log_p)) / 2, max(np.ptp(log_p) * 0.6, LEAST_SPAN / 2)
    ax.set_ylim(middle - half, middle + half)
    ax.set_xscale("log", base=2)
    ticks = [point["rows"] for point in curve]
    ax.set_xticks(ticks, [f"{rows:,}" for rows in ticks], minor=False)
    ax.set_xlabel("rows that the fit is made of")
    ax.set_ylabel("held-out log p of the target (nats)")
    return ax
