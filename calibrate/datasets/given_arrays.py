"""Arrays, tensors and lists that a user gives in memory, as arrays of NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from calibrate.core.tensors import MaskedArrayError, on_cpu
from calibrate.errors import CalibrateError


def numpy_columns(columns: dict[str, Any]) -> dict[str, np.ndarray] | list[dict[str, np.ndarray]]:
    """The arrays of NumPy by name, or a list of such for each n; None is left out.

    Args:
      columns: arrays, tensors or lists, as `calibrate.fit` takes them.
    Raises:
      CalibrateError: no array, a masked one, or lists of different lengths.
    """
    needed = ("logits", "target")
    given = {name: x for name, x in columns.items() if x is not None or name in needed}
    if _is_ragged(given["logits"]):
        given = _padded(given)
    logits = given["logits"]
    if not (isinstance(logits, list | tuple) and logits and np.ndim(logits[0]) in (2, 3)):
        group = _numbered([given.pop("group")])[0] if "group" in given else None
        arrays = {name: _array(value, name) for name, value in given.items()}
        return arrays if group is None else {**arrays, "group": group}
    for name, value in given.items():
        if not isinstance(value, list | tuple) or len(value) != len(logits):
            raise CalibrateError(f"{name} is not a list of {len(logits)} arrays, as logits is")
    groups = _numbered(given.pop("group")) if "group" in given else []
    parts = [
        {name: _array(value[i], name) for name, value in given.items()} for i in range(len(logits))
    ]
    return [{**part, "group": groups[i]} if groups else part for i, part in enumerate(parts)]


def _numbered(parts: Sequence[Any]) -> list[np.ndarray]:
    """Groups of each part as integers >= 0: as given, or else numbers of any hashable values.

    Raises:
      CalibrateError: a value is NaN, None or no hashable one.
    """
    arrays = [_group_values(part) for part in parts]
    if all(x.dtype.kind in "iu" and (x >= 0).all() for x in arrays):
        return arrays
    numbers: dict[Any, int] = {}
    for array in arrays:
        for value in array.ravel().tolist():
            try:
                is_missing = value is None or bool(value != value)  # NaN, NaT
                numbers.setdefault(value, len(numbers))
            except TypeError:  # pandas.NA has no truth, and a list no hash
                is_missing = True
            if is_missing:
                raise CalibrateError(
                    f"group has the value {value!r}; give each row the value of its group, or "
                    "leave group= out"
                )
    return [
        np.array([numbers[value] for value in x.ravel().tolist()], int).reshape(x.shape)
        for x in arrays
    ]


def _group_values(group: Any) -> np.ndarray:
    """Values of groups as an array; a tuple in a list is one value."""
    if isinstance(group, list | tuple) and any(isinstance(value, tuple) for value in group):
        values = np.empty(len(group), object)
        values[:] = group
        return values
    return _array(group, "group")


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
    lengths = np.array([len(row) for row in rows])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    found = dict(columns)
    for name, absent in (("logits", -np.inf), ("target", False), ("mask", False)):
        if not _is_ragged(columns.get(name)):
            continue
        parts = [_array(row, name) for row in columns[name]]
        if [len(part) for part in parts] != lengths.tolist():
            raise CalibrateError(f"rows of {name} have other lengths than those of logits")
        values = np.concatenate(parts)
        dtype = np.result_type(values, np.float32) if name == "logits" else values.dtype
        found[name] = np.full(is_real.shape, absent, dtype)
        found[name][is_real] = values
    _check_positions(_array(found["target"], "target"), lengths)
    given = found.get("mask")
    found["mask"] = is_real if given is None else is_real & _array(given, "mask")
    return found


def _check_positions(target: np.ndarray, lengths: np.ndarray) -> None:
    """Raises CalibrateError for a position beyond the end of its row; (rows,) each."""
    if target.shape != lengths.shape or target.dtype.kind not in "iu":
        return  # what else it is, is checked with the other arrays
    beyond = np.flatnonzero(target >= lengths)
    if beyond.size:
        row = int(beyond[0])
        raise CalibrateError(
            f"target of row {row} is {target[row]}, and the row has {lengths[row]} logits; give "
            "the position in the row, from 0"
        )


def _array(value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(on_cpu(value, name))
    except MaskedArrayError as failure:
        raise CalibrateError(str(failure)) from None
    except Exception as failure:  # of ragged lists, or of tensors without data
        raise CalibrateError(
            f"{name} is a {type(value).__name__} that NumPy cannot read ({failure}); give an array"
        ) from failure
    if array.dtype == object and array.ndim and name != "group":
        raise CalibrateError(
            f"{name} is a {type(value).__name__} of Python objects; convert it to numbers: "
            "table.to_numpy(float, na_value=numpy.nan) of nullable or Arrow columns, "
            "table.to_numpy(int) of positions, list(column) of a column of lists"
        )
    is_narrow = array.dtype.kind == "V" and "float" in array.dtype.name  # of JAX, 16 bits or 8
    return array.astype(np.float32) if is_narrow else array
