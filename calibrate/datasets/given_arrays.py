"""Arrays, tensors and lists that a user gives in memory, as arrays of NumPy."""

from typing import Any

import numpy as np

from calibrate.core.tensors import on_cpu
from calibrate.errors import CalibrateError


def numpy_columns(columns: dict[str, Any]) -> dict[str, np.ndarray] | list[dict[str, np.ndarray]]:
    """The arrays of NumPy by name, or a list of such for each n; None is left out.

    Args:
      columns: arrays, tensors or lists, as `calibrate.fit` takes them.
    Raises:
      CalibrateError: no array, or lists of different lengths.
    """
    needed = ("logits", "target")
    given = {name: x for name, x in columns.items() if x is not None or name in needed}
    if _is_ragged(given["logits"]):
        given = _padded(given)
    logits = given["logits"]
    if not (isinstance(logits, list | tuple) and logits and np.ndim(logits[0]) in (2, 3)):
        return {name: _array(value, name) for name, value in given.items()}
    for name, value in given.items():
        if not isinstance(value, list | tuple) or len(value) != len(logits):
            raise CalibrateError(f"{name} is not a list of {len(logits)} arrays, as logits is")
    return [
        {name: _array(value[i], name) for name, value in given.items()} for i in range(len(logits))
    ]


def _is_ragged(logits: Any) -> bool:
    """True if logits are a list of rows whose lengths differ."""
    if not isinstance(logits, list | tuple):
        return False
    try:
        return all(np.ndim(row) == 1 for row in logits) and len(set(map(len, logits))) > 1
    except ValueError:  # of lists that are ragged themselves
        return False


def _padded(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns whose logits are rows of different lengths, in arrays with a mask.

    A mask, and targets that are bool, may be rows of the same lengths.
    """
    rows = [_array(row, "logits") for row in columns["logits"]]
    is_real = np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]
    found = dict(columns)
    for name, absent in (("logits", -np.inf), ("target", False), ("mask", False)):
        if not _is_ragged(columns.get(name)):
            continue
        parts = [_array(row, name) for row in columns[name]]
        if [len(part) for part in parts] != [len(row) for row in rows]:
            raise CalibrateError(f"rows of {name} have other lengths than those of logits")
        values = np.concatenate(parts)
        dtype = np.result_type(values, np.float32) if name == "logits" else values.dtype
        found[name] = np.full(is_real.shape, absent, dtype)
        found[name][is_real] = values
    given = found.get("mask")
    found["mask"] = is_real if given is None else is_real & _array(given, "mask")
    return found


def _array(value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(on_cpu(value))
    except Exception as failure:  # of ragged lists, or of tensors without data
        raise CalibrateError(
            f"{name} is a {type(value).__name__} that NumPy cannot read ({failure}); give an array"
        ) from failure
    is_narrow = array.dtype.kind == "V" and "float" in array.dtype.name  # of JAX, 16 bits or 8
    return array.astype(np.float32) if is_narrow else array
