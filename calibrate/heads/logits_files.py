"""Logits files: logits that any model made, as arrays on disk.

An npz file, or a folder of them, holds `logits` (rows, n), the scores before softmax; `target`
(rows,), the position that should win, or (rows, n) bool where any of several may; and, if need be,
`mask` (rows, n) or (n,), True for real items; `layer` and `head` (rows,), the head of each row;
`weight` (rows,), the weight of a row among those of its size, 1 if absent; and `group` (rows,), the
number of the prompt, or of whatever makes rows dependent, that a row comes from: each from one of
its own if absent. A number is one group in all files. Files may differ in n, and rows in their
number of real items. Logits of -9,000 and less are masked (calibrate.maths.masking), with a warning
of those that are finite.

Rows are sorted into set sizes by the number of their real items: those of more than 32 and up to 64
have one size, the most that any of them has.
"""

import hashlib
import warnings
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.files.npz import digest_of, parse_arrays, read_bytes
from calibrate.heads.protocol import check_target, refuse_probabilities
from calibrate.maths.masking import FiniteMasks, as_masks, finite_masks

OF_ROWS = ("layer", "head", "weight", "group")  # optional
KNOWN = ("logits", "target", "mask", *OF_ROWS)
MOST_HEADS = 1 << 15  # layers, and heads of a layer
INDICES = {"layer": MOST_HEADS, "head": MOST_HEADS, "group": 1 << 63}  # each below
MOST_FILE_BYTES = 1 << 34  # of one file, which is in memory as a whole


class LoggedRows(NamedTuple):
    """Rows of one set size."""

    logits: np.ndarray  # (rows, size) float32, -inf where masked, real items first
    target: np.ndarray  # (rows,) int32, or (rows, size) bool
    layer: np.ndarray  # (rows,) int16, -1 where none is given
    head: np.ndarray
    weight: np.ndarray  # (rows,) float32, 1 where none is given
    group: np.ndarray  # (rows,) int64, -1 where none is given


class Part(NamedTuple):
    """Some rows of one set size, by file and row; another process can read them."""

    files: list[Path]  # absolute
    digests: list[str]  # of the files, when they were checked
    place: np.ndarray  # (rows, 2): which file, and which row of it
    size: int
    sets_of_targets: bool

    def read(self) -> LoggedRows:
        """Reads the files.

        Raises:
          CalibrateError: a file changed since it was checked.
        """
        parts = []
        for i in np.unique(self.place[:, 0]):
            arrays, digest, _ = _parsed(self.files[i], _state(self.files[i]))
            if digest != self.digests[i]:
                raise CalibrateError(
                    f"{self.files[i]} changed while it was in use; run the command again"
                )
            rows = self.place[self.place[:, 0] == i, 1]
            parts.append(_compact(arrays, rows, self.size, self.sets_of_targets))
        return LoggedRows(*map(np.concatenate, zip(*parts, strict=True)))


