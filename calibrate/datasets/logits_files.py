"""Logits files: logits that any model made, as arrays on disk.

An npz file, or a folder of them, holds `logits` (rows, n) and `target` (rows,) or (rows, n) bool,
and optionally `mask`, `layer`, `head`, `weight` and `group` (fits/heads-and-arrays.md). A number
of `group` is one group in all files. Files may differ in n, and rows in their number of
real items: those of more than 32 and up to 64 have one set size, the most that any of them has.
Logits more than 9,000 below the highest of their row are masked (calibrate.core.masking), with a
warning of finite ones.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.datasets.logit_rows import MAX_HEADS, OPTIONAL_COLUMNS, LogitRows
from calibrate.datasets.logits_checks import Columns, row_hashes, warn_of_copies
from calibrate.datasets.read_logits_file import (
    WRITE_NPZ,
    Content,
    File,
    RowsOfFiles,
    content_of_arrays,
    content_of_file,
)
from calibrate.datasets.row_quality import BAD, UnusableRowsError, find_bad
from calibrate.errors import CalibrateError

_COLUMNS = ("file", "row", "n_items", "misranked", "bad_reason", *OPTIONAL_COLUMNS)


@dataclass(frozen=True, eq=False)
class Arrays:
    """The rows of files, or of arrays in memory, by set size; logits stay where they are.

    Columns are (rows,), in the order of the files, without the rows of weight 0.
    """

    name: str  # of a collection
    shown: str  # in messages
    files: tuple[tuple[File, str], ...]  # with their digests when they were checked
    fingerprint: str
    columns: tuple[str, ...]  # those of OPTIONAL_COLUMNS that the rows name
    sets_of_targets: bool  # several items of a row may win; a mask with one target is its position
    has_mask: bool
    has_weight: np.ndarray  # (rows that were given,) bool
    without_weight: int  # number of rows that are left out
    bad: Mapping[str, int]  # counts of BAD and `rows`: those of all rows, after `only` too
    # How the rows were chosen among those of the files: part of what determines a collection.
    file: np.ndarray  # its number
    row: np.ndarray  # in the file
    n_items: np.ndarray  # that are not masked
    misranked: np.ndarray  # bool
    bad_reason: np.ndarray  # its place in BAD, from 1; 0: the row is not bad
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
          CalibrateError: no file, a file with invalid arrays, or no rows.
          QualityError: all rows have weight 0.
        """
        path = Path(path)
        absolute = path.absolute()
        files = sorted(absolute.glob("[!.]*.npz")) if absolute.is_dir() else [absolute]
        if not files:
            raise CalibrateError(f"{absolute} has no .npz file; {WRITE_NPZ}")
        arrays = _arrays(str(absolute), files, map(content_of_file, files))
        name = (path if path.name not in ("", "..") else path.resolve()).stem
        return replace(arrays, name=name, shown=str(path))

    @classmethod
    def in_memory(cls, name: str, arrays: Columns | Sequence[Columns]) -> "Arrays":
        """Checks arrays, those of a file, or of several that differ in n; see `read`."""
        if isinstance(arrays, Mapping):
            contents = [content_of_arrays(arrays, "")]
        else:
            contents = [content_of_arrays(of, f"part {i}: ") for i, of in enumerate(arrays)]
        return _arrays(name, [rows for rows, *_ in contents], contents)

    @cached_property
    def size(self) -> np.ndarray:
        """(rows,) int32 set size of each row."""
        return size_of_rows(self.n_items)

    @cached_property
    def sizes(self) -> list[int]:
        """Set sizes, lowest first."""
        sizes: list[int] = np.unique(self.size).tolist()
        return sizes

    @property
    def _head_code(self) -> np.ndarray:
        """(rows,) one number for each (layer, head), in the same order."""
        return np.asarray(self.layer * np.int64(MAX_HEADS + 1) + self.head + 1)

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The distinct (layer, head), in order."""
        layer, head = np.divmod(np.unique(self._head_code), MAX_HEADS + 1)
        return list(zip(layer.tolist(), (head - 1).tolist(), strict=True))

    @cached_property
    def head_number(self) -> np.ndarray:
        """(rows,) place in `heads` of each row."""
        code = self._head_code
        return np.searchsorted(np.unique(code), code)

    @cached_property
    def _of_size(self) -> dict[int, np.ndarray]:
        return {size: np.flatnonzero(self.size == size) for size in self.sizes}

    def count(self, size: int) -> int:
        """The number of rows of that size."""
        return len(self._of_size[size])

    def places(self, size: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """Places among all rows of rows first .. first + count - 1 of a size; None: of the rest."""
        return self._of_size[size][first : None if count is None else first + count]

    def rows(self, size: int, first: int, count: int) -> LogitRows:
        """Rows first .. first + count - 1 of a size, in the order of the files."""
        return self.of_files(size, first, count).read()

    def of_files(self, size: int, first: int, count: int) -> RowsOfFiles:
        """Where rows first .. first + count - 1 of a size are read from."""
        places = self.places(size, first, count)
        file, row = self.file[places], self.row[places]
        files = [(*self.files[i], row[file == i]) for i in np.unique(file)]
        columns = {name: getattr(self, name)[places] for name in self.columns}
        return RowsOfFiles(files, columns, size, self.sets_of_targets)

    def only(self, chosen: np.ndarray) -> "Arrays":
        """Some of the rows, by (rows,) bool in the order of the files."""
        some: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        return replace(self, without_weight=0, **some)


def _arrays(subject: str, files: Sequence[File], contents: Iterable[Content]) -> Arrays:
    """The record of files, whose contents are looked at one after the other.

    Args:
      subject: what messages begin with.
    """
    digests, hashes = list[str](), list[int]()
    of_files = list[dict[str, np.ndarray]]()
    given = set[tuple[str, ...]]()
    n_masked = 0
    several = False
    has_mask = False
    for number, (rows, digest, n_masked_in_file) in enumerate(contents):
        digests.append(digest)
        hashes += row_hashes(rows)
        n_masked += n_masked_in_file
        given.add(tuple(name for name in OPTIONAL_COLUMNS if getattr(rows, name) is not None))
        several |= rows.target.dtype == bool and bool((rows.target.sum(axis=1) != 1).any())
        has_mask |= rows.mask is not None
        of_files.append(_columns_of_file(number, rows))
    columns = _optional_columns(given, subject)
    warn_of_masks(f"{subject} has", n_masked)
    if "group" not in columns:
        warn_of_copies(hashes, f"{subject} has")
    of_rows, has_weight = _rows_with_weight(of_files, subject)
    bad = np.bincount(of_rows["bad_reason"], minlength=1 + len(BAD))[1:]
    return Arrays(
        name=subject,
        shown=subject,
        files=tuple(zip(files, digests, strict=True)),
        fingerprint="sha256:" + hashlib.sha256("".join(digests).encode()).hexdigest(),
        columns=columns,
        sets_of_targets=several,
        has_mask=has_mask,
        has_weight=has_weight,
        without_weight=int((~has_weight).sum()),
        bad={**dict(zip(BAD, bad.tolist(), strict=True)), "rows": len(of_rows["row"])},
        **of_rows,
    )


def _rows_with_weight(
    of_files: Sequence[dict[str, np.ndarray]], subject: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The columns of the rows of files that have a weight; and (rows,) bool, which rows have one.

    Raises:
      CalibrateError: there is no row.
      UnusableRowsError: no row has a weight.
    """
    of_rows = {name: np.concatenate([of[name] for of in of_files]) for name in _COLUMNS}
    if not len(of_rows["row"]):
        raise CalibrateError(f"{subject} has no rows; give some")
    has_weight = of_rows["weight"] > 0
    if not has_weight.any():
        raise UnusableRowsError(f"{subject} has no row of any weight; give some")
    return {name: column[has_weight] for name, column in of_rows.items()}, has_weight


