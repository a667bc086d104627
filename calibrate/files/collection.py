"""A collection on disk: a folder with one npz shard per unit of work, and a manifest.

manifest.json is written when the collection starts ("partial": its configuration) and once more
when it is complete (its counts per size, and each shard's digest). In between, the shards present
are the progress: each is written atomically. The folder also has a lock, an empty file.
"""

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CalibrateError, CoefficientsError, DamagedError, QualityError
from calibrate.files.atomic_io import (
    LOCK,
    check_writable,
    locked,
    remove_leftovers,
    write_atomically,
)
from calibrate.files.json_shapes import TEXT, read_field
from calibrate.files.manifest import (
    BAD,
    COUNTS,
    FORMAT,
    MANIFEST,
    MOST_MANIFEST_BYTES,
    SCHEMA_VERSION,
    parse_manifest,
)
from calibrate.files.npz import digest_of, read_bytes
from calibrate.files.shard import (
    BYTES_OF_COLUMN,
    SHARD_OVERHEAD,
    Heads,
    Shard,
    listed_bytes,
    pack_shard,
    parse_shard,
    parse_unlisted,
    require,
    row_bytes,
    shard_path,
)
from calibrate.files.strict_json import parse

MAX_BAD_SHARE = 0.01

# Upper bounds of the manifest's bytes; tests compare real files with them.
MANIFEST_BASE, MANIFEST_PER_HEAD, MANIFEST_PER_SIZE, MANIFEST_PER_SHARD = 2_048, 32, 256, 256


class Receipt(NamedTuple):
    """A shard's entry in the manifest, with its counts."""

    size: int
    unit: int
    kept: int
    counts: dict[str, int]
    bytes: int
    sha256: str


@contextlib.contextmanager
def collection_lock(folder: Path) -> Iterator[None]:
    """Locks a folder while rows or examples are collected into it; another process waits."""
    message = f"another process is collecting into {folder}; waiting for it to finish"
    check_writable(folder / MANIFEST)
    with locked(folder, waiting=lambda: warnings.warn(message, stacklevel=2)) as has_locks:
        if has_locks:
            remove_leftovers(folder, "*")
        yield
        if has_locks:  # of workers that died
            remove_leftovers(folder, "*")


def discard_collection(folder: Path) -> None:
    """Deletes a collection, of rows or of examples, if there is one; its lock stays.

    Raises:
      CalibrateError: the manifest is of something else, or a file cannot be deleted.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        made_of = str(read_field(parse(read_bytes(path, MOST_MANIFEST_BYTES)), "format", TEXT))
    except (CoefficientsError, DamagedError, ValueError):
        made_of = ""
    if not made_of.startswith("calibrate."):
        raise CalibrateError(
            f"{path} is not the manifest of a collection; choose another folder, or delete this one"
        )
    with collection_lock(folder):
        try:
            # The manifest goes last: until then the same command can do this again.
            for entry in sorted(folder.iterdir(), key=lambda entry: entry == path):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
        except OSError as failure:
            raise CalibrateError(f"{folder} cannot be emptied: {failure.strerror}") from failure


def write_shard(
    folder: Path, size: int, unit: int, shard: Shard, listed: str | None = None
) -> Receipt:
    """Writes a shard atomically.

    Args:
      listed: its digest in the manifest of a complete collection.
    Raises:
      CalibrateError: its digest is not the listed one, or it cannot be written.
    """
    path = shard_path(folder, size, unit)
    data = pack_shard(shard)
    if listed is not None and digest_of(data) != listed:
        raise CalibrateError(
            f"{path} cannot be repaired: its rows, collected again, have another digest than "
            f"{MANIFEST} lists, as on another machine or with another version; restore the file "
            "from a copy, or collect into a new folder"
        )
    write_atomically(path, data)
    return receipt_of(size, unit, shard, data)


def receipt_of(size: int, unit: int, shard: Shard, data: bytes) -> Receipt:
    """The manifest's entry for a shard with these bytes."""
    counts = dict(zip(COUNTS, shard.counts.tolist(), strict=True))
    return Receipt(size, unit, len(shard.target), counts, len(data), digest_of(data))


