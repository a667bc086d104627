"""What is in a collection's folder: every shard against the manifest and the format.

Of an unfinished collection the manifest lists no shard: what is there is checked by itself.
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
    """A file that is not as it should be."""

    path: Path
    kind: str  # BAD, MISSING or FOREIGN
    error: str  # in words, one printable line


class Audit(NamedTuple):
    """What the audit of a collection came to."""

    folder: Path
    status: str  # of the collection: partial or complete
    sound: int  # shards
    faults: list[Fault]


def audit_collection(folder: Path) -> Audit:
    """Checks every file of a collection, finished or not.

    Raises:
      CalibrateError: there is none, or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CalibrateError(f"{folder} holds no collection; give a folder with a {MANIFEST}")
    complete = manifest["status"] == "complete"
    known, sound, faults = set(), 0, []
    for path, found in (_listed if complete else _unlisted)(folder, manifest):
        known.add(path.name)
        if isinstance(found, CalibrateError):
            faults.append(Fault(path, BAD if path.exists() else MISSING, str(found)))
        else:
            sound += 1
    # Hidden files are the lock, and what a killed process left of an attempt.
    names = {name for name in os.listdir(folder) if not name.startswith(".")} - known - {MANIFEST}
    for path in (folder / name for name in sorted(names)):
        what = CalibrateError(f"{path} is not of this collection; move it away")
        faults.append(Fault(path, FOREIGN, str(what)))
    return Audit(folder, manifest["status"], sound, faults)


def _listed(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[Path, CalibrateError | None]]:
    """Every shard of a complete collection, and what is wrong with it; last the manifest."""
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
    said = {(size["size"], name): size[name] for size in manifest["sizes"] for name in COUNTS}
    if not faults and any(seen[key] != count for key, count in said.items()):
        yield (
            folder / MANIFEST,
            DamagedError(
                f"{folder / MANIFEST}: its counts are not those of its shards; restore it or "
                "collect into a new folder"
            ),
        )


def _unlisted(
    folder: Path, manifest: dict[str, Any]
) -> Iterator[tuple[Path, Receipt | CalibrateError]]:
    """Every shard of an unfinished collection, in order, and what it holds or why it is none."""
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
            apart = not index or last.get(size, -1) < index[0] <= index[-1] < configuration["sets"]
            require(apart, path, "its rows are of other sets than its name says")
            _check_heads(shard, path, configuration)
        except CalibrateError as failure:
            yield path, failure
            continue
        last[size] = index[-1] if index else last.get(size, -1)
        yield path, receipt_of(size, unit, shard, data)


def _check_heads(shard: Shard, path: Path, configuration: dict[str, Any]) -> None:
    """Raises DamagedError unless the rows are of the heads that are said, if any are."""
    said = {(layer, head) for layer, head in configuration.get("heads", [])}
    if shard.layer is None or shard.head is None:
        right = not said
    else:
        right = said.issuperset(zip(shard.layer.tolist(), shard.head.tolist(), strict=True))
    require(right, path, f"its rows are of other heads than {MANIFEST} says")


def _size_and_unit(name: str) -> tuple[int, int] | None:
    """What a shard's name says; None if it is no shard's."""
    match = _SHARD_NAME.fullmatch(name)
    found = (int(match[1]), int(match[2])) if match else None
    return found if found and shard_path(Path(), *found).name == name else None


def open_unfinished(folder: Path) -> Collection:
    """Opens a collection, and an unfinished one as that of the shards which are there.

    Its digest is then that of the manifest which it would have: of what was used.

    Raises:
      CalibrateError: there is none, it has no shard yet, or one is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest["status"] == "complete":
        return open_collection(folder)
    receipts = []
    for _, found in _unlisted(folder, manifest):
        if isinstance(found, CalibrateError):
            raise found
        receipts.append(found)
    if not receipts:
        raise CalibrateError(
            f"{folder} has no shard yet; run the same `calibrate collect` command again"
        )
    text = manifest_text(manifest["configuration"], receipts, "partial")
    return Collection(folder, json.loads(text), digest_of(text.encode()))
