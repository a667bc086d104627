"""Logits files: logits that any model made, as arrays on disk.

An npz file, or a folder of them, holds `logits` (rows, n) and `target` (rows,) or (rows, n) bool,
and optionally `mask`, `layer`, `head`, `weight` and `group` (fits/heads-and-arrays.md). A number
of `group` is one group in all files. Files may differ in n, and rows in their number of
real items: those of more than 32 and up to 64 have one set size, the most that any of them has.
Logits more than 9,000 below the highest of their row are masked (calibrate.core.masking), with a
warning of finite ones.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.datasets.logged_rows import Columns, LoggedRows, join_rows
from calibrate.datasets.logits_rows import (
    KNOWN,
    OPTIONAL_COLUMNS,
    checked,
    columns_of_rows,
    compact_rows,
    head_codes,
    real_items,
    size_of_rows,
)
from calibrate.datasets.row_quality import BAD, find_bad
from calibrate.errors import CalibrateError, QualityError
from calibrate.storage.npz import digest_of, pack_arrays, parse_arrays, read_bytes

MAX_FILE_BYTES = 1 << 34  # of one file, which is in memory as a whole


@dataclass(frozen=True, eq=False)
class InMemory:
    """Arrays in place of a file."""

    arrays: Columns
    digest: str  # that of the file that numpy.savez would write
    masks: int

    @classmethod
    def of(cls, arrays: Columns, subject: str = "") -> "InMemory":
        """Checks the arrays; `subject` begins messages. Raises CalibrateError."""
        right, masks = checked(arrays, subject)
        return cls(right, digest_of(pack_arrays(arrays)), masks)


File = Path | InMemory


class Part(NamedTuple):
    """Some rows of one set size, by file and row; another process can read them."""

    files: list[File]  # paths are absolute
    digests: list[str]  # of the files, when they were checked
    place: np.ndarray  # (rows, 2): which file, and which row of it
    size: int
    sets_of_targets: bool

    def read(self) -> LoggedRows:
        """Reads the files; raises CalibrateError if one changed since it was checked."""
        parts = []
        for i in np.unique(self.place[:, 0]):
            file = _opened(self.files[i])
            if file.digest != self.digests[i]:
                raise CalibrateError(
                    f"{self.files[i]} changed while it was in use; run the command again"
                )
            rows = self.place[self.place[:, 0] == i, 1]
            parts.append(compact_rows(file.arrays, rows, self.size, self.sets_of_targets))
        return join_rows(parts)


class Arrays:
    """The rows in files, or in memory, by set size."""

    def __init__(self, path: Path | str, parts: Sequence[InMemory] = ()):
        """Reads and checks every file once.

        Args:
          path: of a file or a folder of files; or, of rows in memory, their name.
          parts: rows in memory.
        Raises:
          CalibrateError: no file, a file with invalid arrays, or no rows.
          QualityError: all rows have weight 0.
        """
        self.shown = self.name = str(path)  # in messages, and of a collection
        self._files = list[File](parts)
        if not parts:
            path = Path(path)
            self.name = (path if path.name not in ("", "..") else path.resolve()).stem
            path = path.absolute()  # as other processes know it
            self._files = [*sorted(path.glob("*.npz"))] if path.is_dir() else [path]
        if not self._files:
            raise CalibrateError(
                f"{path} has no .npz file; give files with arrays logits and target"
            )
        self._digests, masks, of_rows = [], [], []
        kinds, self.sets_of_targets = set(), False  # a mask with one target is its position
        self.has_mask = False
        for number, file in enumerate(map(_opened, self._files)):
            self._digests.append(file.digest)
            masks.append(file.masks)
            kinds.add(tuple(name for name in OPTIONAL_COLUMNS if name in file.arrays))
            target = file.arrays["target"]
            self.has_mask |= "mask" in file.arrays
            self.sets_of_targets |= target.dtype == bool and bool((target.sum(axis=1) != 1).any())
            of_rows.append(_of_rows(number, file.arrays))
        if len(kinds) > 1:
            names = [" and ".join(given) or "none of them" for given in sorted(kinds)]
            raise CalibrateError(
                f"{path}: files have {', or '.join(names)}; give each array in all files or none"
            )
        (given,) = kinds
        both = () if {"layer", "head"}.isdisjoint(given) else ("layer", "head")
        self.columns = [name for name in OPTIONAL_COLUMNS if name in (*given, *both)]
        self.fingerprint = "sha256:" + hashlib.sha256("".join(self._digests).encode()).hexdigest()
        # How rows were chosen among those of the files: part of what determines a collection.
        self.split: dict[str, float | int] = {}
        warn_of_masks(f"{path} has", sum(masks))
        columns = {name: np.concatenate([of[name] for of in of_rows]) for name in of_rows[0]}
        if not len(columns["row"]):
            raise CalibrateError(f"{path} has no rows; give some")
        # (rows,) of all that were given; others are left out
        self.has_weight = columns["weight"] > 0
        self.without_weight = int((~self.has_weight).sum())
        if not self.has_weight.any():
            raise QualityError(f"{path} has no row of any weight; give some")
        columns = {name: column[self.has_weight] for name, column in columns.items()}
        self.bad = {name: int(columns[name].sum()) for name in BAD}  # of all rows: of `only`, too
        self.bad["rows"] = len(columns["row"])
        self._index(columns)

    def _index(self, of_rows: Columns) -> None:
        """Sorts rows by set size and head; takes what is known of each, in the order of files."""
        size = size_of_rows(of_rows["n_real"])
        place = np.stack([of_rows["file"], of_rows["row"]], axis=1)
        self._of_rows, self._size = of_rows, size
        self._place = {int(n): place[size == n] for n in np.unique(size)}
        pairs = np.unique(np.stack([of_rows["layer"], of_rows["head"]], axis=1), axis=0)
        self.heads = [(layer, head) for layer, head in pairs.tolist()]

    @property
    def sizes(self) -> list[int]:
        """Set sizes, lowest first."""
        return list(self._place)

    @property
    def size_and_group(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows,) set size and group of each row, in the order of the files; -1: no group given."""
        return self._size, self._of_rows["group"]

    def columns_of(self, size: int) -> Columns:
        """`weight`, `misranked` and `bad` of the rows of a size, (rows,) each, in file order."""
        of_size = self._size == size
        bad = np.any([self._of_rows[name][of_size] for name in BAD], axis=0)
        columns = {name: self._of_rows[name][of_size] for name in ("weight", "misranked")}
        return {**columns, "bad": bad}

    def head_index(self, size: int) -> np.ndarray:
        """(rows,) the place in `heads` of each row of a size, in the order of the files."""
        of_size = self._size == size
        names, of_rows = np.array(self.heads), [self._of_rows[name] for name in ("layer", "head")]
        code = head_codes(np.stack([x[of_size] for x in of_rows], axis=1))
        return np.searchsorted(head_codes(names), code)

    def count(self, size: int) -> int:
        """The number of rows of that size."""
        return len(self._place[size])

    def rows(self, size: int, first: int, count: int) -> LoggedRows:
        """Rows first .. first + count - 1 of a size, in the order of the files."""
        return self.part(size, first, count).read()

    def part(self, size: int, first: int, count: int) -> Part:
        """Rows first .. first + count - 1 of a size, to be read later."""
        place = self._place[size][first : first + count]
        used, which = np.unique(place[:, 0], return_inverse=True)
        files = [self._files[i] for i in used]
        digests = [self._digests[i] for i in used]
        place = np.stack([which.astype(np.int32), place[:, 1]], axis=1)
        return Part(files, digests, place, size, self.sets_of_targets)

    def only(self, chosen: np.ndarray) -> "Arrays":
        """Some of the rows, by (rows,) bool in the order of the files."""
        some = copy.copy(self)
        some.without_weight = 0
        some._index({name: column[chosen] for name, column in self._of_rows.items()})
        return some