def find_shard(folder: Path, size: int, unit: int, sets: range) -> Receipt | None:
    """The receipt of a shard of an unfinished collection; None if it is absent or damaged.

    Args:
      sets: the indices of the sets that the unit consists of.
    Warns:
      UserWarning: it is damaged.
    Raises:
      CalibrateError: it cannot be read.
    """
    path = shard_path(folder, size, unit)
    if not path.exists():
        return None
    try:
        data = read_bytes(path, SHARD_OVERHEAD + len(sets) * row_bytes(size, True, BYTES_OF_COLUMN))
        shard = parse_unlisted(data, path, size)
        require(shard.counts[0] == len(sets), path, f"its number of sets is not {len(sets)}")
        ends = shard.index[:1].tolist() + shard.index[-1:].tolist()
        require(all(end in sets for end in ends), path, "its index has sets of another unit")
    except DamagedError:
        warnings.warn(f"{path} is damaged; it is collected again", stacklevel=4)
        return None
    return receipt_of(size, unit, shard, data)


# Of shards that this process has read, by digest: their heads, and the same shard without rows.
_read_before: dict[str, tuple[frozenset[tuple[int, int]], Shard]] = {}


class Collection(NamedTuple):
    """A collection; complete, unless opened by `open_unfinished`."""

    folder: Path
    manifest: dict[str, Any]
    digest: str  # of the manifest, and so of every shard
    in_memory: Sequence[Shard] | None = None  # in the order of the manifest; None: in the folder

    @property
    def heads(self) -> Heads:
        """The heads that the rows belong to; empty if unknown."""
        return [(layer, head) for layer, head in self.manifest["configuration"].get("heads", [])]

    @property
    def partial(self) -> bool:
        """Whether it was not finished."""
        return bool(self.manifest["status"] != "complete")

    def shards(self, heads: Heads | None = None) -> Iterator[tuple[int, Shard]]:
        """(set size, shard) of every shard; of some heads only, if they are given."""
        for read in self.readers(heads):
            yield read()

    def readers(self, heads: Heads | None = None) -> list[Callable[[], tuple[int, Shard]]]:
        """Functions that read one shard each, as `shards`; other processes can call them."""
        folder = self.folder.absolute()  # workers may have another working folder
        shards: Sequence[Shard | None] = self.in_memory or [None] * len(self.manifest["shards"])
        return [
            partial(_read, folder, entry, heads, shard)
            for entry, shard in zip(self.manifest["shards"], shards, strict=True)
        ]


def _read(
    folder: Path, entry: dict[str, Any], heads: Heads | None, in_memory: Shard | None
) -> tuple[int, Shard]:
    if in_memory is None:
        return entry["size"], read_shard(folder, entry, heads)
    return entry["size"], in_memory if heads is None else in_memory.of_heads(heads)


def collection_in_memory(
    name: str, configuration: dict[str, Any], shards: Sequence[tuple[int, int, Shard]]
) -> Collection:
    """A collection of (size, unit, shard), with the manifest that it would have on disk."""
    receipts = [receipt_of(size, unit, shard, pack_shard(shard)) for size, unit, shard in shards]
    data = manifest_text(configuration, receipts, "complete").encode()
    manifest = parse_manifest(data, Path(name))
    return Collection(Path(name), manifest, digest_of(data), [shard for _, _, shard in shards])


