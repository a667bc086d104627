"""A collection on disk: a folder with one npz shard per unit of work, and a manifest.

A shard holds the kept rows of one unit, all of one set size: `logits` (rows, n) float32, `target`
(rows,) int32, or (rows, n) bool where several items may win, `entropy` (rows,) float32, `index`
(rows,) int64 (which set), and `counts`, int64, of everything that the unit saw, in the order of
COUNTS; where it is said which head's they are, `layer` and `head` (rows,) int16, -1 if unknown.

manifest.json is written when the collection starts ("partial": its configuration) and once more
when it is complete (its counts per size, and each shard's digest). In between, the shards present
are the progress: each appears whole or not at all.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.arrays import digest_of, parse_arrays, read_bytes, write_arrays
from calibrate.files.whole import remove_leftovers, write_whole

FORMAT = "calibrate.collection"
SCHEMA_VERSION = "0.1"
MANIFEST = "manifest.json"
BAD = ("nan", "inf", "masked_target")
MAX_BAD_SHARE = 0.01
COUNTS = ("rows", "misranked", "ties", *BAD)
ROW_DTYPES = {"logits": "<f4", "target": "<i4", "entropy": "<f4", "index": "<i8"}

# Upper bounds of what a file takes beside its rows; tests hold real files against them.
SHARD_OVERHEAD = 2_048
MANIFEST_BASE, MANIFEST_PER_SIZE, MANIFEST_PER_SHARD = 2_048, 256, 256


@dataclass(frozen=True)
class Shard:
    """The kept rows of one unit."""

    logits: np.ndarray  # (rows, n)
    target: np.ndarray  # (rows,) int32, or (rows, n) bool
    entropy: np.ndarray  # nats
    index: np.ndarray
    counts: np.ndarray  # (len(COUNTS),)
    layer: np.ndarray | None = None  # (rows,) int16, -1 if unknown: which head's, if it is said
    head: np.ndarray | None = None


class Receipt(NamedTuple):
    """What the manifest says of a shard."""

    size: int
    unit: int
    kept: int
    counts: dict[str, int]
    bytes: int
    sha256: str


def row_bytes(size: int, sets_of_targets: bool = False) -> int:
    """Bytes of one kept row of `size` items."""
    return 4 * size + (size if sets_of_targets else 4) + 4 + 8


def shard_path(folder: Path, size: int, unit: int) -> Path:
    """Where the shard of a unit is."""
    return folder / f"n{size:05d}-unit{unit:05d}.npz"


def write_shard(folder: Path, size: int, unit: int, shard: Shard) -> Receipt:
    """Publishes a shard, whole or not at all."""
    path = shard_path(folder, size, unit)
    data = write_arrays(path, {name: x for name, x in vars(shard).items() if x is not None})
    return _receipt(size, unit, shard, data)


def sweep(folder: Path) -> None:
    """Removes what killed processes left of their shards; the collecting process does, alone."""
    remove_leftovers(folder, "n*.npz")


def _receipt(size: int, unit: int, shard: Shard, data: bytes) -> Receipt:
    counts = dict(zip(COUNTS, shard.counts.tolist(), strict=True))
    return Receipt(size, unit, len(shard.target), counts, len(data), digest_of(data))


def inspect_shard(folder: Path, size: int, unit: int) -> Receipt:
    """The receipt of a shard that is on disk already."""
    path = shard_path(folder, size, unit)
    data = read_bytes(path)
    return _receipt(size, unit, _parse_shard(data, path, size), data)


def _parse_shard(data: bytes, path: Path, size: int) -> Shard:
    """The shard of that set size in the bytes of a file; anything else is refused."""
    arrays = parse_arrays(data, path)
    n_rows = len(arrays.get("target", ()))
    dtypes = {**ROW_DTYPES, "counts": "<i8"}
    shapes: dict[str, tuple[int, ...]] = {
        "logits": (n_rows, size), "target": (n_rows,), "entropy": (n_rows,), "index": (n_rows,),
        "counts": (len(COUNTS),),
    }  # fmt: skip
    if "target" in arrays and arrays["target"].dtype == bool:
        dtypes["target"], shapes["target"] = "|b1", (n_rows, size)
    for name in {"layer", "head"} & set(arrays):
        dtypes[name], shapes[name] = "<i2", (n_rows,)
    for name, shape in shapes.items():
        array, dtype = arrays.get(name), np.dtype(dtypes[name])
        if array is None or array.shape != shape or array.dtype != dtype:
            found = "absent" if array is None else f"{array.dtype}{array.shape}"
            raise CalibrateError(
                f"{path}: {name} is {found}, expected {dtype}{shape}; "
                "delete the file and collect again"
            )
    target = arrays["target"]
    if target.dtype == bool and not target.any(axis=1).all():
        raise CalibrateError(
            f"{path}: target marks no item in some row; delete the file and collect again"
        )
    if target.dtype != bool and n_rows and not 0 <= target.min() <= target.max() < size:
        raise CalibrateError(
            f"{path}: target is not within [0, {size}); delete the file and collect again"
        )
    return Shard(**{name: arrays[name] for name in shapes})


class Collection(NamedTuple):
    """A complete collection."""

    folder: Path
    manifest: dict[str, Any]
    digest: str  # of the manifest, and so of every shard

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of those that the rows are of, -1 if unknown; none if nobody says."""
        return [(layer, head) for layer, head in self.manifest["configuration"].get("heads", [])]

    def shards(self) -> Iterator[tuple[int, Shard]]:
        """(set size, shard) of every shard."""
        for entry in self.manifest["shards"]:
            yield entry["size"], read_shard(self.folder, entry)


