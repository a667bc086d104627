"""One file of logits, or arrays in its place: read, checked, and rows of it taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from calibrate.datasets.logit_rows import LogitRows, compact_rows, join_rows
from calibrate.datasets.logits_checks import KNOWN, Columns, checked
from calibrate.errors import CalibrateError
from calibrate.storage.npz import pack_arrays, parse_arrays, read_bytes, sha256_of

MAX_FILE_BYTES = 1 << 34  # of one file, which is in memory as a whole

File = Path | LogitRows  # the path is absolute, as other processes know it; or rows in memory
Content = tuple[LogitRows, str, int]  # of a file: rows, its digest, number of finite masks


def content_of_arrays(arrays: Columns, subject: str) -> Content:
    """Arrays, checked, with the digest of the file that numpy.savez would write.

    `subject` begins messages. Raises CalibrateError.
    """
    rows, n_masked = checked(arrays, subject)
    return rows, sha256_of(pack_arrays(arrays)), n_masked


def content_of_file(path: Path) -> Content:
    """The content of a file, checked; CalibrateError if it is no such file."""
    status = path.stat() if path.exists() else None  # a changed file is parsed again
    return _parsed(path, status and (status.st_size, status.st_mtime_ns))


@dataclass(frozen=True, eq=False)
class RowsOfFiles:
    """Rows of one set size, in the order of files; another process can read them."""

    files: Sequence[tuple[File, str, np.ndarray]]  # with the digest of each, and its rows to read
    columns: Mapping[str, np.ndarray]  # the optional ones of all these rows
    size: int
    sets_of_targets: bool  # targets are masks, not positions

    def read(self) -> LogitRows:
        """The rows; CalibrateError if a file has another digest than when it was checked."""
        parts = [
            compact_rows(_unchanged(file, digest), rows, self.size, self.sets_of_targets)
            for file, digest, rows in self.files
        ]
        return replace(join_rows(parts), **self.columns)


def _unchanged(file: File, digest: str) -> LogitRows:
    """The rows of a file that had this digest when it was checked."""
    if isinstance(file, LogitRows):
        return file
    rows, current, _ = content_of_file(file)
    if current != digest:
        raise CalibrateError(f"{file} changed while it was in use; run the command again")
    return rows


WRITE_NPZ = (
    'write logits and target into one: numpy.savez("mine.npz", logits=logits, target=target)'
)
_SAVE_TABLE = 'numpy.savez("mine.npz", target=x.pop("target"), logits=x)'
# Files of other formats, by suffix: what reads one as x, and what writes x.
_CONVERTED_BY = {
    ".csv": ("pandas.read_csv", _SAVE_TABLE),
    ".parquet": ("pandas.read_parquet", _SAVE_TABLE),
    ".safetensors": ("safetensors.numpy.load_file", 'numpy.savez("mine.npz", **x)'),
}
_UNPACKED_BY = {".gz": "gunzip", ".xz": "unxz", ".bz2": "bunzip2", ".zst": "unzstd"}


def _refuse_other_formats(data: bytes, path: Path) -> None:
    """Raises CalibrateError for other formats, and for archives that have to be unpacked first."""
    if path.suffix in _CONVERTED_BY:
        read, save = _CONVERTED_BY[path.suffix]
        raise CalibrateError(
            f"{path} is a {path.suffix} file; convert it, whose arrays or columns are logits and "
            f'target: x = {read}("{path.name}"); {save}'
        )
    if data.startswith(np.lib.format.MAGIC_PREFIX):
        raise CalibrateError(f"{path} holds one array without a name; {WRITE_NPZ}")
    if path.suffix in _UNPACKED_BY:
        raise CalibrateError(
            f"{path} is compressed; unpack it first: {_UNPACKED_BY[path.suffix]} {path}"
        )
    if path.suffix == ".zip":
        raise CalibrateError(
            f"{path} is a zip archive; unpack it first, and give the folder with its .npz files"
        )


@lru_cache(maxsize=1)  # units of work that follow each other are of the same file
def _parsed(path: Path, state: tuple[int, int] | None) -> Content:
    """The rows of a file, checked."""
    data = read_bytes(path, MAX_FILE_BYTES, "split it into several files in a folder")
    _refuse_other_formats(data, path)
    arrays = parse_arrays(data, path)
    if not {"logits", "target"} <= arrays.keys() <= {*KNOWN}:
        raise CalibrateError(
            f"{path} has the arrays {', '.join(arrays) or 'none'}; give logits and target, and if "
            f"need be {', '.join(KNOWN[2:])}"
        )
    rows, n_masked = checked(arrays, f"{path}: ")
    return rows, sha256_of(data), n_masked