def _of_rows(number: int, arrays: Columns) -> Columns:
    """The columns of the rows of one file, (rows,) each."""
    columns, row = columns_of_rows(arrays), np.arange(len(arrays["target"]), dtype=np.int32)
    real, logits, target = real_items(arrays), arrays["logits"], arrays["target"]
    if target.dtype != bool:
        target = np.arange(logits.shape[1]) == target[:, None]
    ends = [np.max(logits, axis=1, where=x, initial=-np.inf) for x in (real, real & target)]
    bad = dict(zip(BAD, find_bad(*ends), strict=True))
    with np.errstate(invalid="ignore"):  # of rows with NaN
        misranked = ends[0] > ends[1]
    n_real = real.sum(axis=1, dtype=np.int32)
    place = {"file": np.full_like(row, number), "row": row, "n_real": n_real}
    return {**columns, **bad, **place, "misranked": misranked}


def _opened(file: File) -> InMemory:
    if isinstance(file, InMemory):
        return file
    status = file.stat() if file.exists() else None  # a changed file is parsed again
    return _parsed(file, status and (status.st_size, status.st_mtime_ns))


_UNPACKED_BY = {".gz": "gunzip", ".xz": "unxz", ".bz2": "bunzip2", ".zst": "unzstd"}


def _refuse_other_formats(data: bytes, path: Path) -> None:
    """Raises CalibrateError for an .npy file, and for archives that have to be unpacked first."""
    if data.startswith(np.lib.format.MAGIC_PREFIX):
        raise CalibrateError(
            f"{path} holds one array without a name; write logits and target into one file: "
            'numpy.savez("mine.npz", logits=logits, target=target)'
        )
    if path.suffix in _UNPACKED_BY:
        raise CalibrateError(
            f"{path} is compressed; unpack it first: {_UNPACKED_BY[path.suffix]} {path}"
        )
    if path.suffix == ".zip":
        raise CalibrateError(
            f"{path} is a zip archive; unpack it first, and give the folder with its .npz files"
        )


@lru_cache(maxsize=1)  # units of work that follow each other are of the same file
def _parsed(file: Path, state: tuple[int, int] | None) -> InMemory:
    """The arrays of a file, checked."""
    data = read_bytes(file, MAX_FILE_BYTES, "split it into several files in a folder")
    _refuse_other_formats(data, file)
    arrays = parse_arrays(data, file)
    if not {"logits", "target"} <= arrays.keys() <= {*KNOWN}:
        raise CalibrateError(
            f"{file} has the arrays {', '.join(arrays) or 'none'}; give logits and target, and if "
            f"need be {', '.join(KNOWN[2:])}"
        )
    arrays, masks = checked(arrays, f"{file}: ")
    return InMemory(arrays, digest_of(data), masks)
