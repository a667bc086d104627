"""npz files: named arrays, written atomically and read without unpickling."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import ArrayLike

from calibrate.errors import DamagedError
from calibrate.storage.atomic_io import read_bytes, write_atomically


def write_arrays(path: Path, arrays: Mapping[str, ArrayLike]) -> None:
    """Writes arrays as npz, atomically."""
    write_atomically(path, pack_arrays(arrays))


def pack_arrays(arrays: Mapping[str, ArrayLike]) -> bytes:
    """Arrays as the bytes of an npz file; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{k: np.asarray(v) for k, v in arrays.items()})
    return buffer.getvalue()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of an npz file; errors as of `read_bytes` and `parse_arrays`."""
    return parse_arrays(read_bytes(path), path)


def parse_arrays(data: bytes, path: Path) -> dict[str, np.ndarray]:
    """Every array in the bytes of an npz file, which were read from `path`.

    Raises:
      DamagedError: the bytes are corrupt, or hold Python objects, which are not unpickled.
    """
    try:
        with NpzFile(io.BytesIO(data), allow_pickle=False) as archive:
            # A member that is not an array is read as bytes.
            return {name: np.asarray(archive[name]) for name in archive.files}
    except Exception as failure:  # zipfile and NumPy raise many kinds on malformed bytes
        raise DamagedError(
            f"{path} is not a readable npz file ({failure}); restore it from a copy, or write "
            "arrays of numbers with numpy.savez, rows of each length into a file of their own"
        ) from failure
