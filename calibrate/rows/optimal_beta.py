"""The optimal beta, the root of E_beta[z] = z_t: validation, batches and classes of rows."""

from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from calibrate.core.masking import default_errstate, on_cpu, refuse_rows
from calibrate.core.row_batches import FEW_ITEMS, FEW_ITEMS_OF_A_CALL, in_batches
from calibrate.rows.root_finding import jax_defaults, solve_one, solve_sets

# Classes of rows, tested in this order; UNSOLVED is an interior row that did not converge.
SHARP = 1
FLAT = 2
INTERIOR = 0
UNSOLVED = 3
STATUS_NAMES = {SHARP: "sharp", FLAT: "flat", INTERIOR: "interior", UNSOLVED: "unsolved"}


class OptimalBeta(NamedTuple):
    """Optimal beta and class of each row.

    >>> beta, status = calibrate.optimal_beta(np.array([[0.0, 1.0, 2.0, -3.0]]), [1])
    >>> print(f"{beta[0]:.3f}", status)
    0.397 [0]
    """

    beta: np.ndarray  # inf for SHARP rows, 0 for FLAT rows, NaN for UNSOLVED rows
    status: np.ndarray  # int8: INTERIOR, SHARP, FLAT or UNSOLVED


@default_errstate
def optimal_beta(
    logits: ArrayLike, target: ArrayLike, where: ArrayLike | None = None
) -> OptimalBeta:
    """Inverse temperature beta > 0 that maximises the target's probability, row by row.

    Solves E_beta[z] = z_t, where the mean is over softmax(beta z). It increases with beta, so the
    root is unique. For a set of targets it maximises their total probability, which may have
    several maxima, and takes the highest.

    >>> import calibrate
    >>> result = calibrate.optimal_beta([[2.0, 1.0, -1.0], [3.0, 0.0, 0.0]], [1, 0])
    >>> print(result.beta.round(2), result.status)  # 1: beta is infinite
    [0.23  inf] [0 1]

    Args:
      logits: (..., n), finite or -inf (masked); float64 is solved in float64, the rest in float32.
      target: (...) int, an unmasked position in [0, n); or (..., n) bool, True at every item that
        may win, of which at least one is unmasked.
      where: (..., n) bool, True for real items; None means all.
    Returns:
      OptimalBeta(beta, status), each (...): beta is inf for SHARP rows (the target is the maximum
      and above the mean), 0 for FLAT rows (the target is not above the mean, so there is no
      positive optimum), and NaN for UNSOLVED rows. For a set of targets: SHARP if the limit of its
      probability at infinite beta is above that at 0 and at every finite beta; FLAT if no beta > 0
      gives more than 0 does.
    Raises:
      ValueError: shapes do not match, a target is out of range or masked, a set of targets has no
        unmasked item, or a logit is NaN or +inf.
    Reference: Velickovic et al. 2024, section 3.
    """
    z, targets = _checked(
        np.asarray(on_cpu(logits, "logits")),
        np.asarray(on_cpu(target, "target")),
        on_cpu(where, "where"),
    )
    rows, per_row = z.shape[:-1], targets.shape[z.ndim - 1 :]
    flat = z.reshape(-1, z.shape[-1]), targets.reshape(-1, *per_row)
    beta = solve_batches(*flat, FEW_ITEMS_OF_A_CALL).reshape(rows)
    return OptimalBeta(beta, row_status(beta))


def solve_batches(logits: np.ndarray, target: np.ndarray, few_items: int = FEW_ITEMS) -> np.ndarray:
    """(rows,) optimal beta of valid (rows, n) logits, in batches of few shapes."""
    kernel = solve_one if target.ndim == 1 else solve_sets
    beta = np.empty(len(logits), logits.dtype)
    with jax.enable_x64(logits.dtype == np.float64), jax_defaults():
        for part, batch in in_batches(logits, target, few_items=few_items):
            beta[part] = np.asarray(kernel(*batch))[: part.stop - part.start]
    return beta


def row_status(beta: np.ndarray) -> np.ndarray:
    """(rows,) int8 class of each row, from its optimal beta."""
    classes = [beta == np.inf, beta == 0, np.isnan(beta)]
    return np.select(classes, [SHARP, FLAT, UNSOLVED], INTERIOR).astype(np.int8)


def _checked(
    logits: np.ndarray, target: np.ndarray, where: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """Validates logits and targets, and sets masked items to -inf."""
    sets = target.dtype == bool
    expected = logits.shape if sets else logits.shape[:-1]
    if logits.ndim == 0 or target.shape != expected or target.dtype.kind not in "biu":
        raise ValueError(
            f"target is {target.dtype} of shape {target.shape}, logits have {logits.shape}; give "
            "an integer position for each row, or bools, True at each target"
        )
    if logits.dtype != np.float64:
        logits = logits.astype(np.float32)
    if where is not None:
        if np.shape(where) != logits.shape:
            raise ValueError(f"where has shape {np.shape(where)}, logits {logits.shape}")
        logits = np.where(np.asarray(where, bool), logits, logits.dtype.type(-np.inf))
    bad = ~(logits.max(axis=-1, initial=-np.inf) < np.inf)  # the maximum is NaN if any item is
    refuse_rows(bad, "logits of row {} hold NaN or +inf; leave such rows out")
    nowhere = "target of row {} is no unmasked item; choose real items"
    if sets:
        refuse_rows(~np.any(target & (logits > -np.inf), axis=-1), nowhere)
        return logits, target
    n = logits.shape[-1]
    refuse_rows((target < 0) | (target >= n), f"target of row {{}} is not a position in [0, {n})")
    target = target.astype(np.int32)
    at_target = np.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    refuse_rows(at_target == -np.inf, nowhere)
    return logits, target
