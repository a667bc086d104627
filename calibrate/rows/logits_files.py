"""Logits of any model: arrays in memory or npz files, checked once, and read by set size.

An npz file, or a folder of them, has `logits` (rows, n) and `target` (rows,) or (rows, n) bool,
and optionally `mask`, `layer`, `head`, `weight` and `group` (calibrate/guides/arrays.md). A number
in `group` is the same group in all files. Files may differ in n, and rows in their number of
unmasked items: rows with more than 32 and up to 64 items have one set size, which is the most that
any of them has. Logits more than 9,000 below the highest of their row are masked
(calibrate.core.masking), with a warning if they are finite.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.errors import CalibrateError
from calibrate.rows.logits_checks import (
    ARRAY_NAMES,
    ArraysByName,
    check_arrays_of_rows,
)
from calibrate.rows.rows import (
    BAD,
    MAX_HEAD_INDEX,
    OPTIONAL_COLUMNS,
    Rows,
    UnusableRowsError,
    compact_rows,
    find_bad,
    join_rows,
)
from calibrate.storage.atomic_io import read_bytes
from calibrate.storage.fingerprints import sha256_of
from calibrate.storage.npz import pack_arrays, parse_arrays

MAX_FILE_BYTES = 1 << 34  # of a file, which is read into memory as a whole
_COLUMNS = ("file", "row", "n_items", "misranked", "bad_reason", *OPTIONAL_COLUMNS)
_N_CODES = MAX_HEAD_INDEX + 2  # of a head in its layer, from -1

RowsOrPath = Path | Rows  # rows in memory; or an absolute path, which other processes can read


class CheckedFile(NamedTuple):
    """The content of a file, checked."""

    rows: Rows
    digest: str
    n_masked: int  # finite logits that count as masked


@dataclass(frozen=True, eq=False)
class RowsOfFiles:
    """Rows of one set size, in the order of files; other processes can read them."""

    files: Sequence[tuple[RowsOrPath, np.ndarray]]  # file, and the rows to read
    columns: Mapping[str, np.ndarray]  # the optional columns of all these rows
    size: int
    sets_of_targets: bool  # targets are masks, not positions

    def read(self) -> Rows:
        """Reads the rows."""
        parts = [
            compact_rows(
                file if isinstance(file, Rows) else _check_file(file).rows,
                rows,
                self.size,
                self.sets_of_targets,
            )
            for file, rows in self.files
        ]
        return replace(join_rows(parts), **self.columns)


@dataclass(frozen=True, eq=False, repr=False)
class Arrays:
    """The rows of files, or of arrays in memory, by set size.

    Logits are not copied: they stay in their files. Columns are (rows,), in the order of the files,
    without rows of weight 0.
    """

    name: str  # of a collection
    shown: str  # in messages
    files: Sequence[RowsOrPath]
    fingerprint: str
    columns: tuple[str, ...]  # names in OPTIONAL_COLUMNS that the files have
    sets_of_targets: bool  # some row has several targets
    without_weight: int  # number of rows of weight 0
    bad: Mapping[str, int]  # counts of BAD, and of all rows
    file: np.ndarray  # number of the file
    row: np.ndarray  # in the file
    n_items: np.ndarray  # unmasked items
    misranked: np.ndarray  # bool
    bad_reason: np.ndarray  # 1 + position in BAD; 0: the row is good
    layer: np.ndarray  # -1 if unknown
    head: np.ndarray
    weight: np.ndarray
    group: np.ndarray  # -1 if unknown

    @classmethod
    def read(cls, path: Path | str) -> "Arrays":
        """Reads and checks every file once.

        Args:
          path: of a file or a folder of files.
        Raises:
          CalibrateError: there is no file, a file has invalid arrays, or there are no rows.
          QualityError: all rows have weight 0.
        """
        path = Path(path)
        absolute = path.absolute()
        files = sorted(absolute.glob("[!.]*.npz")) if absolute.is_dir() else [absolute]
        if not files:
            raise CalibrateError(
                f"{absolute} has no .npz file; write logits and target into one: "
                'numpy.savez("mine.npz", logits=logits, target=target)'
            )
        arrays = _record_files(str(absolute), files, map(_check_file, files))
        name = (path if path.name not in ("", "..") else path.resolve()).stem
        return replace(arrays, name=name, shown=str(path))

    @classmethod
    def in_memory(cls, name: str, arrays: ArraysByName | Sequence[ArraysByName]) -> "Arrays":
        """Checks arrays as of one file, or as of several that differ in n; see `read`."""
        if isinstance(arrays, Mapping):
            files = [_check_in_memory(arrays, "")]
        else:
            files = [_check_in_memory(part, f"part {i}: ") for i, part in enumerate(arrays)]
        return _record_files(name, [file.rows for file in files], files)

    def __repr__(self) -> str:
        """The source, and the numbers of rows and of heads."""
        sizes = ", ".join(f"n = {size:,}: {self.count(size):,}" for size in self.sizes)
        return (
            f"Arrays of {self.shown}\n{len(self.size):,} rows of {len(self.heads):,} heads, {sizes}"
        )

    @cached_property
    def size(self) -> np.ndarray:
        """(rows,) int32 set size of each row."""
        return set_sizes(self.n_items)

    @cached_property
    def sizes(self) -> list[int]:
        """Set sizes, lowest first."""
        sizes: list[int] = np.unique(self.size).tolist()
        return sizes

    @cached_property
    def _heads(self) -> tuple[np.ndarray, np.ndarray]:
        """A number for each distinct (layer, head), in order; and the position of each row's."""
        code = self.layer * np.int64(_N_CODES) + self.head + 1
        return np.unique(code, return_inverse=True)

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The distinct (layer, head), in order."""
        layer, head = np.divmod(self._heads[0], _N_CODES)
        return list(zip(layer.tolist(), (head - 1).tolist(), strict=True))

    @property
    def head_number(self) -> np.ndarray:
        """(rows,) position of each row's head in `heads`."""
        return self._heads[1]

    @cached_property
    def _places_by_size(self) -> dict[int, np.ndarray]:
        return {size: np.flatnonzero(self.size == size) for size in self.sizes}

    def count(self, size: int) -> int:
        """The number of rows of a size."""
        return len(self._places_by_size[size])

    def places(self, size: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """Positions, among all rows, of rows first .. first + count - 1 of a size; None: all."""
        return self._places_by_size[size][first : None if count is None else first + count]

    def rows(self, size: int, first: int, count: int) -> Rows:
        """Reads rows first .. first + count - 1 of a size, in the order of the files."""
        return self.locate_rows(size, first, count).read()

    def locate_rows(self, size: int, first: int, count: int) -> RowsOfFiles:
        """Locates rows first .. first + count - 1 of a size in the files."""
        places = self.places(size, first, count)
        file, row = self.file[places], self.row[places]
        files = [(self.files[i], row[file == i]) for i in np.unique(file)]
        columns = {name: getattr(self, name)[places] for name in self.columns}
        return RowsOfFiles(files, columns, size, self.sets_of_targets)


def _record_files(
    subject: str, files: Sequence[RowsOrPath], checked: Iterable[CheckedFile]
) -> Arrays:
    """The record of files, which are checked one after the other.

    Args:
      subject: begins messages.
      files: paths, or rows in memory.
      checked: the content of each; an iterator keeps one of them in memory.
    """
    digests, tables = list[str](), list[dict[str, np.ndarray]]()
    optional = set[tuple[str, ...]]()
    n_masked, several = 0, False
    for number, (rows, digest, n_masked_in_file) in enumerate(checked):
        digests.append(digest)
        n_masked += n_masked_in_file
        optional.add(tuple(name for name in OPTIONAL_COLUMNS if getattr(rows, name) is not None))
        several |= rows.target.dtype == bool and bool((rows.target.sum(axis=1) != 1).any())
        tables.append(_file_table(number, rows))
    columns = _common_columns(optional, subject)
    warn_of_masks(f"{subject} has", n_masked)
    table, without_weight = _join_tables(tables, subject)
    bad = np.bincount(table["bad_reason"], minlength=1 + len(BAD))[1:]
    return Arrays(
        name=subject,
        shown=subject,
        files=files,
        fingerprint="sha256:" + hashlib.sha256("".join(digests).encode()).hexdigest(),
        columns=columns,
        sets_of_targets=several,
        without_weight=without_weight,
        bad={**dict(zip(BAD, bad.tolist(), strict=True)), "rows": len(table["row"])},
        **table,
    )


def _join_tables(
    tables: Sequence[dict[str, np.ndarray]], subject: str
) -> tuple[dict[str, np.ndarray], int]:
    """The columns of all rows that have a weight, and the number of the others.

    Raises:
      CalibrateError: there is no row.
      UnusableRowsError: no row has a weight.
    """
    joined = {name: np.concatenate([table[name] for table in tables]) for name in _COLUMNS}
    if not len(joined["row"]):
        raise CalibrateError(f"{subject} has no rows; give some")
    has_weight = joined["weight"] > 0
    if not has_weight.any():
        raise UnusableRowsError(f"{subject} has no row of any weight; give some")
    weighed = {name: column[has_weight] for name, column in joined.items()}
    return weighed, int((~has_weight).sum())


def _common_columns(optional: set[tuple[str, ...]], subject: str) -> tuple[str, ...]:
    """The optional columns of rows, from those of each file; CalibrateError if files differ."""
    if len(optional) > 1:
        names = [" and ".join(columns) or "none of them" for columns in sorted(optional)]
        raise CalibrateError(
            f"{subject}: files have {', or '.join(names)}; give each array in all files or none"
        )
    (columns,) = optional
    both = () if {"layer", "head"}.isdisjoint(columns) else ("layer", "head")
    return tuple(name for name in OPTIONAL_COLUMNS if name in (*columns, *both))


def _file_table(number: int, rows: Rows) -> dict[str, np.ndarray]:
    """The columns of Arrays for the rows of one file."""
    row = np.arange(len(rows.target), dtype=np.int32)
    real, logits, target = rows.real_items(), rows.logits, rows.target
    if target.dtype != bool:
        target = np.arange(logits.shape[1]) == target[:, None]
    highest = np.max(logits, axis=1, where=real, initial=-np.inf)
    of_target = np.max(logits, axis=1, where=real & target, initial=-np.inf)
    with np.errstate(invalid="ignore"):  # rows with NaN
        misranked = highest > of_target
    bad = find_bad(highest, of_target)
    columns = {
        "file": np.full_like(row, number),
        "row": row,
        "n_items": real.sum(axis=1, dtype=np.int32),
        "misranked": misranked,
        "bad_reason": np.select(bad, range(1, 1 + len(BAD))).astype(np.int8),
    }
    for name, known in OPTIONAL_COLUMNS.items():
        column = getattr(rows, name)
        columns[name] = np.full(len(row), known.absent, known.dtype) if column is None else column
    return columns


def set_sizes(n_items: np.ndarray) -> np.ndarray:
    """(rows,) int32 set size of each row: the most items of a row in its octave, such as 33-64."""
    octave = np.frexp(np.maximum(n_items, 2) - 1)[1].astype(np.int8)
    size = np.empty(len(n_items), np.int32)
    for o in np.unique(octave):
        size[octave == o] = max(2, n_items[octave == o].max())
    return size


def _check_in_memory(arrays: ArraysByName, subject: str) -> CheckedFile:
    """Checks arrays; their digest is that of the file that numpy.savez would write."""
    rows, n_masked = check_arrays_of_rows(arrays, subject)
    return CheckedFile(rows, sha256_of(pack_arrays(arrays)), n_masked)


def _check_file(path: Path) -> CheckedFile:
    """Reads and checks a file; CalibrateError if its content is invalid."""
    status = path.stat() if path.exists() else None
    return _parse_file(path, status and (status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1)  # consecutive units of work read the same file
def _parse_file(path: Path, state: tuple[int, int] | None) -> CheckedFile:
    """Reads and checks a file; `state` differs if the file has changed."""
    data = read_bytes(path, MAX_FILE_BYTES)
    arrays = parse_arrays(data, path)
    if not {"logits", "target"} <= arrays.keys() <= {*ARRAY_NAMES}:
        raise CalibrateError(
            f"{path} has the arrays {', '.join(arrays) or 'none'}; give logits and target, and "
            f"optionally {', '.join(ARRAY_NAMES[2:])}"
        )
    rows, n_masked = check_arrays_of_rows(arrays, f"{path}: ")
    return CheckedFile(rows, sha256_of(data), n_masked)
