"""Rows of logits as arrays: what is accepted of them, and how they are sorted into set sizes.

The arrays are those of calibrate/rows/logits_files.py.
"""

from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.maths.masking import as_masks, finite_masks
from calibrate.rows.protocol import check_target, refuse_probabilities

OF_ROWS = ("layer", "head", "weight", "group")  # optional
KNOWN = ("logits", "target", "mask", *OF_ROWS)
MOST_ROUNDED = 1 << 10  # logits up to this are within 3e-5 of themselves in float32
MOST_HEADS = 1 << 15  # layers, and heads of a layer
INDICES = {"layer": MOST_HEADS, "head": MOST_HEADS, "group": 1 << 63}  # each below

Columns = dict[str, np.ndarray]  # arrays by name


class LoggedRows(NamedTuple):
    """Rows of one set size."""

    logits: np.ndarray  # (rows, size) float32, -inf where masked, real items first
    target: np.ndarray  # (rows,) int32, or (rows, size) bool
    layer: np.ndarray  # (rows,) int16, -1 where none is given
    head: np.ndarray
    weight: np.ndarray  # (rows,) float32, 1 where none is given
    group: np.ndarray  # (rows,) int64, -1 where none is given


def checked(arrays: Columns, subject: str) -> tuple[Columns, int]:
    """The arrays with logits in float32, -inf where masked; and how many were finite masks.

    Large ones of more digits are centred before they are rounded: an offset costs no accuracy.

    Args:
      arrays: those of KNOWN, by name.
      subject: what messages begin with, such as "FILE: "; "" for arguments.
    Raises:
      CalibrateError: an array has another shape, dtype or range.
    """
    _check(arrays, subject)
    with np.errstate(over="ignore"):  # beyond float32 becomes -inf, masked, or inf, a bad row
        logits = arrays["logits"].astype(np.float32, copy=False)
    low, logits = finite_masks(logits, arrays.get("mask", True)), as_masks(logits)
    found = {**arrays, "logits": logits}
    real = real_items(found)
    refuse_probabilities(np.where(real, logits, 0), f"{subject}logits have")
    if "mask" in arrays:  # softmax may have been over all items
        refuse_probabilities(np.where(logits == -np.inf, 0, logits), f"{subject}logits have")
    if arrays["logits"].dtype.itemsize > logits.dtype.itemsize:
        found["logits"] = _centred(arrays["logits"], real, logits)
    return found, low


