"""Collections of rows: the logits of a head, a shard for each unit of work, all of one set size.

A shard holds `logits` (rows, n) float32, `target` (rows,) int32, or (rows, n) bool where several
items may win, `entropy` (rows,) float32, `index` (rows,) int64 (which set), and `counts`, int64, of
all rows of the unit, in the order of COUNTS. If the source names heads, also `layer` and `head`
(rows,) int16, -1 if unknown; if it has weights, `weight` (rows,) float32; and if it names groups,
`group` (rows,) int64.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as AnyOf
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.datasets.logit_rows import MAX_HEADS, OPTIONAL_COLUMNS, LogitRows, at_target
from calibrate.datasets.manifest import (
    COMPLETE,
    COUNT,
    FILE,
    Collection,
    Column,
    Entry,
    check_arrays,
    entry_of,
    listed_bytes,
    manifest_text,
    parse_manifest,
    require,
)
from calibrate.datasets.row_quality import COUNTS
from calibrate.errors import CalibrateError
from calibrate.storage.json_shapes import Integer, List, Object, PrintableLine, Shape
from calibrate.storage.npz import parse_arrays, read_bytes, sha256_of

HEAD = ".head"  # hidden, and not digested: how the head was named on this machine
ENTROPY_ERROR = 1e-3  # nats, far more than the rounding of float32

# Upper bounds of bytes beside the rows of shards; tests compare real files with them.
SHARD_OVERHEAD = 2_048
MANIFEST_BASE = 2_048
MANIFEST_PER_HEAD = 32
MANIFEST_PER_SIZE = 256
MANIFEST_PER_SHARD = 256

MAX_SHOWN = 16  # sizes that `print` shows
Heads = list[tuple[int, int]]  # (layer, head) of each, -1 where unknown

_HEADS = List(List(Integer(-1, MAX_HEADS - 1), exact=2))
_CONFIGURATION = Object(
    {
        **dict.fromkeys(("head", "fingerprint"), PrintableLine()),
        **dict.fromkeys(("sets", "max_bytes"), COUNT),
        "seed": Integer(0, (1 << 64) - 1),
        "sizes": List(Integer(2, (1 << 31) - 1)),
    },
    required=True,
    others="",
)
_SIZE = Object(dict.fromkeys(("size", *COUNTS, "kept"), COUNT), required=True, others="")
_SHARD = Object(
    {**dict.fromkeys(("size", "unit", "kept"), COUNT), **FILE}, required=True, others=""
)
_PARTIAL: dict[str, Shape] = {"configuration": _CONFIGURATION}
_COMPLETE: dict[str, Shape] = {**_PARTIAL, "sizes": List(_SIZE), "shards": List(_SHARD)}
_SHARD_NAME = r"n([0-9]{5,10})-unit([0-9]{5,10})\.npz"


def row_bytes(size: int, sets_of_targets: bool = False, columns: AnyOf[str] = ()) -> int:
    """Bytes of one kept row of `size` items, with those optional columns."""
    of_columns = sum(np.dtype(OPTIONAL_COLUMNS[name].dtype).itemsize for name in columns)
    return 4 * size + (size if sets_of_targets else 4) + 4 + 8 + of_columns


def most_bytes(size: int, n_sets: int) -> int:
    """The largest shard of so many sets."""
    return SHARD_OVERHEAD + n_sets * row_bytes(size, True, OPTIONAL_COLUMNS)


def shard_name(size: int, unit: int) -> str:
    """The name of a unit's shard."""
    return f"n{size:05d}-unit{unit:05d}.npz"


def entry_of_rows(size: int, unit: int, rows: LogitRows, data: bytes) -> Entry:
    """The entry of a unit's shard with these bytes, and the counts of its rows."""
    counts = dict(zip(COUNTS, rows.counts.tolist(), strict=True))
    kept = {"size": size, "unit": unit, "kept": len(rows.target)}
    return {**kept, **entry_of(data), "counts": counts}


