"""npz files: named arrays, written atomically and checked before they are read."""

import errno
import hashlib
import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike

from calibrate.errors import CalibrateError, DamagedError
from calibrate.storage.atomic_io import read_file, write_atomically

MAX_BYTES = 1 << 30  # of a file whose size nothing else bounds, such as weights
_REMEDY = "restore it from a copy, or write it again"


def write_arrays(path: Path, arrays: Mapping[str, ArrayLike]) -> None:
    """Writes arrays as npz, atomically."""
    write_atomically(path, pack_arrays(arrays))


def pack_arrays(arrays: Mapping[str, ArrayLike]) -> bytes:
    """Arrays as the bytes of an npz file; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{k: np.asarray(v) for k, v in arrays.items()})
    return buffer.getvalue()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads every array of an npz file; see `parse_arrays` for what is refused."""
    return parse_arrays(read_bytes(path), path)


def read_bytes(path: Path, most: int = MAX_BYTES, remedy: str = _REMEDY) -> bytes:
    """A file's bytes.

    Args:
      most: how many it may have; a larger file is refused before it is read.
      remedy: for such a file.
    Raises:
      DamagedError: it is too large, or a folder.
      CalibrateError: it is absent, or cannot be read.
    """
    try:
        return read_file(path, most)
    except FileNotFoundError:
        raise CalibrateError(f"{path} does not exist; check the path") from None
    except OSError as failure:
        if failure.errno in (errno.EFBIG, errno.EISDIR):
            raise DamagedError(f"cannot read {path}: {failure.strerror}; {remedy}") from None
        raise CalibrateError(
            f"cannot read {path}: {failure.strerror}; check its permissions and the disk"
        ) from failure


def parse_arrays(data: bytes, path: Path) -> dict[str, np.ndarray]:
    """Every array in the bytes of an npz file, which were read from `path`.

    Nothing is unpickled, CRCs are checked, and an array whose header declares more bytes than its
    entry has is refused before anything is allocated for it: all arrays together take no more
    memory than the file has bytes.

    Raises:
      DamagedError: the bytes are corrupt, compressed, or hold objects.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _refuse_entries(entries, len(data))
            return {_name(entry): _read_entry(archive, entry) for entry in entries}
    except _NotPlain as failure:
        raise DamagedError(f"{path}: {failure}") from None
    except Exception as failure:  # zipfile and NumPy raise many kinds on malformed bytes
        raise DamagedError(f"{path} is not a readable npz file ({failure}); {_REMEDY}") from failure


class _NotPlain(Exception):
    """A whole archive, of another kind than is read: what it is, and the remedy."""


def _name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")


def _refuse_entries(entries: list[zipfile.ZipInfo], most: int) -> None:
    """Raises ValueError for an archive that `pack_arrays` cannot have written."""
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise _NotPlain(
                f"{_name(entry)} is compressed; write the file with numpy.savez, not "
                "numpy.savez_compressed"
            )
        if entry.compress_size != entry.file_size:
            raise ValueError(f"{_name(entry)} has another size than it declares")
        # Nothing is extracted, but a path outside the archive is an attack or another format.
        parts = entry.orig_filename.replace("\\", "/").split("/")
        if "\0" in entry.orig_filename or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"{entry.orig_filename!r} is not a valid array name")
    names = [_name(entry) for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("two arrays have the same name")
    # Entries may overlap: a small file would take much memory.
    total = sum(entry.file_size for entry in entries)
    if total > most:
        raise ValueError(f"its entries declare {total} bytes, and the file has {most}")


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        shape, fortran_order, dtype = _read_header(file)
        if dtype.hasobject:
            raise _NotPlain(
                f"{_name(entry)} is an array of Python objects, which is not read; write an array "
                "of numbers, and rows of different lengths into a file for each length, in a folder"
            )
        expected, size = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if expected != size:
            raise ValueError(f"{entry.filename} declares {expected} bytes and has {size}")
        data = file.read()
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(file)
    if version == (1, 0):
        return npy.read_array_header_1_0(file)
    if version == (2, 0):
        return npy.read_array_header_2_0(file)
    raise ValueError(f"npy version {version} is unknown")


def sha256_of(data: bytes) -> str:
    """sha256 of a file's bytes, as manifests and fingerprints write it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