class Arrays:
    """The rows in a file or folder, by set size."""

    def __init__(self, path: Path):
        """Reads and checks every file once.

        Raises:
          CalibrateError: no file, a file with invalid arrays, or no rows.
        """
        self.name = (path if path.name not in ("", "..") else path.resolve()).stem
        path = path.absolute()  # as other processes know it
        self._files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not self._files:
            raise CalibrateError(
                f"{path} has no .npz file; give files with arrays logits and target"
            )
        self._digests, n_real, masks = [], [], []
        kinds, several = set(), False
        heads: set[tuple[int, int]] = set()
        groups: set[int] = set()
        for file in self._files:
            arrays, digest, of_file = _parsed(file, _state(file))
            self._digests.append(digest)
            masks.append(of_file)
            n_real.append(_real(arrays).sum(axis=1, dtype=np.int32))
            kinds.add(tuple(name for name in OF_ROWS if name in arrays))
            target = arrays["target"]
            several |= target.dtype == bool and bool((target.sum(axis=1) != 1).any())
            layer, head, _, group = _of_rows(arrays)
            heads |= set(zip(layer.tolist(), head.tolist(), strict=True))
            groups |= set(np.unique(group).tolist())
        some = [name for name in OF_ROWS if 0 < sum(name in given for given in kinds) < len(kinds)]
        if some:
            raise CalibrateError(
                f"{path}: only some files have {' and '.join(some)}; give it in all or none"
            )
        (given,) = kinds
        self.names_heads = not {"layer", "head"}.isdisjoint(given)
        both = ("layer", "head") if self.names_heads else ()
        self.columns = [name for name in OF_ROWS if name in (*given, *both)]
        self.sets_of_targets = several  # a mask with one target is stored as its position
        self.heads = sorted(heads)
        self.groups = np.array(sorted(groups - {-1}), np.int64)  # empty where none is given
        self.fingerprint = "sha256:" + hashlib.sha256("".join(self._digests).encode()).hexdigest()
        _warn_of_masks(path, masks)
        self._place = _by_size(n_real)
        if not self._place:
            raise CalibrateError(f"{path} has no rows; give some")

    @property
    def sizes(self) -> list[int]:
        """Set sizes, lowest first."""
        return list(self._place)

    def count(self, size: int) -> int:
        """How many rows have that size."""
        return len(self._place[size])

    def rows(self, size: int, first: int, count: int) -> LoggedRows:
        """Rows first .. first + count - 1 of a size, in the order of the files."""
        return self.part(size, first, count).read()

    def part(self, size: int, first: int, count: int) -> Part:
        """Rows first .. first + count - 1 of a size, to be read later."""
        place = self._place[size][first : first + count]
        used, which = np.unique(place[:, 0], return_inverse=True)
        files, digests = ([of_file[i] for i in used] for of_file in (self._files, self._digests))
        place = np.stack([which.astype(np.int32), place[:, 1]], axis=1)
        return Part(files, digests, place, size, self.sets_of_targets)


@lru_cache(maxsize=1)  # units of work that follow each other are of the same file
def _parsed(file: Path, state: tuple[int, int]) -> tuple[dict[str, np.ndarray], str, FiniteMasks]:
    """The arrays of a file, checked, logits in float32; its digest; and its finite masks.

    `state` is its size and time of change, so that a changed file is parsed again.
    """
    data = read_bytes(file, MOST_FILE_BYTES, "split it into several files in a folder")
    arrays = parse_arrays(data, file)
    _check(arrays, file)
    with np.errstate(over="ignore"):  # beyond float32 becomes -inf, masked, or inf, a bad row
        logits = arrays["logits"].astype(np.float32, copy=False)
    low, logits = finite_masks(logits), as_masks(logits)
    arrays["logits"] = logits
    refuse_probabilities(np.where(_real(arrays), logits, 0), f"{file}: logits have")
    return arrays, digest_of(data), low


def _warn_of_masks(path: Path, of_files: list[FiniteMasks]) -> None:
    n, least, greatest = zip(*of_files, strict=True)
    masks = FiniteMasks(sum(n), min(least), max(greatest))
    if masks.n:
        warnings.warn(masks.warning(f"{path} has"), stacklevel=3)


def _state(file: Path) -> tuple[int, int]:
    """Size of a file and time of its last change; (-1, -1) if it cannot be read."""
    try:
        status = file.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _check(arrays: dict[str, np.ndarray], file: Path) -> None:
    for name in ("logits", "target"):
        if name not in arrays:
            raise CalibrateError(
                f"{file} has no array {name!r} (it has {', '.join(arrays) or 'none'}); give "
                "logits (rows, n) and target (rows,)"
            )
    unknown = sorted(set(arrays) - set(KNOWN))
    if unknown:
        raise CalibrateError(f"{file} has an unknown array {unknown[0]!r}; give {', '.join(KNOWN)}")
    logits = arrays["logits"]
    if logits.ndim != 2 or not np.issubdtype(logits.dtype, np.floating) or logits.shape[1] < 2:
        raise CalibrateError(
            f"{file}: logits are {logits.dtype}{logits.shape}; give floats (rows, n), n at least 2"
        )
    n_rows, n = logits.shape
    check_target(arrays["target"], n, n_rows, f"{file}: target is")
    mask = arrays.get("mask")
    if mask is not None and (mask.dtype != bool or mask.shape not in (logits.shape, (n,))):
        raise CalibrateError(
            f"{file}: mask is {mask.dtype}{mask.shape}; give bool {logits.shape} or {(n,)}, True "
            "for real items"
        )
    for name, most in INDICES.items():
        index = arrays.get(name)
        if index is None:
            continue
        right = index.shape == (n_rows,) and index.dtype.kind in "iu"
        if not right or (n_rows and not 0 <= index.min() <= index.max() < most):
            raise CalibrateError(
                f"{file}: {name} is {index.dtype}{index.shape}; give integers {(n_rows,)} within "
                f"[0, {most})"
            )
    _check_weight(arrays.get("weight"), n_rows, file)