def check_unit(size: int, unit: int, sets: range, data: bytes, path: Path) -> Entry:
    """The entry of the shard in bytes that no manifest lists.

    Args:
      sets: the indices of the sets that the unit consists of.
    Raises:
      DamagedError: they are not a shard of these sets.
    """
    rows = parse_rows(data, path, size)
    ends = rows.index[:1].tolist() + rows.index[-1:].tolist()
    of_unit = rows.counts[0] == len(sets) and all(end in sets for end in ends)
    require(of_unit, path, "it holds sets of another unit")
    return entry_of_rows(size, unit, rows, data)


class RowCollection(Collection):
    """A collection of rows."""

    kind, format = "rows", "calibrate.collection"
    names = rf"{re.escape(HEAD)}|{_SHARD_NAME}"

    def __repr__(self) -> str:
        """What was collected, and how many inputs of each size are misranked."""
        sizes = self.manifest.get("sizes", [])
        numbers = {
            name: sum(size[name] for size in sizes) for name in ("rows", "misranked", "kept")
        }
        shown = [f"n = {size['size']:,}: {size['misranked']:,}" for size in sizes[:MAX_SHOWN]]
        more = [f"{len(sizes) - MAX_SHOWN} more sizes"] if len(sizes) > MAX_SHOWN else []
        where = f"in {self.folder}" if self.in_memory is None else "in memory"
        return "\n".join(
            [
                f"Collection of {self.configuration['head']}, {where}",
                f"{numbers['rows']:,} inputs, {numbers['kept']:,} of them kept",
                f"{numbers['misranked']:,} misranked ({', '.join([*shown, *more])})",
            ]
        )

    def recorded_head(self) -> str | None:
        """The reference by which the head was loaded, if it is recorded: to name, not to load."""
        with contextlib.suppress(CalibrateError, UnicodeDecodeError):
            text = read_bytes(self.folder / HEAD, 1 << 12).decode().removesuffix("\n")
            return text if text and text.isprintable() else None
        return None

    @property
    def heads(self) -> Heads:
        """The heads that the rows belong to; empty if unknown."""
        return [(layer, head) for layer, head in self.configuration.get("heads", [])]

    @property
    def misranked_only(self) -> bool:
        """True if it keeps misranked rows, and no others."""
        return str(self.configuration.get("keep", "misranked")) != "all"

    def shards(self, heads: Heads | None = None) -> Iterator[tuple[int, LogitRows]]:
        """(set size, rows) of every shard; the rows of some heads only, if they are given."""
        for read in self.readers(heads):
            yield read()

    def readers(self, heads: Heads | None = None) -> list[Callable[[], tuple[int, LogitRows]]]:
        """Functions that read one shard each; other processes can call them."""
        folder = self.folder.absolute()  # workers may have another working folder
        in_memory = self.in_memory or [None] * len(self.manifest["shards"])
        return [
            partial(_read, folder, entry, heads, rows)
            for entry, rows in zip(self.manifest["shards"], in_memory, strict=True)
        ]

    @staticmethod
    def checked(manifest: dict[str, Any]) -> dict[str, Any]:
        """See `Collection`."""
        shapes = _COMPLETE if manifest["status"] == COMPLETE else _PARTIAL
        manifest = Object(shapes, required=True, others="")(manifest)
        configuration = manifest["configuration"]
        _HEADS(configuration.get("heads", []))
        sizes = configuration["sizes"]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError("sizes do not increase")
        if "sizes" in manifest and [entry["size"] for entry in manifest["sizes"]] != sizes:
            raise ValueError("it counts other sizes than it was collected for")
        return manifest

    @staticmethod
    def listing(configuration: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
        """The counts of each size, and the shards."""
        sizes = [
            _size_counts(size, [entry for entry in entries if entry["size"] == size])
            for size in configuration["sizes"]
        ]
        shards = [{k: x for k, x in entry.items() if k != "counts"} for entry in entries]
        return {"sizes": sizes, "shards": shards}

    @staticmethod
    def manifest_entries(manifest: dict[str, Any]) -> dict[str, Entry]:
        """The shards by name."""
        return {shard_name(entry["size"], entry["unit"]): entry for entry in manifest["shards"]}


def rows_in_memory(
    name: str, configuration: dict[str, Any], shards: Sequence[tuple[int, int, LogitRows]]
) -> RowCollection:
    """A collection of (size, unit, rows), with the manifest that it would have on disk."""
    entries = [entry_of_rows(size, unit, rows, rows.pack()) for size, unit, rows in shards]
    data = manifest_text(RowCollection, configuration, entries, COMPLETE).encode()
    manifest, _ = parse_manifest(data, Path(name), [RowCollection])
    return RowCollection(Path(name), manifest, sha256_of(data), [rows for *_, rows in shards])


def unlisted_shards(folder: Path, configuration: Mapping[str, Any]) -> list[Entry]:
    """The entries of the shards in the folder of an unfinished collection, in order.

    Raises:
      DamagedError: one of them is damaged.
    """
    entries = []
    names = filter(None, map(re.compile(_SHARD_NAME).fullmatch, os.listdir(folder)))
    for size, unit in sorted((int(name[1]), int(name[2])) for name in names):
        if size in configuration["sizes"]:
            path = folder / shard_name(size, unit)
            data = read_bytes(path, configuration["max_bytes"])
            entries.append(entry_of_rows(size, unit, parse_rows(data, path, size), data))
    return entries


def _read(
    folder: Path, entry: Entry, heads: Heads | None, rows: LogitRows | None
) -> tuple[int, LogitRows]:
    """(set size, rows of some heads), from the folder unless the rows are in memory."""
    size = entry["size"]
    if rows is None:
        path = folder / shard_name(size, entry["unit"])
        rows = parse_rows(listed_bytes(path, entry), path, size)
    return size, rows if heads is None else rows.of_heads(heads)


def parse_rows(data: bytes, path: Path, size: int) -> LogitRows:
    """The rows, of that set size, in the bytes of a shard.

    Raises:
      DamagedError: they are not a shard's, or a value is out of range.
    """
    arrays = parse_arrays(data, path)
    n_rows = len(np.atleast_1d(arrays.get("target", ())))
    several = "target" in arrays and arrays["target"].dtype == bool
    expected: dict[str, Column] = {
        "logits": ("<f4", (n_rows, size)),
        "target": ("|b1", (n_rows, size)) if several else ("<i4", (n_rows,)),
        "entropy": ("<f4", (n_rows,)),
        "index": ("<i8", (n_rows,)),
        "counts": ("<i8", (len(COUNTS),)),
    }
    given = {name: known for name, known in OPTIONAL_COLUMNS.items() if name in arrays}
    expected |= {name: (known.dtype, (n_rows,)) for name, known in given.items()}
    check_arrays(arrays, path, expected)
    rows = LogitRows(**{name: arrays[name] for name in expected})
    require((rows.layer is None) == (rows.head is None), path, "layer or head is absent")
    _check_values(rows, path, size)
    return rows


def _check_values(rows: LogitRows, path: Path, size: int) -> None:
    """Raises DamagedError for values that a collection cannot have."""
    if not len(rows.target):
        return
    target = rows.target
    if target.dtype != bool:
        require(0 <= target.min() <= target.max() < size, path, f"target is not within [0, {size})")
    highest = rows.logits.max(axis=1)  # NaN if there is one in the row
    require((highest < np.inf).all(), path, "logits hold NaN or inf")
    require((at_target(rows.logits, target) > -np.inf).all(), path, "a target is masked")
    H, index = rows.entropy, rows.index
    bounded = -ENTROPY_ERROR <= H.min() <= H.max() <= np.log(size) + ENTROPY_ERROR
    require(bounded, path, f"entropy is not within [0, log {size}]")
    require(index[0] >= 0 and (index[:-1] < index[1:]).all(), path, "index does not rise")
    if rows.weight is not None:
        valid = ((rows.weight >= 0) & (rows.weight < np.inf)).all()
        require(valid, path, "a weight is negative or not finite")
    if rows.group is not None:
        require(rows.group.min() >= 0, path, "a group is negative")


def _size_counts(size: int, entries: Sequence[Entry]) -> dict[str, int]:
    totals = {name: sum(entry["counts"][name] for entry in entries) for name in COUNTS}
    return {"size": size, **totals, "kept": sum(entry["kept"] for entry in entries)}
