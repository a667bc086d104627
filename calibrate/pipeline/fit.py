"""Fit: solve every collected row, and fit 1/theta as a degree-4 polynomial of entropy."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.collection import Collection, open_collection, refuse_bad_rows
from calibrate.maths import solver
from calibrate.maths.rule import Rule, beta_of_entropy, horner

DEGREE = 4
MIN_ROWS = 100
RANK_TOLERANCE = 1e-9  # of the largest singular value of the design matrix
DOMAIN_PERCENTILES = (0.5, 99.5)
# Two fits say the same when their beta differs by less than this over the domain.
SAME_BETA = 1e-6
ADVICE = "collect more sets, or larger ones, which the head misranks more often (sizes 16..16384)"


class Rows(NamedTuple):
    """Every collected row, solved."""

    entropy: np.ndarray  # nats
    beta: np.ndarray  # optimal beta
    status: np.ndarray  # of solver
    size: np.ndarray  # set size

    def interior(self) -> "Rows":
        """The rows with a finite, positive optimum: those that a fit of beta uses."""
        chosen = self.status == solver.INTERIOR
        return Rows(*(column[chosen] for column in self))

    def count_by_status(self) -> dict[str, int]:
        return {name: int((self.status == s).sum()) for s, name in solver.STATUS_NAMES.items()}


class Fit(NamedTuple):
    """A fit and the rows behind it."""

    coefficients: Coefficients
    rows: Rows


def fit_collection(folder: Path, name: str, objective: str = "beta") -> Fit:
    """Solves and fits a complete collection.

    Args:
      folder: of the collection.
      name: of the fit.
      objective: "beta", least squares on p(H) - beta*; or "theta", least squares on
        1 / max(p(H), 1) - min(theta*, 1), started from the fit of beta.
    Raises:
      CalibrateError: the collection is absent, unfinished or damaged.
      QualityError: too few interior rows, too many bad ones, or a polynomial that is not positive
        on its whole domain.
    """
    collection = open_collection(Path(folder))
    refuse_bad_rows(collection.manifest)
    rows = solve_collection(collection)
    used = rows.interior()
    entry = Entry(*fit_polynomial(used.entropy, used.beta, objective))
    refuse_negative(entry)
    rule = Rule()
    coefficients = Coefficients(
        rule=rule,
        entries=(entry,),
        name=name,
        quality={
            "rows": _row_counts(collection, rows),
            "residuals": _residuals(used, entry, rule),
        },
        source=_source(collection, objective),
        provenance=_provenance(),
    )
    return Fit(coefficients, rows)


def solve_collection(collection: Collection) -> Rows:
    """The optimal beta of every row; shards are read one at a time."""
    columns: list[tuple[np.ndarray, ...]] = []
    for size, shard in collection.shards():
        solved = solver.optimal_beta(shard.logits, shard.target)
        sizes = np.full(len(shard.target), size, np.int32)
        columns.append((shard.entropy.astype(float), solved.beta, solved.status, sizes))
    return Rows(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def fit_polynomial(
    entropy: np.ndarray, beta: np.ndarray, objective: str = "beta"
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Degree-4 polynomial p with p(H) close to optimal beta, and its domain.

    The design matrix is that of the standardised entropy, or the powers of H would be nearly
    collinear; the result is exported in plain powers.

    Args:
      entropy: (rows,) H in nats.
      beta: (rows,) optimal beta, finite and positive.
      objective: "beta" or "theta".
    Returns:
      (coefficients, highest power first; domain, the 0.5 % to 99.5 % range of the entropies).
    Raises:
      QualityError: fewer than 100 rows, or a rank-deficient fit.
    """
    if len(entropy) < MIN_ROWS:
        raise QualityError(
            f"{len(entropy)} interior rows, fewer than the {MIN_ROWS} that a fit needs; {ADVICE}"
        )
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    features = make_pipeline(StandardScaler(), PolynomialFeatures(DEGREE, include_bias=False))
    design = features.fit_transform(entropy[:, None])
    regression = LinearRegression().fit(design, beta)
    rank = int((regression.singular_ > RANK_TOLERANCE * regression.singular_.max()).sum())
    if rank < DEGREE:
        raise QualityError(
            f"the rows' entropies determine only {rank + 1} of the {DEGREE + 1} "
            f"coefficients; {ADVICE}"
        )
    ascending = np.append(regression.intercept_, regression.coef_)
    if objective == "theta":
        ascending = _refine_theta(ascending, design, beta)
    coefficients = _plain_powers(ascending, features[0].mean_[0], features[0].scale_[0])
    lo, hi = (float(h) for h in np.percentile(entropy, DOMAIN_PERCENTILES))
    return coefficients, (lo, hi)