def _check_weight(weight: np.ndarray | None, n_rows: int, file: Path) -> None:
    if weight is None:
        return
    if weight.shape != (n_rows,) or not np.issubdtype(weight.dtype, np.floating):
        raise CalibrateError(f"{file}: weight is {weight.dtype}{weight.shape}; give floats (rows,)")
    if not ((weight >= 0) & (weight <= np.finfo(np.float32).max)).all():
        raise CalibrateError(
            f"{file}: weight has {weight.min():g} to {weight.max():g}; give finite float32 "
            "numbers >= 0"
        )


def _real(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """(rows, n) bool: the items that are not masked."""
    return np.asarray((arrays["logits"] != -np.inf) & arrays.get("mask", True))


def _of_rows(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Layer and head (int16), weight (float32) and group (int64) of each row; see LoggedRows."""
    absent = {"layer": -1, "head": -1, "weight": 1, "group": -1}
    none = np.ones(len(arrays["target"]), int)
    types = (np.int16, np.int16, np.float32, np.int64)
    return [
        arrays.get(name, absent[name] * none).astype(dtype)
        for name, dtype in zip(OF_ROWS, types, strict=True)
    ]


def _by_size(n_real: list[np.ndarray]) -> dict[int, np.ndarray]:
    """Set size -> (rows, 2): which file, and which row of it; int32, as rows may be millions."""
    count = np.concatenate(n_real)
    place = np.empty((len(count), 2), np.int32)
    place[:, 0] = np.repeat(np.arange(len(n_real), dtype=np.int32), [len(x) for x in n_real])
    np.concatenate([np.arange(len(x), dtype=np.int32) for x in n_real], out=place[:, 1])
    octave = np.concatenate([np.frexp(np.maximum(x, 2) - 1)[1].astype(np.int8) for x in n_real])
    return {int(max(2, count[octave == o].max())): place[octave == o] for o in np.unique(octave)}


def _compact(
    arrays: dict[str, np.ndarray], chosen: np.ndarray, size: int, masks: bool
) -> LoggedRows:
    """Some rows of a file, their real items moved to the front, in `size` columns.

    Targets are masks if `masks`, else positions.
    """
    logits, target = arrays["logits"][chosen], arrays["target"][chosen]
    real = _real(arrays)[chosen]
    n = logits.shape[1]
    if masks and target.dtype != bool:
        target = np.arange(n) == target[:, None]
    elif not masks and target.dtype == bool:
        target = target.argmax(axis=1)
    of_row = [column[chosen] for column in _of_rows(arrays)]
    if n == size and real.all():
        target = target if target.dtype == bool else target.astype(np.int32)
        return LoggedRows(logits, target, *of_row)
    order = np.argsort(~real, axis=1, kind="stable")[:, :size]
    kept = np.take_along_axis(real, order, axis=1)
    compact = np.full((len(chosen), size), -np.inf, np.float32)
    values = np.take_along_axis(logits, order, axis=1)
    compact[:, : order.shape[1]] = np.where(kept, values, -np.inf)
    if target.dtype == bool:
        moved = np.zeros((len(chosen), size), bool)
        moved[:, : order.shape[1]] = np.take_along_axis(target, order, axis=1) & kept
        return LoggedRows(compact, moved, *of_row)
    at_target = (order == target[:, None]) & kept
    position = at_target.argmax(axis=1).astype(np.int32)
    masked = ~at_target.any(axis=1)
    compact[masked, 0] = -np.inf  # counts as a row with a masked target
    return LoggedRows(compact, position, *of_row)