def read_shard(folder: Path, entry: dict[str, Any], heads: Heads | None = None) -> Shard:
    """The shard of an entry of the manifest, checked against its digest.

    Args:
      heads: keep only their rows; None keeps all. A shard that is known to have none is not read.
    Raises:
      DamagedError: it is absent, or has another digest.
      CalibrateError: it cannot be read.
    """
    known = _read_before.get(entry["sha256"])
    if heads is not None and known is not None and known[0].isdisjoint(heads):
        return known[1]
    path = shard_path(folder, entry["size"], entry["unit"])
    shard = parse_shard(listed_bytes(path, entry), path, entry["size"])
    require(
        len(shard.target) == entry["kept"], path, f"its number of rows is not that of {MANIFEST}"
    )
    if heads is None:
        return shard
    require(shard.layer is not None, path, f"its rows are of other heads than those in {MANIFEST}")
    if known is None:
        _read_before[entry["sha256"]] = shard.heads, shard.of_heads([])
    return shard.of_heads(heads)


def open_collection(folder: Path) -> Collection:
    """Opens a complete collection.

    Raises:
      CalibrateError: it is absent, unfinished or damaged.
    """
    if not (folder / MANIFEST).is_file():
        raise CalibrateError(f"{folder} is not a collection; make one with `calibrate collect`")
    data = _read_manifest_bytes(folder)
    manifest = parse_manifest(data, folder / MANIFEST)
    if manifest["status"] != "complete":
        raise CalibrateError(
            f"{folder} is unfinished; run the same `calibrate collect` command again to finish it, "
            "or fit its finished shards: `calibrate fit --allow-partial`"
        )
    return Collection(folder, manifest, digest_of(data))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if it has none."""
    path = folder / MANIFEST
    return parse_manifest(_read_manifest_bytes(folder), path) if path.is_file() else None


def _read_manifest_bytes(folder: Path) -> bytes:
    remedy = "restore it or collect into a new folder"
    return read_bytes(folder / MANIFEST, MOST_MANIFEST_BYTES, remedy)


def refuse_bad_rows(manifest: dict[str, Any]) -> None:
    """Raises QualityError if more than 1 % of a collection's rows are bad."""
    totals = {name: sum(size[name] for size in manifest["sizes"]) for name in COUNTS}
    bad = {name: totals[name] for name in BAD if totals[name]}
    if sum(bad.values()) > MAX_BAD_SHARE * totals["rows"]:
        reasons = ", ".join(f"{count} {name}" for name, count in bad.items())
        remedy = "look at the head's logits before calibrating it"
        if set(bad) == {"masked_target"}:
            remedy = "a target must be a real item; is the mask, True for real items, inverted?"
        raise QualityError(
            f"{sum(bad.values())} of {totals['rows']} rows are bad ({reasons}), more than "
            f"{MAX_BAD_SHARE:.0%}; {remedy}"
        )


def write_manifest(
    folder: Path, configuration: dict[str, Any], receipts: list[Receipt] | None
) -> None:
    """Writes the manifest: partial without receipts, complete with all of them.

    Raises:
      FileExistsError: a manifest exists, and no receipts are given.
      CalibrateError: it cannot be written.
    """
    text = manifest_text(configuration, receipts, "partial" if receipts is None else "complete")
    write_atomically(folder / MANIFEST, text.encode(), exclusive=receipts is None)


def manifest_text(
    configuration: dict[str, Any], receipts: list[Receipt] | None, status: str
) -> str:
    """The text of the manifest; with shards and their counts if receipts are given."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "configuration": configuration,
    }
    if receipts is not None:
        manifest["sizes"] = [
            _size_counts(size, [r for r in receipts if r.size == size])
            for size in configuration["sizes"]
        ]
        manifest["shards"] = [
            {key: value for key, value in receipt._asdict().items() if key != "counts"}
            for receipt in receipts
        ]
    return json.dumps(manifest, indent=1, ensure_ascii=True) + "\n"


def _size_counts(size: int, receipts: list[Receipt]) -> dict[str, int]:
    totals = {name: sum(r.counts[name] for r in receipts) for name in COUNTS}
    return {"size": size, **totals, "kept": sum(r.kept for r in receipts)}