def _refine_theta(ascending: np.ndarray, design: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Least squares on 1 / max(p, 1) - min(theta*, 1), by a trust region from the fit of beta."""
    from scipy.optimize import least_squares

    basis = np.column_stack([np.ones(len(design)), design])
    theta = np.minimum(1 / beta, 1)
    solution = least_squares(
        lambda c: 1 / np.maximum(basis @ c, 1) - theta,
        ascending,
        jac=lambda c: -basis * np.where(basis @ c > 1, (basis @ c) ** -2.0, 0)[:, None],
        x_scale="jac",
    )
    if not solution.success:
        raise QualityError(f"the fit of theta did not converge ({solution.message}); {ADVICE}")
    return solution.x


def _plain_powers(ascending: np.ndarray, mean: float, deviation: float) -> tuple[float, ...]:
    """Coefficients of the standardised entropy -> of H itself, highest power first."""
    standardised = np.polynomial.Polynomial([-mean / deviation, 1 / deviation])
    plain = np.polynomial.Polynomial(ascending)(standardised)
    return tuple(float(c) for c in plain.coef[::-1])


def refuse_negative(entry: Entry) -> None:
    """The guards would hide it, but such a polynomial does not describe its rows."""
    lo, hi = entry.domain
    lowest = _lowest_value(entry.coefficients, lo, hi)
    if lowest <= 0:
        raise QualityError(
            f"the polynomial falls to {lowest:.3g} on its domain [{lo:.3f}, {hi:.3f}] nats, and "
            f"beta must be positive; {ADVICE}"
        )


def _lowest_value(coefficients: tuple[float, ...], lo: float, hi: float) -> float:
    """The polynomial's minimum over [lo, hi]: at an end or where its derivative is 0."""
    roots = np.roots(np.polyder(coefficients))
    inside = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > lo) & (roots.real < hi)]
    return float(np.polyval(coefficients, [lo, hi, *inside]).min())


def same_fit(newest: Coefficients, new: Coefficients) -> bool:
    """Whether a refit says nothing new: the same source, and the same beta over the domain."""
    if newest.source != new.source or newest.rule != new.rule:
        return False
    H = np.linspace(*new.only.domain, 257)
    old_beta, new_beta = (
        beta_of_entropy(H, fit.only.coefficients, fit.only.domain, fit.rule, np)
        for fit in (newest, new)
    )
    return bool(np.abs(old_beta - new_beta).max() < SAME_BETA)


def _row_counts(collection: Collection, rows: Rows) -> dict[str, int]:
    sizes = collection.manifest["sizes"]
    totals = {key: sum(size[key] for size in sizes) for key in sizes[0] if key != "size"}
    return {**totals, **rows.count_by_status()}


def _residuals(used: Rows, entry: Entry, rule: Rule) -> dict[str, float]:
    """How far the fit is from the rows used; theta as it is applied, so at most 1."""
    p = horner(used.entropy, entry.coefficients)
    applied = beta_of_entropy(used.entropy, entry.coefficients, entry.domain, rule, np)
    deviation = used.beta - used.beta.mean()
    return {
        "beta_rms": float(np.sqrt(np.mean((p - used.beta) ** 2))),
        "beta_r_squared": float(1 - np.mean((p - used.beta) ** 2) / np.mean(deviation**2)),
        "theta_rms": float(np.sqrt(np.mean((1 / applied - np.minimum(1 / used.beta, 1)) ** 2))),
    }


def _source(collection: Collection, objective: str) -> dict[str, Any]:
    configuration = collection.manifest["configuration"]
    return {
        "head": configuration["head"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
        "seed": configuration["seed"],
        "options": {"degree": DEGREE, "objective": objective},
    }


def _provenance() -> dict[str, Any]:
    from datetime import UTC, datetime
    from importlib.metadata import version

    tools = ("calibrate", "numpy", "scipy", "scikit-learn", "jax")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {tool: version(tool) for tool in tools},
    }
