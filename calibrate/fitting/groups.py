"""Groups of rows: dealt into blocks, held out whole, and refused where they are too few.

A group is what makes rows dependent, such as their prompt; rows that name none are each their own.
"""

import hashlib
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_quality import check_bad_rows, count_bad
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.estimate import index_groups
from calibrate.solver.solved_rows import Rows

MIN_ROWS = 100  # that a fit needs
ADVICE = "collect more sets, or larger sets; of arrays, give more rows"
N_BLOCKS = 100
N_FOLDS = 5
MIN_GROUPS = N_FOLDS
HELD_OUT = 0.2  # of the groups
MIN_HELD_OUT = 2  # groups: the spread of one is unknown


def deal_into_blocks(rows: Rows) -> Rows:
    """The rows with a weight and an optimum, in blocks, of which folds and resamples are made.

    Raises:
      QualityError: there are rows, and none has any weight.
    """
    if len(rows.weight) and not rows.weight.any():
        raise QualityError("no row has any weight: all of them are 0; give some")
    rows = rows.take(rows.has_optimum())
    return rows._replace(block=assign_blocks(rows))


def assign_blocks(rows: Rows) -> np.ndarray:
    """(rows,) block of each row: whole groups at random, of each size as alike as can be.

    Groups that are alike in size and number of rows are dealt out in turn, so that no block is
    empty before each has one.
    """
    group = rows.group_index()
    return np.asarray(_dealing_order(rows.size, group, np.random.default_rng(0))[group] % N_BLOCKS)


def _dealing_order(size: np.ndarray, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(groups,) the position of each: those alike in size and number of rows follow each other."""
    _, of_size = np.unique(size, return_inverse=True)
    shape = of_size.max(initial=0) + 1, group.max(initial=0) + 1
    cells = np.bincount(of_size * shape[1] + group, minlength=shape[0] * shape[1])
    counts = cells.reshape(shape)  # of rows
    shuffled = rng.permutation(counts.shape[1])
    order = np.empty(len(shuffled), np.int64)
    order[shuffled[np.lexsort(-counts[::-1, shuffled])]] = np.arange(len(order))
    return order


def require_rows(count: int, adjective: str) -> None:
    """Raises QualityError if a fit has too few rows."""
    if count < MIN_ROWS:
        raise QualityError(
            f"{count} {adjective} rows, fewer than the {MIN_ROWS} that a fit needs; {ADVICE}"
        )


def require_groups(rows: Rows) -> None:
    """Raises QualityError if the rows come from too few groups to hold some out."""
    count = int(rows.group_index().max(initial=-1)) + 1
    if count < MIN_GROUPS:
        raise QualityError(
            f"the rows come from {count} group{'s' * (count != 1)} (prompts), fewer than the "
            f"{MIN_GROUPS} that a fit needs; collect rows of more prompts"
        )


class Split(NamedTuple):
    """Two parts of the same rows."""

    fitted: Arrays  # with the fingerprint of all rows
    held_out: Arrays  # with one of its own, as the fit is not made of it
    is_held_out: np.ndarray  # (rows,) bool, in the order of the rows; no row of weight 0 is


def hold_out(arrays: Arrays, share: float = HELD_OUT, seed: int = 0) -> Split:
    """Holds out a share of the groups; of each set size as nearly that share as can be.

    Raises:
      CalibrateError: a share or seed that is out of range.
      QualityError: too few rows or groups for calibration and test, or too many bad rows.
    """
    if not 0 < share < 1:
        raise CalibrateError(f"held_out is {share}; give a share of the rows between 0 and 1")
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 64:
        raise CalibrateError(f"seed is {seed}; give an integer from 0 to 2^64 - 1")
    size, index = arrays.size, index_groups(arrays.group)
    check_bad_rows({"sizes": [arrays.bad]}, arrays.has_mask)
    _require(len(size) - count_bad(arrays.bad), index.max() + 1, share, arrays.name)
    rng = np.random.default_rng(seed)
    order = _dealing_order(size, index, rng) + rng.integers(math.ceil(1 / share))
    held = _evenly_chosen(order, share)[index]
    is_held_out = arrays.has_weight.copy()
    is_held_out[arrays.has_weight] = held
    fitted = replace(arrays.only(~held), split={"held_out": float(share), "seed": int(seed)})
    text = f"{arrays.fingerprint}|held out|{share}|{seed}"
    fingerprint = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    return Split(fitted, replace(arrays.only(held), fingerprint=fingerprint), is_held_out)


def _evenly_chosen(order: np.ndarray, share: float) -> np.ndarray:
    """True of this share of the numbers in an order, evenly spread: for 1/5 of each fifth one."""
    return np.asarray(np.floor((order + 1) * share) > np.floor(order * share))


def _require(n_rows: int, n_groups: int, share: float, name: str) -> None:
    """Raises QualityError, with the numbers that would do, for too few rows or groups."""
    rows = math.ceil(MIN_ROWS / (1 - share))
    groups = max(math.ceil(MIN_GROUPS / (1 - share)), math.ceil(MIN_HELD_OUT / share))
    if n_rows < rows or n_groups < groups:
        most = math.floor(100 - 100 * max(MIN_ROWS / n_rows, MIN_GROUPS / n_groups)) / 100
        would_do = share != HELD_OUT and most >= MIN_HELD_OUT / n_groups
        raise QualityError(
            f"{name} has {n_rows} usable rows from {n_groups} groups (prompts), of which "
            f"{share:.0%} are held out; give at least {rows} rows from {groups} groups"
            f"{f', or held_out = {most:g}' if would_do else ''}"
        )
