"""Checks of arrays of logits that a user gives: shapes, types, ranges, and probabilities.

The arrays are described in calibrate/rows/logits_files.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibrate.core.masking import mask_low_logits
from calibrate.errors import CalibrateError
from calibrate.rows.rows import OPTIONAL_COLUMNS, Rows

MAX_ROUNDED = 1 << 10  # float32 represents logits up to this within 3e-5
PROBABILITY_SHARE = 0.9  # of the rows sum to 1 if they are probabilities
SUM_ERROR = 0.01  # of the sum of probabilities in bfloat16

ArraysByName = Mapping[str, np.ndarray]
ARRAY_NAMES = ("logits", "target", "mask", *OPTIONAL_COLUMNS)


def check_arrays_of_rows(arrays: ArraysByName, subject: str) -> tuple[Rows, int]:
    """Checks arrays and converts them to rows.

    Args:
      arrays: by the names of ARRAY_NAMES.
      subject: begins messages, such as "FILE: "; "" for arguments.
    Returns:
      The rows, with logits of `in_float32`; and the number of finite logits that are masked.
    Raises:
      CalibrateError: an array has another shape, dtype or range.
    """
    arrays = _flatten_heads(arrays)
    _check_shapes(arrays, subject)
    logits, where = arrays["logits"], arrays.get("mask", np.array(True))
    if logits.dtype.kind in "iu":
        logits = logits.astype(float)
    logits, low = in_float32(logits, where)
    rows = _rows_of_arrays({**arrays, "logits": logits})
    check_no_probabilities(np.where(rows.real_items(), logits, 0), f"{subject}logits have")
    if "mask" in arrays:  # the softmax may have included masked items
        check_no_probabilities(np.where(logits == -np.inf, 0, logits), f"{subject}logits have")
    return rows, low


def _rows_of_arrays(arrays: ArraysByName) -> Rows:
    """Converts checked arrays to the shapes and dtypes of the record."""
    dtypes = {name: known.dtype for name, known in OPTIONAL_COLUMNS.items()}
    if arrays["target"].dtype != bool:
        dtypes["target"] = "<i4"
    columns = {
        name: array.astype(dtypes.get(name, array.dtype), copy=False)
        for name, array in arrays.items()
    }
    if "mask" in arrays:
        columns["mask"] = np.broadcast_to(arrays["mask"], arrays["logits"].shape)
    return Rows(**columns)


def in_float32(logits: np.ndarray, where: np.ndarray | bool = True) -> tuple[np.ndarray, int]:
    """Converts logits (rows, n) to float32, with -inf where masked.

    Large logits of a wider dtype are centred before they are rounded, so that an offset costs no
    accuracy. Logits beyond float32 become -inf, which is masked, or inf, which makes a bad row.

    Args:
      logits: of any floating dtype.
      where: bool, broadcastable, True for real items; others are ignored.
    Returns:
      The logits, and the number of finite ones that are masked.
    """
    with np.errstate(over="ignore"):
        rounded = logits.astype(np.float32, copy=False)
    if logits.dtype.itemsize <= rounded.dtype.itemsize:
        return mask_low_logits(rounded, where)
    wide, low = mask_low_logits(np.where(np.isinf(rounded), rounded, logits), where)
    return _centred(wide, where & (wide > -np.inf), wide.astype(np.float32)), low


def _flatten_heads(arrays: ArraysByName) -> ArraysByName:
    """Flattens logits (heads, rows, n) with `head` (heads,) to rows, one head after the other.

    The rows of all heads with one index are a group. Other arrays have the axis of heads, or are
    the same for all heads.
    """
    logits, head = arrays["logits"], arrays.get("head")
    if logits.ndim != 3 or head is None or head.shape != logits.shape[:1]:
        return arrays
    heads, n_rows, _ = logits.shape
    columns = {"group": np.arange(n_rows), **arrays}
    for name, array in columns.items():
        if name in ("layer", "head") and array.shape == (heads,):
            columns[name] = np.repeat(array, n_rows)
        elif name != "mask" or array.ndim > 1:
            ndim_of_one_head = 2 if array.dtype == bool else 1  # masks (rows, n), others (rows,)
            if array.ndim == ndim_of_one_head:  # the same for all heads
                array = np.broadcast_to(array, (heads, *array.shape))
            columns[name] = array.reshape(-1, *array.shape[2:])
    return columns


def _centred(logits: np.ndarray, real: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Replaces rows that lose accuracy in float32 by z - max z, rounded after the subtraction.

    Rows with logits near the limit of float32 or beyond stay unchanged.

    Args:
      logits: (rows, n), wider than float32.
      real: (rows, n) bool, True for unmasked items.
      rounded: (rows, n) float32 of the logits.
    """
    largest = np.abs(rounded).max(axis=1, where=real, initial=0)
    lossy = (largest > MAX_ROUNDED) & (largest < 1e37)
    if lossy.any():
        real, z = real[lossy], logits[lossy]
        z = z - z.max(axis=1, where=real, initial=-np.inf, keepdims=True)
        rounded = rounded.copy()
        rounded[lossy] = np.where(real, z, rounded[lossy])
    return rounded