def read_shard(folder: Path, entry: dict[str, Any]) -> Shard:
    """The shard that an entry of a manifest is about, checked against its digest."""
    path = shard_path(folder, entry["size"], entry["unit"])
    data = read_bytes(path)
    if digest_of(data) != entry["sha256"]:
        raise CalibrateError(
            f"{path} is not the shard that {MANIFEST} lists: it was damaged or exchanged; "
            "delete it and run the same `calibrate collect` command again"
        )
    return _parse_shard(data, path, entry["size"])


def open_collection(folder: Path) -> Collection:
    """Opens a complete collection.

    Raises:
      CalibrateError: there is none, or it is unfinished or damaged.
    """
    if not (folder / MANIFEST).is_file():
        raise CalibrateError(f"{folder} holds no collection; `calibrate collect` makes one")
    data = read_bytes(folder / MANIFEST)
    manifest = _parse_manifest(data, folder / MANIFEST)
    if manifest["status"] != "complete":
        raise CalibrateError(
            f"{folder} is unfinished; run the same `calibrate collect` command again to finish it"
        )
    return Collection(folder, manifest, digest_of(data))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if there is none."""
    path = folder / MANIFEST
    return _parse_manifest(read_bytes(path), path) if path.is_file() else None


def _parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """The manifest in the bytes of a file; all that is read of it later is checked here."""
    try:
        manifest = json.loads(data)
        known = manifest["format"], manifest["schema_version"]
        configuration = manifest["configuration"]
        _require_integers(configuration, ("sets", "seed", "max_bytes"))
        sizes = configuration["sizes"]
        for layer, head in configuration.get("heads", []):
            _require_integers({"layer": layer, "head": head}, ("layer", "head"))
        if manifest["status"] == "complete":
            for entry in manifest["sizes"]:
                _require_integers(entry, ("size", *COUNTS, "kept"))
            for entry in manifest["shards"]:
                _require_integers(entry, ("size", "unit", "kept", "bytes"))
                str.encode(entry["sha256"])
            if [entry["size"] for entry in manifest["sizes"]] != sizes:
                raise ValueError("sizes differ from the configuration's")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as failure:
        raise CalibrateError(
            f"{path} is not a manifest ({failure!r}); restore it or collect into a new folder"
        ) from failure
    if known != (FORMAT, SCHEMA_VERSION):
        raise CalibrateError(
            f"{path} says {known[0]} {known[1]}, expected {FORMAT} {SCHEMA_VERSION}; "
            "collect again with this version of calibrate"
        )
    return manifest


def _require_integers(mapping: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if type(mapping[key]) is not int:
            raise ValueError(f"{key} is {mapping[key]!r}, not an integer")


def refuse_bad_rows(manifest: dict[str, Any]) -> None:
    """Raises QualityError if more than 1 % of a collection's rows are bad."""
    totals = {name: sum(size[name] for size in manifest["sizes"]) for name in COUNTS}
    bad = {name: totals[name] for name in BAD if totals[name]}
    if sum(bad.values()) > MAX_BAD_SHARE * totals["rows"]:
        reasons = ", ".join(f"{count} {name}" for name, count in bad.items())
        raise QualityError(
            f"{sum(bad.values())} of {totals['rows']} rows are bad ({reasons}), more than "
            f"{MAX_BAD_SHARE:.0%}; look at the head's logits before calibrating it"
        )


def write_manifest(
    folder: Path, configuration: dict[str, Any], receipts: list[Receipt] | None
) -> None:
    """Writes the manifest: partial without receipts, complete with all of them."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "status": "partial" if receipts is None else "complete",
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
    text = json.dumps(manifest, indent=1, ensure_ascii=True) + "\n"
    remove_leftovers(folder, MANIFEST)
    write_whole(folder / MANIFEST, text.encode())


def _size_counts(size: int, receipts: list[Receipt]) -> dict[str, int]:
    totals = {name: sum(r.counts[name] for r in receipts) for name in COUNTS}
    return {"size": size, **totals, "kept": sum(r.kept for r in receipts)}
