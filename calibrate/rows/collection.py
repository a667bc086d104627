"""Collections of rows: a folder of shards with a manifest, or the same in memory."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.rows.manifest import (
    Collection,
    Kind,
    ShardEntry,
    entry_of,
    listed_bytes,
    manifest_text,
    read_manifest,
)
from calibrate.rows.rows import COUNTS, HeadIndices, Rows, check_bad_rows, parse_rows
from calibrate.storage.fingerprints import sha256_of

MAX_SIZES_SHOWN = 16  # by `print`

ShardReader = Callable[[], tuple[int, Rows]]  # reads (set size, rows) of one shard


class RowCollection(Collection):
    """A collection of rows."""

    format = "calibrate.collection"
    names = r"n([0-9]{5,10})-unit([0-9]{5,10})\.npz"

    def __repr__(self) -> str:
        """The source, and the numbers of inputs and of misranked ones by size."""
        sizes = self.manifest.get("sizes", [])
        numbers = {
            name: sum(size[name] for size in sizes) for name in ("rows", "misranked", "kept")
        }
        shown = [f"n = {size['size']:,}: {size['misranked']:,}" for size in sizes[:MAX_SIZES_SHOWN]]
        if len(sizes) > MAX_SIZES_SHOWN:
            shown.append(f"{len(sizes) - MAX_SIZES_SHOWN} more sizes")
        place = f"in {self.folder}" if self.in_memory is None else "in memory"
        return "\n".join(
            [
                f"Collection of {self.configuration['head']}, {place}",
                f"{numbers['rows']:,} inputs, {numbers['kept']:,} of them kept",
                f"{numbers['misranked']:,} misranked ({', '.join(shown)})",
            ]
        )

    @property
    def heads(self) -> HeadIndices:
        """The heads that the rows name; empty if they name none."""
        return [(layer, head) for layer, head in self.configuration.get("heads", [])]

    @property
    def misranked_only(self) -> bool:
        """True if the collection keeps misranked rows only."""
        return str(self.configuration.get("keep", "misranked")) != "all"

    def shards(self, heads: HeadIndices | None = None) -> Iterator[tuple[int, Rows]]:
        """(set size, rows) of every shard; only the rows of `heads` if they are given."""
        for read in self.readers(heads):
            yield read()

    def readers(self, heads: HeadIndices | None = None) -> list[ShardReader]:
        """A function for each shard that reads it; other processes can call it.

        Raises:
          QualityError: more than 1 % of the rows are bad (NaN, +inf or a masked target).
        """
        check_bad_rows(self.manifest)
        folder = self.folder.absolute()  # workers may have another working folder
        in_memory = self.in_memory or [None] * len(self.manifest["shards"])
        return [
            partial(_read_shard, folder, entry, heads, rows)
            for entry, rows in zip(self.manifest["shards"], in_memory, strict=True)
        ]

    @staticmethod
    def listing(configuration: dict[str, Any], entries: Sequence[ShardEntry]) -> dict[str, Any]:
        """The counts of each size, and the shards."""
        sizes = [
            _size_counts(size, [entry for entry in entries if entry["size"] == size])
            for size in configuration["sizes"]
        ]
        shards = [{k: v for k, v in entry.items() if k != "counts"} for entry in entries]
        return {"sizes": sizes, "shards": shards}


def open_collection(
    folder: Path,
    kind: type[Kind] = RowCollection,  # type: ignore[assignment]
) -> Kind:
    """Opens a collection; each shard is checked when it is read.

    Args:
      kind: RowCollection, or another subclass of `Collection`.
    Raises:
      CalibrateError: the collection is absent, unfinished, damaged, or of another kind.
    """
    collection = read_manifest(folder, kind)
    if collection is None:
        raise CalibrateError(f"{folder} is not a collection; make one with `calibrate collect`")
    if collection.partial:
        raise CalibrateError(f"{folder} is unfinished; run the same command again")
    return collection


def rows_in_memory(
    name: str, configuration: dict[str, Any], shards: Sequence[tuple[int, int, Rows]]
) -> RowCollection:
    """A collection of shards (size, unit, rows) with the manifest that it would have on disk."""
    entries = [entry_of_rows(size, unit, rows, rows.pack()) for size, unit, rows in shards]
    text = manifest_text(RowCollection, configuration, entries)
    digest = sha256_of(text.encode())
    return RowCollection(Path(name), json.loads(text), digest, [rows for *_, rows in shards])


def shard_name(size: int, unit: int) -> str:
    """The file name of a unit's shard."""
    return f"n{size:05d}-unit{unit:05d}.npz"


def entry_of_rows(size: int, unit: int, rows: Rows, data: bytes) -> ShardEntry:
    """The entry of a unit's shard with these bytes, and the counts of its rows."""
    counts = dict(zip(COUNTS, rows.counts.tolist(), strict=True))
    kept = {"size": size, "unit": unit, "kept": len(rows.target)}
    return {**kept, **entry_of(data), "counts": counts}


def _read_shard(
    folder: Path, entry: ShardEntry, heads: HeadIndices | None, rows: Rows | None
) -> tuple[int, Rows]:
    """(set size, rows of some heads) of a shard, which is read unless its rows are in memory."""
    size = entry["size"]
    if rows is None:
        path = folder / shard_name(size, entry["unit"])
        rows = parse_rows(listed_bytes(path, entry), path)
    return size, rows if heads is None else rows.select_heads(heads)


def _size_counts(size: int, entries: Sequence[ShardEntry]) -> dict[str, int]:
    """The counts of all shards of one size, as the manifest has them."""
    totals = {name: sum(entry["counts"][name] for entry in entries) for name in COUNTS}
    return {"size": size, **totals, "kept": sum(entry["kept"] for entry in entries)}
