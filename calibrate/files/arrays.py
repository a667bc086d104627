"""Named arrays in npz files: written whole, read without trust."""

import hashlib
import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike

from calibrate.errors import CalibrateError
from calibrate.files.whole import write_whole


def write_arrays(path: Path, arrays: Mapping[str, ArrayLike]) -> bytes:
    """Writes arrays as npz, whole or not at all; the same arrays give the same bytes, returned."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{k: np.asarray(v) for k, v in arrays.items()})
    data = buffer.getvalue()
    write_whole(path, data)
    return data


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads every array of an npz file; see `parse_arrays` for what is refused."""
    return parse_arrays(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """A file's bytes; a file that is absent or cannot be read is a CalibrateError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CalibrateError(f"{path} does not exist; check the path") from None
    except OSError as failure:
        raise CalibrateError(f"cannot read {path}: {failure.strerror}") from failure


def parse_arrays(data: bytes, path: Path) -> dict[str, np.ndarray]:
    """Every array in the bytes of an npz file, which were read from `path`.

    Nothing is unpickled, CRCs are checked, and an array whose header promises more bytes than its
    entry holds is refused before anything is allocated for it.

    Raises:
      CalibrateError: the bytes are corrupt, compressed, or hold objects.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {
                entry.filename.removesuffix(".npy"): _read_entry(archive, entry)
                for entry in archive.infolist()
            }
    except _CORRUPT as failure:
        raise CalibrateError(
            f"{path} is not a readable npz file ({failure}); delete it and make it again"
        ) from failure


# What zipfile and NumPy raise on damaged bytes.
_CORRUPT = (
    ValueError, EOFError, KeyError, SyntaxError, NotImplementedError, RuntimeError,
    OverflowError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed, expected stored")
    with archive.open(entry) as file:
        shape, fortran_order, dtype = _read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{entry.filename} holds Python objects")
        promised = math.prod(shape) * dtype.itemsize
        data = file.read()
    if promised != len(data):
        raise ValueError(f"{entry.filename} promises {promised} bytes and holds {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(file)
    if version == (1, 0):
        return npy.read_array_header_1_0(file)
    if version == (2, 0):
        return npy.read_array_header_2_0(file)
    raise ValueError(f"npy version {version} is not known")


def digest_of(data: bytes) -> str:
    """sha256 of a file's bytes, as manifests and fingerprints write it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
