#!/usr/bin/env python
"""The fits and held-out NLL of deployed_heads.py, computed again with NumPy and SciPy alone.

scripts/studies/deployed_heads_check.py RECORD ROWS ...

RECORD is scripts/results/deployed-heads.json, ROWS are runs/deployed-heads/HEAD/rows.npz. Fits the
constant, the log-size rule, the default polynomial and the paper's procedure to the calibration
rows of a head, scores them on the test rows, and prints the held-out NLL beside that of the record.
Ends with 1 if they differ by more than 0.003 nats.

A row has logits z_1 .. z_n, and one or several right items R. With p_beta = softmax(beta z):

    log p = log sum over R of p_beta      H = entropy of p_1, in nats

A rule gives beta of H and n. The NLL of a rule is the mean over rows of -log p.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.polynomial.legendre import legvander
from scipy.optimize import minimize, minimize_scalar

MIN_BETA, MAX_BETA = 1 / 1024, 1024
GRID = np.linspace(np.log(MIN_BETA), np.log(MAX_BETA), 241)  # of log beta
LAMBDAS = [1.0, 0.1, 1e-2, 1e-3, 1e-4, 0.0]
FOLDS = 5
FEWEST_GROUPS = 20
NARROWEST = 1e-3  # nats: a range of entropies in which no slope can be seen
TOLERANCE = 0.003  # nats
CALIBRATION, TEST = 0, 1


class Rows(NamedTuple):
    """Rows one after the other: `z` and `right` by item, `n` and `group` by row."""

    z: np.ndarray
    right: np.ndarray
    n: np.ndarray
    group: np.ndarray


class Profiles(NamedTuple):
    """What a fit reads of each row: its variables, and log p on the grid of log beta."""

    H: np.ndarray
    n: np.ndarray
    group: np.ndarray
    margin: np.ndarray  # highest right logit minus highest wrong one; negative if misranked
    log_p: np.ndarray  # (rows, grid)
    slope: np.ndarray  # (rows, grid), d log p / d log beta


Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]  # beta of H and n


# Rows


def read_rows(path: Path, split: int) -> Rows:
    """A split of rows.npz, which deployed_heads.py describes, without items at -inf."""
    with np.load(path) as file:
        z, n, group = file["logits"].astype(float), file["lengths"].astype(int), file["group"]
        chosen = file["split"] == split
        if "right" in file:
            right = file["right"].astype(bool)
        else:
            right = np.zeros(z.size, bool)
            right[np.cumsum(n) - n + file["target"]] = True
    real = np.isfinite(z)
    n_real = over_items(np.add, real.astype(int), n)
    return take(Rows(z[real], right[real], n_real, group), chosen)


def take(rows: Rows, chosen: np.ndarray) -> Rows:
    items = np.repeat(chosen, rows.n)
    return Rows(rows.z[items], rows.right[items], rows.n[chosen], rows.group[chosen])


def over_items(ufunc: np.ufunc, values: np.ndarray, n: np.ndarray) -> np.ndarray:
    """A sum or maximum over the items of each row."""
    return ufunc.reduceat(values, np.cumsum(n) - n)


def log_sum_and_mean(rows: Rows, beta: np.ndarray, items: np.ndarray) -> tuple:
    """log sum exp(beta z), and the mean of z under softmax(beta z), of chosen items by row."""
    n = over_items(np.add, items.astype(int), rows.n)
    z = rows.z[items]
    top = over_items(np.maximum, z, n)
    e = np.exp(np.repeat(beta, n) * (z - np.repeat(top, n)))
    total = over_items(np.add, e, n)
    return beta * top + np.log(total), over_items(np.add, e * z, n) / total


def log_p_and_slope(rows: Rows, beta: np.ndarray) -> tuple:
    """log p of each row, and its derivative by beta: E[z | right] - E[z]."""
    log_right, mean_right = log_sum_and_mean(rows, beta, rows.right)
    log_all, mean_all = log_sum_and_mean(rows, beta, np.ones(rows.z.size, bool))
    return log_right - log_all, mean_right - mean_all


def entropy(rows: Rows) -> np.ndarray:
    """H = log Z - E[z] at beta = 1."""
    log_z, mean = log_sum_and_mean(rows, np.ones(rows.n.size), np.ones(rows.z.size, bool))
    return np.maximum(log_z - mean, 0)


def margin(rows: Rows) -> np.ndarray:
    right = np.where(rows.right, rows.z, -np.inf)
    wrong = np.where(rows.right, -np.inf, rows.z)
    return over_items(np.maximum, right, rows.n) - over_items(np.maximum, wrong, rows.n)


def profiles_of(rows: Rows) -> Profiles:
    columns = [log_p_and_slope(rows, np.full(rows.n.size, np.exp(log_beta))) for log_beta in GRID]
    log_p, slope = (np.stack(parts, axis=1) for parts in zip(*columns, strict=True))
    return Profiles(entropy(rows), rows.n, rows.group, margin(rows), log_p, slope * np.exp(GRID))


def pick(profiles: Profiles, chosen: np.ndarray) -> Profiles:
    return Profiles(*(values[chosen] for values in profiles))


def interpolate(profiles: Profiles, beta: np.ndarray) -> tuple:
    """log p and d log p / d beta by cubic Hermite interpolation in log beta."""
    step = GRID[1] - GRID[0]
    t = (np.log(beta) - GRID[0]) / step
    k = np.clip(t.astype(int), 0, len(GRID) - 2)
    u, row = t - k, np.arange(len(beta))
    y0, y1 = profiles.log_p[row, k], profiles.log_p[row, k + 1]
    m0, m1 = step * profiles.slope[row, k], step * profiles.slope[row, k + 1]
    a, b = 2 * (y0 - y1) + m0 + m1, 3 * (y1 - y0) - 2 * m0 - m1  # a u^3 + b u^2 + m0 u + y0
    value = ((a * u + b) * u + m0) * u + y0
    return value, ((3 * a * u + 2 * b) * u + m0) / (step * beta)


# Rules of maximum likelihood


def best_constant(profiles: Profiles) -> float:
    """The beta of highest mean log p.

    If all N rows are ranked right: log(N + 1) / m, m their median margin. This is the optimum of
    two items at distance m with one failure in N + 2 rows.
    """
    if (profiles.margin > 0).all():
        beta = np.log(len(profiles.H) + 1) / np.median(profiles.margin)
        return float(np.clip(beta, MIN_BETA, MAX_BETA))

    def loss(log_beta: float) -> float:
        beta = np.full(len(profiles.H), np.exp(log_beta))
        return -interpolate(profiles, beta)[0].mean()

    k = profiles.log_p.mean(axis=0).argmax()
    around = GRID[max(k - 1, 0)], GRID[min(k + 1, len(GRID) - 1)]
    return float(np.exp(minimize_scalar(loss, bounds=around, method="bounded").x))


def constant(profiles: Profiles) -> Rule:
    b0 = best_constant(profiles)
    return lambda H, n: np.full(len(H), b0)


def columns_of(kind: str, profiles: Profiles) -> Rule:
    """The columns x_k of a kind as a function of H and n, centred on their means over these rows.

    x is H, clipped to its 0.5 to 99.5 % quantiles and scaled to [-1, 1]; y is log n, scaled alike
    and not clipped, so that a trend in log n goes on beyond the fitted sizes:

        polynomial: P_1(x) .. P_4(x)       log-size: P_1(y)
    """
    H_limits = np.quantile(profiles.H, [0.005, 0.995])
    n_limits = np.quantile(np.log(profiles.n), [0.005, 0.995])

    def raw(H: np.ndarray, n: np.ndarray) -> np.ndarray:
        if kind == "log-size":
            return scale(np.log(n), n_limits)[:, None]
        return legvander(scale(np.clip(H, *H_limits), H_limits), 4)[:, 1:]

    means = raw(profiles.H, profiles.n).mean(axis=0)
    return lambda H, n: raw(H, n) - means


def scale(v: np.ndarray, limits: np.ndarray) -> np.ndarray:
    low, high = limits
    return np.zeros_like(v) if low == high else 2 * (v - low) / (high - low) - 1


def penalised(kind: str, profiles: Profiles, lambdas: list[float]) -> list[Rule]:
    """For each lambda the c that minimises mean -log p + lambda sum over k >= 1 of c_k^2, with

        beta = clip(b0 (c_0 + sum over k of c_k x_k), min, max),    b0 the best constant.

    Clipping has no gradient outside its bounds: the best of three starts, with slopes 0, 0.5, -0.5.
    """
    b0, columns = best_constant(profiles), columns_of(kind, profiles)
    X = np.column_stack([np.ones(len(profiles.H)), columns(profiles.H, profiles.n)])
    free = np.r_[0.0, np.ones(X.shape[1] - 1)]  # c_0 has no penalty

    def minimum(lam: float) -> np.ndarray:
        def loss(c: np.ndarray) -> tuple:
            bare = b0 * (X @ c)
            beta = np.clip(bare, MIN_BETA, MAX_BETA)
            log_p, slope = interpolate(profiles, beta)
            by_row = np.where(beta == bare, slope, 0) * b0
            gradient = -X.T @ by_row / len(X) + 2 * lam * free * c
            return -log_p.mean() + lam * (free * c) @ c, gradient

        starts = [np.r_[1.0, s, np.zeros(X.shape[1] - 2)] for s in (0.0, 0.5, -0.5)]
        options = {"maxiter": 1000, "ftol": 1e-12, "gtol": 1e-7}
        fits = [minimize(loss, c, jac=True, method="L-BFGS-B", options=options) for c in starts]
        return min(fits, key=lambda fit: fit.fun).x

    def rule(c: np.ndarray) -> Rule:
        return lambda H, n: np.clip(b0 * (c[0] + columns(H, n) @ c[1:]), MIN_BETA, MAX_BETA)

    return [rule(minimum(lam)) for lam in lambdas]


def choose_lambda(kind: str, profiles: Profiles) -> float:
    """The largest lambda whose held-out mean log p is within one standard error of the best.

    Held out: five folds of whole groups. The error is that of the paired difference over groups.
    """
    fold = folds(profiles.group)
    log_p = np.empty((len(LAMBDAS), len(fold)))
    for k in range(FOLDS):
        train, held_out = pick(profiles, fold != k), pick(profiles, fold == k)
        for i, rule in enumerate(penalised(kind, train, LAMBDAS)):
            log_p[i, fold == k] = interpolate(held_out, rule(held_out.H, held_out.n))[0]
    best = log_p.mean(axis=1).argmax()
    for lam, row in zip(LAMBDAS, log_p, strict=True):
        loss = log_p[best] - row
        if loss.mean() <= standard_error(loss, profiles.group):
            return lam
    raise AssertionError("the best lambda is within its own error")


def folds(group: np.ndarray, seed: int = 0) -> np.ndarray:
    """The fold of each row: whole groups, dealt in random order."""
    _, index = np.unique(group, return_inverse=True)
    order = np.random.default_rng(seed).permutation(index.max() + 1)
    return (order % FOLDS)[index]


def standard_error(values: np.ndarray, group: np.ndarray) -> float:
    """Of a mean over rows: sqrt(G / (G - 1) sum over groups of (sum of v - mean)^2) / rows."""
    _, index = np.unique(group, return_inverse=True)
    sums = np.bincount(index, values - values.mean())
    return float(np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / len(values))


def smoothed(kind: str) -> Callable[[Profiles], Rule]:
    def fit(profiles: Profiles) -> Rule:
        """A constant if no slope can be seen, else the penalised fit at the chosen lambda."""
        few = len(np.unique(profiles.group)) < FEWEST_GROUPS
        size_varies = len(np.unique(profiles.n)) > 1
        varies = size_varies if kind == "log-size" else np.ptp(profiles.H) > NARROWEST
        if few or not varies or (profiles.margin > 0).all():
            return constant(profiles)
        return penalised(kind, profiles, [choose_lambda(kind, profiles)])[0]

    return fit


# The paper's procedure


def optimal_beta(rows: Rows, profiles: Profiles) -> np.ndarray:
    """The beta of highest log p of each row: 0, infinity, or a root of E[z | right] = E[z].

    The highest point of the grid brackets it; then bisection in log beta. Several right items may
    have several roots.
    """
    k = profiles.log_p.argmax(axis=1)
    low = np.r_[-30.0, GRID][k]
    high = np.r_[GRID, 30.0][k + 1]
    for _ in range(60):
        middle = (low + high) / 2
        rises = log_p_and_slope(rows, np.exp(middle))[1] > 0
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    beta = np.exp(low)
    falls = log_p_and_slope(rows, np.zeros(len(beta)))[1] <= 0
    beta = np.where(falls & (k == 0), 0, beta)
    return np.where(profiles.margin >= 0, np.inf, beta)


def paper_procedure(rows: Rows, profiles: Profiles) -> Rule:
    """Least squares of the optimal beta on H, over rows with a finite optimum above 0."""
    optimum = optimal_beta(rows, profiles)
    fitted = (optimum > 0) & (optimum < np.inf)
    p = np.polyfit(profiles.H[fitted], optimum[fitted], 4)
    low, high = profiles.H[fitted].min(), profiles.H[fitted].max()

    def beta(H: np.ndarray, n: np.ndarray) -> np.ndarray:
        return np.where(H > 0.5, np.clip(np.polyval(p, np.clip(H, low, high)), 1, 64), 1)

    return beta


# Scores


def fitted_rules(rows: Rows) -> dict[str, Rule]:
    """Each rule by its name in the record, fitted to these rows."""
    profiles = profiles_of(rows)
    return {
        "baseline": lambda H, n: np.ones(len(H)),
        "constant": constant(profiles),
        "log-size": smoothed("log-size")(profiles),
        "polynomial": smoothed("polynomial")(profiles),
        "least-squares": paper_procedure(rows, profiles),
    }


def log_p(rows: Rows, rule: Rule) -> np.ndarray:
    return log_p_and_slope(rows, rule(entropy(rows), rows.n))[0]


def held_out_nll(path: Path) -> dict[str, float]:
    """The NLL of the test rows under each rule fitted to the calibration rows."""
    rules, rows = fitted_rules(read_rows(path, CALIBRATION)), read_rows(path, TEST)
    return {name: -log_p(rows, rule).mean() for name, rule in rules.items()}


def compare(nll: dict[str, float], recorded: dict) -> float:
    """Prints a line for each rule; returns the largest difference of the NLL from the record's."""
    print(f"{'':18}{'NLL':>9}{'record':>9}{'difference':>12}")
    difference = {name: value - recorded[name]["nll"] for name, value in nll.items()}
    for name, value in nll.items():
        print(f"{name:18}{value:9.4f}{recorded[name]['nll']:9.4f}{difference[name]:+12.5f}")
    return max(map(abs, difference.values()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, help="scripts/results/deployed-heads.json")
    parser.add_argument("rows", type=Path, nargs="+", help="rows.npz in a folder named as its head")
    options = parser.parse_args()
    heads = json.loads(options.record.read_text())["heads"]
    largest = 0.0
    for path in options.rows:
        head = path.parent.name
        print(head)
        largest = max(largest, compare(held_out_nll(path), heads[head]["test"]["rules"]))
    print(f"largest difference: {largest:.5f} nats, tolerance {TOLERANCE}")
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
