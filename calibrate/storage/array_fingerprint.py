"""The fingerprint of a head, which need not be written by hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.storage.model_fingerprint import digest_of_file
from calibrate.storage.npz import pack_arrays, sha256_of


def fingerprint(source: Any) -> str:
    """The digest of what determines a head's logits, for `Head.fingerprint`.

        fingerprint = calibrate.fingerprint({"query": query, "key": key})
        fingerprint = calibrate.fingerprint("weights.npz")

    Args:
      source: the path of a file, of which all bytes count; or arrays and numbers in mappings, lists
        and tuples as deep as you like, of which values, shapes, dtypes and names do.
    Returns:
      "sha256:" and 64 hexadecimal digits.
    Raises:
      CalibrateError: the file cannot be read, or something is neither array nor number.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise CalibrateError(f"{str(path)!r} is not a file; give one, or arrays")
        return f"sha256:{digest_of_file(path)}"
    return sha256_of(pack_arrays(dict(sorted(_leaves(source, "")))))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Every array with its place, such as "layers.0.query"."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}.{i}" if name else str(i))
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biufcV":
            raise CalibrateError(f"{name or 'the value'} is {array.dtype}; give arrays or numbers")
        yield name or "value", array
