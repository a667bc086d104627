"""Files of weights in the format safetensors, copied tensor by tensor.

A file is the length of its header (8 bytes, little-endian), the header (JSON: the dtype, shape and
place of each tensor), and the tensors. The package safetensors checks files; it does not say where
a tensor lies, so that the header is read here once more. A copy in which no dtype or shape changes
has the same header: unchanged tensors stay as they are, byte for byte, and take no memory.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from calibrate.errors import CalibrateError, CoefficientsError, DamagedError
from calibrate.storage.strict_json import parse

FLOATS: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_COPIED_BYTES = 1 << 24

TensorChange = Callable[[np.ndarray], np.ndarray]


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    dtype: str  # "F32"
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name, in the order of their bytes.

    Raises:
      DamagedError: it is not such a file, or is cut short.
    """
    try:
        with open(path, "rb") as file, safe_open(path, "np"):  # it checks the header
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse(file.read(length))
    except (SafetensorError, CoefficientsError) as failure:
        raise DamagedError(
            f"{path} is not a whole file of safetensors ({failure}); fetch it again"
        ) from failure
    tensors = {}
    for name, fields in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in fields["data_offsets"])
            tensors[name] = StoredTensor(fields["dtype"], tuple(fields["shape"]), begin, end)
    return dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))


def read_tensor(path: Path, name: str) -> np.ndarray:
    """A tensor of floats of a file, in its own dtype; DamagedError if the file is not whole."""
    tensor = read_header(path)[name]
    with open(path, "rb") as file:
        file.seek(tensor.begin)
        data = file.read(tensor.end - tensor.begin)
    return np.frombuffer(data, FLOATS[tensor.dtype]).reshape(tensor.shape)


def copy_changed(source: Path, target: Path, changes: Mapping[str, TensorChange]) -> str:
    """Copies a file to a new one, which is fsynced, and changes some of its tensors.

    Args:
      source: the file to copy.
      target: the new file.
      changes: functions of the tensors to change, by name; results are rounded to their own dtype.
    Returns:
      sha256 of the copy, in hexadecimal digits.
    Raises:
      CalibrateError: the source is damaged, or a number is beyond its dtype.
    """
    digest = hashlib.sha256()
    with open(target, "xb") as copy:
        for piece in _pieces(source, changes):
            copy.write(piece)
            digest.update(piece)
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()


def _pieces(source: Path, changes: Mapping[str, TensorChange]) -> Iterator[bytes]:
    """The bytes of the copy, in order."""
    header = read_header(source)
    with open(source, "rb") as file:
        for name in filter(changes.__contains__, header):
            tensor = header[name]
            yield from _chunks(file, tensor.begin - file.tell())
            data = file.read(tensor.end - tensor.begin)
            if (changed := _changed(data, tensor, changes[name])) is None:
                raise CalibrateError(
                    f"{name} in {source} becomes larger than {tensor.dtype} holds; give the "
                    "model in bfloat16 or float32"
                )
            yield changed
        yield from _chunks(file, source.stat().st_size - file.tell())


def _chunks(file: Any, n_bytes: int) -> Iterator[bytes]:
    while n_bytes and (chunk := file.read(min(n_bytes, _COPIED_BYTES))):
        yield chunk
        n_bytes -= len(chunk)


def _changed(data: bytes, tensor: StoredTensor, change: TensorChange) -> bytes | None:
    """The bytes of a changed tensor; None if finite values are beyond its dtype."""
    original = np.frombuffer(data, FLOATS[tensor.dtype]).reshape(tensor.shape)
    with np.errstate(over="ignore"):
        changed = change(original).astype(original.dtype)
    is_kept = (np.isfinite(changed) | ~np.isfinite(original)).all()
    return changed.tobytes() if is_kept else None