def _check_shapes(arrays: ArraysByName, subject: str) -> None:
    """Raises CalibrateError for an array of another shape, dtype or range."""
    logits = arrays["logits"]
    if logits.ndim != 2 or logits.dtype.kind not in "fiu" or logits.shape[1] < 2:
        raise CalibrateError(
            f"{subject}logits are {logits.dtype}{logits.shape}; give floats (rows, n), n at least "
            "2, or (heads, rows, n) with the number of each head as head (heads,)"
        )
    n_rows, n = logits.shape
    check_target(arrays["target"], n, n_rows, f"{subject}target is")
    mask = arrays.get("mask")
    if mask is not None and (mask.dtype != bool or mask.shape not in (logits.shape, (n,))):
        raise CalibrateError(
            f"{subject}mask is {mask.dtype}{mask.shape}; give bool {logits.shape} or {(n,)}, True "
            "for real items"
        )
    for name in OPTIONAL_COLUMNS.keys() & arrays.keys():
        column, (dtype, most, _) = arrays[name], OPTIONAL_COLUMNS[name]
        kinds = "f" if "f" in dtype else "iu"
        remedy = f"give {'integers' if 'i' in kinds else 'floats'} ({n_rows},) within [0, {most:g}]"
        if column.shape != (n_rows,) or column.dtype.kind not in kinds:
            raise CalibrateError(f"{subject}{name} is {column.dtype}{column.shape}; {remedy}")
        wide = column.astype(float) if kinds == "f" else column  # float16 does not hold `most`
        if not ((wide >= 0) & (wide <= most)).all():
            raise CalibrateError(
                f"{subject}{name} has {column.min():g} to {column.max():g}; {remedy}"
            )


def check_target(target: Any, size: int, count: int, subject: str) -> None:
    """Raises CalibrateError unless targets are positions in [0, size), or masks of positions.

    Args:
      target: (count,) int, or (count, size) bool.
      size: number of items.
      count: number of rows.
      subject: begins the message.
    """
    target = np.asarray(target)
    if target.dtype == bool and target.shape == (count, size):
        return  # rows without a target are counted as bad
    if target.shape != (count,) or target.dtype.kind not in "iu":
        raise CalibrateError(
            f"{subject} {target.dtype}{target.shape}; "
            f"give integers ({count},), or bool {(count, size)}"
        )
    outside = target[(target < 0) | (target >= size)]
    if outside.size:
        raise CalibrateError(
            f"{subject} {outside[0]}, which is not a position in [0, {size}); "
            "give the index of the item that should win"
        )


def check_no_probabilities(logits: np.ndarray, subject: str) -> None:
    """Raises CalibrateError if almost all rows are >= 0 and sum to 1, as after softmax.

    Rows with NaN, and rows of zeros as in padding, do not count. `subject` begins the message.
    """
    low = logits.min(axis=1, initial=np.inf)
    maybe, n_known = low >= 0, int(np.sum(~np.isnan(low)))
    with np.errstate(over="ignore"):  # a sum beyond float32 is not 1
        total = logits[maybe].sum(axis=1)
    near = np.abs(total[total != 0] - 1) <= SUM_ERROR
    if near.size and len(total) >= PROBABILITY_SHARE * n_known and near.mean() >= PROBABILITY_SHARE:
        raise CalibrateError(
            f"{subject} rows that are >= 0 and sum to 1, as probabilities do; give the scores "
            "before softmax, or the logarithms of the probabilities"
        )
