"""Audit of a collection: every file of its folder against the manifest and the format.

The manifest of an unfinished collection lists no shards: each is checked by itself.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CalibrateError, DamagedError
from calibrate.files.collection import (
    Collection,
    Receipt,
    manifest_text,
    open_collection,
    read_manifest,
    read_shard,
    receipt_of,
)
from calibrate.files.manifest import COUNTS, MANIFEST
from calibrate.files.npz import digest_of, read_bytes
from calibrate.files.shard import Shard, parse_unlisted, require, shard_path

BAD, MISSING, FOREIGN = "bad", "missing", "foreign"

_SHARD_NAME = re.compile(r"n([0-9]{5,10})-unit([0-9]{5,10})\.npz")


class Fault(NamedTuple):
    """A damaged, missing or foreign file."""

    path: Path
    kind: str  # BAD, MISSING or FOREIGN
    error: str  # one printable line


class Audit(NamedTuple):
    """The result of the audit of a collection."""

    folder: Path
    status: str  # of the collection: partial or complete
    sound: int  # intact shards
    faults: list[Fault]


def audit_collection(folder: Path) -> Audit:
    """Checks every file of a collection, finished or not.

    Raises:
      CalibrateError: the folder has no manifest, or a damaged one.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CalibrateError(f"{folder} is not a collection; give a folder with a {MANIFEST}")
    complete = manifest["status"] == "complete"
    known, intact, faults = set(), 0, []
    for path, result in (_listed if complete else _unlisted)(folder, manifest):
        known.add(path.name)
        if isinstance(result, CalibrateError):
            faults.append(Fault(path, BAD if path.exists() else MISSING, str(result)))
        else:
            intact += 1
    # Hidden files are the lock, and what a killed process left of an attempt.
    names = {name for name in os.listdir(folder) if not name.startswith(".")} - known - {MANIFEST}
    for path in (folder / name for name in sorted(names)):
        error = CalibrateError(f"{path} is not part of this collection; move it out")
        faults.append(Fault(path, FOREIGN, str(error)))
    return Audit(folder, manifest["status"], intact, faults)


def _listed(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[Path, CalibrateError | None]]:
    """Each shard of a complete collection and its error, if any; then the manifest's error."""
    seen: Counter[tuple[int, str]] = Counter()
    faults = 0
    for entry in manifest["shards"]:
        path = shard_path(folder, entry["size"], entry["unit"])
        try:
            shard = read_shard(folder, entry)
            _check_heads(shard, path, manifest["configuration"])
        except CalibrateError as failure:
            faults += 1
            yield path, failure
            continue
        counts = zip(COUNTS, shard.counts.tolist(), strict=True)
        seen.update({(entry["size"], name): count for name, count in counts})
        yield path, None
    listed = {(size["size"], name): size[name] for size in manifest["sizes"] for name in COUNTS}
    if not faults and any(seen[key] != count for key, count in listed.items()):
        yield (
            folder / MANIFEST,
            DamagedError(
                f"{folder / MANIFEST}: its counts differ from those of its shards; restore it or "
                "collect into a new folder"
            ),
        )


def _unlisted(
    folder: Path, manifest: dict[str, Any]
) -> Iterator[tuple[Path, Receipt | CalibrateError]]:
    """Each shard of an unfinished collection, in order: its receipt, or its error."""
    configuration = manifest["configuration"]
    last: dict[int, int] = {}  # index of the last row so far, by size
    for size, unit in sorted(filter(None, map(_size_and_unit, os.listdir(folder)))):
        if size not in configuration["sizes"]:
            continue
        path = shard_path(folder, size, unit)
        try:
            data = read_bytes(path, configuration["max_bytes"])
            shard = parse_unlisted(data, path, size)
            index = shard.index.tolist()
            valid = not index or last.get(size, -1) < index[0] <= index[-1] < configuration["sets"]
            require(valid, path, "its rows are of other sets than those of its file name")
            _check_heads(shard, path, configuration)
        except CalibrateError as failure:
            yield path, failure
            continue
        last[size] = index[-1] if index else last.get(size, -1)
        yield path, receipt_of(size, unit, shard, data)


def _check_heads(shard: Shard, path: Path, configuration: dict[str, Any]) -> None:
    """Raises DamagedError unless the rows are of the heads in the configuration, if any."""
    heads = {(layer, head) for layer, head in configuration.get("heads", [])}
    unknown = shard.layer is None or shard.head is None
    valid = not heads if unknown else shard.heads <= heads
    require(valid, path, f"its rows are of other heads than those in {MANIFEST}")


def _size_and_unit(name: str) -> tuple[int, int] | None:
    """(size, unit) of a shard's file name; None of other files."""
    match = _SHARD_NAME.fullmatch(name)
    if not match:
        return None
    size, unit = int(match[1]), int(match[2])
    return (size, unit) if shard_path(Path(), size, unit).name == name else None


def open_unfinished(folder: Path) -> Collection:
    """Opens a collection; an unfinished one has its finished shards.

    The digest of an unfinished one is that of a manifest which lists these shards.

    Raises:
      CalibrateError: the folder has no manifest, no shard yet, or a damaged one.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest["status"] == "complete":
        return open_collection(folder)
    receipts = []
    for _, result in _unlisted(folder, manifest):
        if isinstance(result, CalibrateError):
            raise result
        receipts.append(result)
    if not receipts:
        raise CalibrateError(
            f"{folder} has no shard yet; run the same `calibrate collect` command again"
        )
    text = manifest_text(manifest["configuration"], receipts, "partial")
    return Collection(folder, json.loads(text), digest_of(text.encode()))