def _centred(logits: np.ndarray, real: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """(rows, n) float32 z - max z of the real items, where rounding first would lose by it.

    Rows that are not finite in float32, or nearly so, stay as they are.
    """
    largest = np.abs(rounded).max(axis=1, where=real, initial=0)
    lossy = (largest > MOST_ROUNDED) & (largest < 1e37)
    if lossy.any():
        at, z = real[lossy], logits[lossy]
        z = z - z.max(axis=1, where=at, initial=-np.inf, keepdims=True)
        rounded = rounded.copy()
        rounded[lossy] = np.where(at, z, rounded[lossy])
    return rounded


def _check(arrays: Columns, subject: str) -> None:
    logits = arrays["logits"]
    if logits.ndim != 2 or not np.issubdtype(logits.dtype, np.floating) or logits.shape[1] < 2:
        raise CalibrateError(
            f"{subject}logits are {logits.dtype}{logits.shape}; give floats (rows, n), n at least 2"
        )
    n_rows, n = logits.shape
    check_target(arrays["target"], n, n_rows, f"{subject}target is")
    mask = arrays.get("mask")
    if mask is not None and (mask.dtype != bool or mask.shape not in (logits.shape, (n,))):
        raise CalibrateError(
            f"{subject}mask is {mask.dtype}{mask.shape}; give bool {logits.shape} or {(n,)}, True "
            "for real items"
        )
    for name, most in INDICES.items():
        index = arrays.get(name)
        if index is None:
            continue
        if index.shape != (n_rows,) or index.dtype.kind not in "iu":
            raise CalibrateError(
                f"{subject}{name} is {index.dtype}{index.shape}; give integers {(n_rows,)}, as "
                "numpy.unique(names, return_inverse=True)[1] makes them"
            )
        outside = index[(index < 0) | (index >= most)]
        if outside.size:
            raise CalibrateError(
                f"{subject}{name} is {outside[0]}; give integers within [0, {most})"
            )
    _check_weight(arrays.get("weight", np.ones(n_rows)), n_rows, subject)


def _check_weight(weight: np.ndarray, n_rows: int, subject: str) -> None:
    if weight.shape != (n_rows,) or not np.issubdtype(weight.dtype, np.floating):
        raise CalibrateError(
            f"{subject}weight is {weight.dtype}{weight.shape}; give floats (rows,)"
        )
    if not ((weight >= 0) & (weight <= np.finfo(np.float32).max)).all():
        raise CalibrateError(
            f"{subject}weight has {weight.min():g} to {weight.max():g}; give finite float32 "
            "numbers >= 0"
        )


def real_items(arrays: Columns) -> np.ndarray:
    """(rows, n) bool: the items that are not masked."""
    return np.asarray((arrays["logits"] != -np.inf) & arrays.get("mask", True))


def columns_of_rows(arrays: Columns) -> list[np.ndarray]:
    """Layer and head (int16), weight (float32) and group (int64) of each row; see LoggedRows."""
    absent = {"layer": -1, "head": -1, "weight": 1, "group": -1}
    none = np.ones(len(arrays["target"]), int)
    types = (np.int16, np.int16, np.float32, np.int64)
    return [
        arrays.get(name, absent[name] * none).astype(dtype)
        for name, dtype in zip(OF_ROWS, types, strict=True)
    ]


def size_of_rows(n_real: np.ndarray) -> np.ndarray:
    """(rows,) int32 set size of each: rows of more than 32 and up to 64 items have one size."""
    octave = np.frexp(np.maximum(n_real, 2) - 1)[1].astype(np.int8)
    size = np.empty(len(n_real), np.int32)
    for o in np.unique(octave):
        size[octave == o] = max(2, n_real[octave == o].max())
    return size


def compact_rows(arrays: Columns, chosen: np.ndarray, size: int, masks: bool) -> LoggedRows:
    """Some rows, their real items moved to the front, in `size` columns.

    Targets are masks if `masks`, else positions.
    """
    logits, target = arrays["logits"][chosen], arrays["target"][chosen]
    real = real_items(arrays)[chosen]
    n = logits.shape[1]
    if masks and target.dtype != bool:
        target = np.arange(n) == target[:, None]
    elif not masks and target.dtype == bool:
        target = target.argmax(axis=1)
    of_row = [column[chosen] for column in columns_of_rows(arrays)]
    if n == size and real.all():
        target = target if target.dtype == bool else target.astype(np.int32)
        return LoggedRows(logits, target, *of_row)
    order = np.argsort(~real, axis=1, kind="stable")[:, :size]
    kept = np.take_along_axis(real, order, axis=1)
    compact = np.full((len(chosen), size), -np.inf, np.float32)
    values = np.take_along_axis(logits, order, axis=1)
    compact[:, : order.shape[1]] = np.where(kept, values, -np.inf)
    if target.dtype == bool:
        moved = np.zeros((len(chosen), size), bool)
        moved[:, : order.shape[1]] = np.take_along_axis(target, order, axis=1) & kept
        return LoggedRows(compact, moved, *of_row)
    at_target = (order == target[:, None]) & kept
    position = at_target.argmax(axis=1).astype(np.int32)
    masked = ~at_target.any(axis=1)
    compact[masked, 0] = -np.inf  # counts as a row with a masked target
    return LoggedRows(compact, position, *of_row)