def _optional_columns(given: set[tuple[str, ...]], subject: str) -> tuple[str, ...]:
    """The optional columns of rows whose files have these; CalibrateError if they differ."""
    if len(given) > 1:
        names = [" and ".join(columns) or "none of them" for columns in sorted(given)]
        raise CalibrateError(
            f"{subject}: files have {', or '.join(names)}; give each array in all files or none"
        )
    (columns,) = given
    both = () if {"layer", "head"}.isdisjoint(columns) else ("layer", "head")
    return tuple(name for name in OPTIONAL_COLUMNS if name in (*columns, *both))


def _columns_of_file(number: int, rows: LogitRows) -> dict[str, np.ndarray]:
    """The columns of Arrays of the rows of one file."""
    row = np.arange(len(rows.target), dtype=np.int32)
    real, logits, target = rows.real_items(), rows.logits, rows.target
    if target.dtype != bool:
        target = np.arange(logits.shape[1]) == target[:, None]
    ends = [np.max(logits, axis=1, where=x, initial=-np.inf) for x in (real, real & target)]
    with np.errstate(invalid="ignore"):  # of rows with NaN
        misranked = ends[0] > ends[1]
    columns = {
        "file": np.full_like(row, number),
        "row": row,
        "n_items": real.sum(axis=1, dtype=np.int32),
        "misranked": misranked,
        "bad_reason": np.select(find_bad(*ends), range(1, 1 + len(BAD))).astype(np.int8),
    }
    for name, known in OPTIONAL_COLUMNS.items():
        column = getattr(rows, name)
        columns[name] = np.full(len(row), known.absent, known.dtype) if column is None else column
    return columns


def size_of_rows(n_items: np.ndarray) -> np.ndarray:
    """(rows,) int32 set size of each: rows of more than 32 and up to 64 items have one size."""
    octave = np.frexp(np.maximum(n_items, 2) - 1)[1].astype(np.int8)
    size = np.empty(len(n_items), np.int32)
    for o in np.unique(octave):
        size[octave == o] = max(2, n_items[octave == o].max())
    return size
