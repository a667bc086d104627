"""The optimal beta: the root of E_beta[z] = z_t; validation, batches and row classes."""

from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from calibrate.core.row_batches import FEW_ITEMS, FEW_ITEMS_OF_A_CALL, in_batches
from calibrate.core.tensors import default_errors, on_cpu, refuse_rows
from calibrate.solver.root_finding import jax_defaults, solve_one, solve_sets

# Row classes, tested in this order; UNSOLVED is an interior row that did not converge.
SHARP = 1
FLAT = 2
INTERIOR = 0
UNSOLVED = 3
STATUS_NAMES = {SHARP: "sharp", FLAT: "flat", INTERIOR: "interior", UNSOLVED: "unsolved"}


class OptimalBeta(NamedTuple):
    """Optimal beta and row class, one each per row."""

    beta: np.ndarray  # inf for SHARP rows, 0 for FLAT rows, NaN for UNSOLVED rows
    status: np.ndarray  # int8: INTERIOR, SHARP, FLAT or UNSOLVED


@default_errors
def optimal_beta(
    logits: ArrayLike, target: ArrayLike, where: ArrayLike | None = None
) -> OptimalBeta:
    """Inverse temperature that maximises the target's probability, row by row.

    Solves E_beta[z] = z_t for beta > 0; the left side rises with beta, so the root is unique. For
    a set of targets it maximises their total mass, and takes the best of several roots.

    Args:
      logits: (..., n), finite or -inf (masked); float64 is solved in float64, the rest in float32.
      target: (...) int, an unmasked position in [0, n); or (..., n) bool, True at the items any of
        which may win: at least one that is unmasked.
      where: (..., n) bool, True for real items; None means all.
    Returns:
      OptimalBeta(beta, status), each (...): beta is inf for SHARP rows (the target is the maximum
      and above the mean), 0 for FLAT rows (not above the mean: no positive optimum), NaN for
      UNSOLVED ones. For a set: SHARP if its mass is above that at beta = 0 as beta grows without
      end, and no finite beta does better; FLAT if no beta > 0 does better than 0.
    Raises:
      ValueError: shapes that do not match, a target that is out of range or masked, a set without
        an unmasked item, a logit that is NaN or +inf (all checked on the host).
    Reference: Velickovic et al. 2024, section 3.
    """
    z, targets = _checked(
        np.asarray(on_cpu(logits, "logits")),
        np.asarray(on_cpu(target, "target")),
        on_cpu(where, "where"),
    )
    rows, per_row = z.shape[:-1], targets.shape[z.ndim - 1 :]
    flat = z.reshape(-1, z.shape[-1]), targets.reshape(-1, *per_row)
    beta = solve(*flat, FEW_ITEMS_OF_A_CALL).reshape(rows)
    return OptimalBeta(beta, row_status(beta))


def solve(logits: np.ndarray, target: np.ndarray, few_items: int = FEW_ITEMS) -> np.ndarray:
    """(rows,) `optimal_beta` of valid (rows, n) logits, in batches of one traced shape."""
    kernel = solve_one if target.ndim == 1 else solve_sets
    beta = np.empty(len(logits), logits.dtype)
    with jax.enable_x64(logits.dtype == np.float64), jax_defaults():
        for part, batch in in_batches(logits, target, few_items=few_items):
            beta[part] = np.asarray(kernel(*batch))[: part.stop - part.start]
    return beta


def row_status(beta: np.ndarray) -> np.ndarray:
    """The class of each row, int8, by its optimal beta."""
    classes = [beta == np.inf, beta == 0, np.isnan(beta)]
    return np.select(classes, [SHARP, FLAT, UNSOLVED], INTERIOR).astype(np.int8)


def _checked(
    logits: np.ndarray, target: np.ndarray, where: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """Validated logits, masked items set to -inf, and targets."""
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
