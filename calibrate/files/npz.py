"""Named arrays in npz files: written whole, read without trust."""

import hashlib
import io
import math
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike

from calibrate.errors import CalibrateError, DamagedError
from calibrate.files.atomic_io import read_file, write_atomically

MOST_BYTES = 1 << 30  # of a file that says nothing of its size beforehand, such as weights


def write_arrays(path: Path, arrays: Mapping[str, ArrayLike]) -> None:
    """Writes arrays as npz, whole or not at all."""
    write_atomically(path, pack_arrays(arrays))


def pack_arrays(arrays: Mapping[str, ArrayLike]) -> bytes:
    """Arrays as the bytes of an npz file; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{k: np.asarray(v) for k, v in arrays.items()})
    return buffer.getvalue()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads every array of an npz file; see `parse_arrays` for what is refused."""
    return parse_arrays(read_bytes(path), path)


def read_bytes(
    path: Path, most: int = MOST_BYTES, remedy: str = "delete it and make it again"
) -> bytes:
    """A file's bytes.

    Args:
      most: how many it may have; a larger file is refused before it is read.
      remedy: for such a file.
    Raises:
      DamagedError: it is too large, or no regular file.
      CalibrateError: it is absent, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{path} is no regular file; put one in its place")
        data = read_file(path, most) if status.st_size <= most else b""
    except FileNotFoundError:
        raise CalibrateError(f"{path} does not exist; check the path") from None
    except OSError as failure:
        raise CalibrateError(
            f"cannot read {path}: {failure.strerror}; check its permissions and the disk"
        ) from failure
    except MemoryError:
        raise DamagedError(
            f"{path} has {status.st_size:,} bytes, more than the memory takes; {remedy}"
        ) from None
    size = max(status.st_size, len(data))  # it may have grown meanwhile
    if size > most:
        raise DamagedError(f"{path} has {size:,} bytes, and such a file at most {most:,}; {remedy}")
    return data


def parse_arrays(data: bytes, path: Path) -> dict[str, np.ndarray]:
    """Every array in the bytes of an npz file, which were read from `path`.

    Nothing is unpickled, CRCs are checked, and an array whose header promises more bytes than its
    entry holds is refused before anything is allocated for it: all arrays together take no more
    memory than the file has bytes.

    Raises:
      DamagedError: the bytes are corrupt, compressed, or hold objects.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _refuse_entries(entries, len(data))
            return {_name(entry): _read_entry(archive, entry) for entry in entries}
    except Exception as failure:  # whatever zipfile and NumPy come to on bytes that nobody wrote
        raise DamagedError(
            f"{path} is not a readable npz file ({failure}); delete it and make it again"
        ) from failure


def _name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")


def _refuse_entries(entries: list[zipfile.ZipInfo], most: int) -> None:
    """Raises ValueError for a directory of entries that no writer of ours makes."""
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"{entry.filename} is compressed, expected stored")
        # Nothing is extracted. Who asks for a path outside means harm, or wrote something else.
        parts = entry.orig_filename.replace("\\", "/").split("/")
        if "\0" in entry.orig_filename or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"{entry.orig_filename!r} is no name of an array")
    names = [_name(entry) for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("two arrays have one name")
    # Entries may lie over each other: a small file would be read again and again.
    promised = sum(entry.file_size for entry in entries)
    if promised > most:
        raise ValueError(f"its entries promise {promised} bytes, and the file has {most}")


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        shape, fortran_order, dtype = _read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{entry.filename} holds Python objects")
        promised, held = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if promised != held:
            raise ValueError(f"{entry.filename} promises {promised} bytes and holds {held}")
        data = file.read()
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
