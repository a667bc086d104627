"""Checks of arrays of logits: what is accepted, refused and warned of.

The arrays are those of calibrate/datasets/logits_files.py.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import logsumexp

from calibrate.core.masking import as_masks
from calibrate.datasets.logit_rows import OPTIONAL_COLUMNS, LogitRows
from calibrate.errors import CalibrateError

MAX_ROUNDED = 1 << 10  # logits up to this are within 3e-5 of themselves in float32
MANY = 0.1  # share of the rows that are copies of others
FEW = 10  # copies that chance may make
MOSTLY = 0.5  # share of the rows that end in the same score, as padding does
ALMOST_ALL = 0.9  # share of the rows that are probabilities
NEAR_ONE = 0.01  # distance of their sums from 1 in bfloat16

Columns = Mapping[str, np.ndarray]  # arrays by name
KNOWN = ("logits", "target", "mask", *OPTIONAL_COLUMNS)


def checked(arrays: Columns, subject: str) -> tuple[LogitRows, int]:
    """The rows of arrays, with logits as `in_float32` gives them; and how many were finite masks.

    Args:
      arrays: those of KNOWN, by name.
      subject: what messages begin with, such as "FILE: "; "" for arguments.
    Raises:
      CalibrateError: an array has another shape, dtype or range.
    """
    arrays = _in_rows(arrays)
    _check(arrays, subject)
    logits, where = arrays["logits"], arrays.get("mask", np.array(True))
    if logits.dtype.kind in "iu":
        logits = logits.astype(float)
    logits, low = in_float32(logits, where)
    rows = _rows_of_arrays({**arrays, "logits": logits})
    check_no_probabilities(np.where(rows.real_items(), logits, 0), f"{subject}logits have")
    if "mask" in arrays:  # softmax may have been over all items
        check_no_probabilities(np.where(logits == -np.inf, 0, logits), f"{subject}logits have")
    warn_of_probabilities(logits, np.broadcast_to(where, logits.shape), f"{subject}logits have")
    if "mask" not in arrays:
        warn_of_padding(logits, f"{subject}logits have")
    return rows, low


def _rows_of_arrays(arrays: Columns) -> LogitRows:
    """Arrays that were checked, in the shapes and dtypes of the record."""
    dtypes = {name: known.dtype for name, known in OPTIONAL_COLUMNS.items()}
    if arrays["target"].dtype != bool:
        dtypes["target"] = "<i4"
    columns = {x: of.astype(dtypes.get(x, of.dtype), copy=False) for x, of in arrays.items()}
    if "mask" in arrays:
        columns["mask"] = np.broadcast_to(arrays["mask"], arrays["logits"].shape)
    return LogitRows(**columns)


def in_float32(logits: np.ndarray, where: np.ndarray | bool = True) -> tuple[np.ndarray, int]:
    """Logits (rows, n) in float32, -inf where masked; and how many of these were finite.

    Large ones of more digits are centred before they are rounded: an offset costs no accuracy.
    Those beyond float32 become -inf, masked, or inf, a bad row.

    Args:
      logits: of any floating dtype.
      where: bool, broadcastable, True for real items; others are not looked at.
    """
    with np.errstate(over="ignore"):
        rounded = logits.astype(np.float32, copy=False)
    if logits.dtype.itemsize <= rounded.dtype.itemsize:
        return as_masks(rounded, where)
    wide, low = as_masks(np.where(np.isinf(rounded), rounded, logits), where)
    return _centred(wide, where & (wide > -np.inf), wide.astype(np.float32)), low


def _in_rows(arrays: Columns) -> Columns:
    """Logits (heads, rows, n), whose `head` is (heads,), as rows, one head after the other.

    A row of all heads is one group; the other arrays are of each head, or of all.
    """
    logits, head = arrays["logits"], arrays.get("head")
    if logits.ndim != 3 or head is None or head.shape != logits.shape[:1]:
        return arrays
    heads, n_rows, _ = logits.shape
    columns = {"group": np.arange(n_rows), **arrays}
    for name, x in columns.items():
        if name in ("layer", "head") and x.shape == (heads,):
            columns[name] = np.repeat(x, n_rows)
        elif name != "mask" or x.ndim > 1:
            ndim_of_one_head = 2 if x.dtype == bool else 1  # masks (rows, n), other columns (rows,)
            if x.ndim == ndim_of_one_head:  # for all heads
                x = np.broadcast_to(x, (heads, *x.shape))
            columns[name] = x.reshape(-1, *x.shape[2:])
    return columns


def _centred(logits: np.ndarray, real: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """(rows, n) float32 z - max z of the real items, where rounding first would lose by it.

    Rows that are not finite in float32, or nearly so, stay as they are.
    """
    largest = np.abs(rounded).max(axis=1, where=real, initial=0)
    lossy = (largest > MAX_ROUNDED) & (largest < 1e37)
    if lossy.any():
        at, z = real[lossy], logits[lossy]
        z = z - z.max(axis=1, where=at, initial=-np.inf, keepdims=True)
        rounded = rounded.copy()
        rounded[lossy] = np.where(at, z, rounded[lossy])
    return rounded


def _check(arrays: Columns, subject: str) -> None:
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
        wanted = f"give {'integers' if 'i' in kinds else 'floats'} ({n_rows},) within [0, {most:g}]"
        if column.shape != (n_rows,) or column.dtype.kind not in kinds:
            raise CalibrateError(f"{subject}{name} is {column.dtype}{column.shape}; {wanted}")
        widest = column.astype(float) if kinds == "f" else column  # 16 bits do not hold `most`
        if not ((widest >= 0) & (widest <= most)).all():
            raise CalibrateError(
                f"{subject}{name} has {column.min():g} to {column.max():g}; {wanted}"
            )


def check_target(target: Any, size: int, count: int, subject: str) -> None:
    """Raises CalibrateError unless targets are positions in [0, size), or masks of positions.

    `subject` begins the message.
    """
    target = np.asarray(target)
    if target.dtype == bool and target.shape == (count, size):
        return  # rows that mark no item are counted as bad
    if target.shape != (count,) or target.dtype.kind not in "iu":  # NumPy's integers have times
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
    """Raises CalibrateError if almost all rows are >= 0 and sum to 1: softmax was applied already.

    Rows with NaN, and rows of zeros alone, as padding has, do not count. `subject` begins the
    message.
    """
    low = logits.min(axis=1, initial=np.inf)
    maybe, n_known = low >= 0, int(np.sum(~np.isnan(low)))
    with np.errstate(over="ignore"):  # a sum beyond float32 is not 1
        total = logits[maybe].sum(axis=1)
    near = np.abs(total[total != 0] - 1) <= NEAR_ONE
    if near.size and len(total) >= ALMOST_ALL * n_known and near.mean() >= ALMOST_ALL:
        raise CalibrateError(
            f"{subject} rows that are >= 0 and sum to 1, as probabilities do; give the scores "
            "before softmax, or the logarithms of the probabilities"
        )


def warn_of_probabilities(logits: np.ndarray, real: np.ndarray, subject: str) -> None:
    """Warns of numbers that may be probabilities, or the logarithms of some that are 0.

    Args:
      logits: (rows, n), -inf where masked.
      real: (rows, n) bool, the items that no array masks.
      subject: what the warning begins with.
    """
    given = np.where(real, logits, np.nan)
    finite = np.isfinite(given)
    if not finite.any():
        return
    low, high = given.min(where=finite, initial=np.inf), given.max(where=finite, initial=-np.inf)
    if 0 <= low < high <= 1:
        warnings.warn(
            f"{subject} numbers from 0 to 1 alone; if they are probabilities, give the scores "
            "before softmax, or the logarithms of the probabilities",
            stacklevel=3,
        )
    n_zero = int((given == -np.inf).sum())
    if n_zero and high <= NEAR_ONE:  # else no row is log-probabilities
        with np.errstate(invalid="ignore"):  # a row of -inf alone, or with NaN, is neither
            total = logsumexp(np.where(real, logits, -np.inf), axis=1)
        if np.mean(np.abs(total) <= NEAR_ONE) >= ALMOST_ALL:
            warnings.warn(
                f"{subject} log-probabilities, {n_zero:,} of which are -inf: these items count as "
                "masked, and n is the number of the others; clip probabilities above 0 before the "
                "logarithm, or give a mask",
                stacklevel=3,
            )


def row_hashes(rows: LogitRows) -> list[int]:
    """A hash of logits and target of each row, which copies of it share.

    Of rows of any weight with three logits or more, all different: others repeat by chance.
    """
    ordered = np.sort(rows.logits, axis=1)
    with np.errstate(invalid="ignore"):
        different = (np.diff(ordered, axis=1) > 0) | (ordered[:, :-1] == -np.inf)
    chosen = different.all(axis=1) & ((ordered > -np.inf).sum(axis=1) > 2)
    if rows.weight is not None:
        chosen &= rows.weight > 0
    pairs = zip(rows.logits[chosen], rows.target[chosen], strict=True)
    return [hash((logits.tobytes(), target.tobytes())) for logits, target in pairs]


def warn_of_copies(hashes: list[int], subject: str) -> None:
    """Warns if many rows, by their `row_hashes`, repeat others exactly; `subject` begins it."""
    n_copies = len(hashes) - len(set(hashes))
    if n_copies > max(MANY * len(hashes), FEW):
        warnings.warn(
            f"{subject} {n_copies:,} of {len(hashes):,} rows that repeat others exactly, and each "
            "counts as new evidence; leave copies out, or give group=, with one number for a row "
            "and its copies",
            stacklevel=3,
        )


def warn_of_padding(logits: np.ndarray, subject: str) -> None:
    """Warns if most rows end in the same finite score, twice or more, and have others before it.

    `subject` begins the warning.
    """
    if not len(logits):
        return
    last = logits[:, -1]
    ends_alike = np.isfinite(last) & (logits[:, -2] == last) & (logits.max(axis=1) != last)
    values, counts = np.unique(last[ends_alike], return_counts=True)
    if counts.max(initial=0) > MOSTLY * len(logits):
        warnings.warn(
            f"{subject} rows, {counts.max() / len(logits):.0%} of them, that end in equal scores "
            f"({values[counts.argmax()]:g}): padding? give mask=, or -inf there, or these items "
            "count",
            stacklevel=3,
        )
