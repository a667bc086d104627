"""The manifest of a collection: strict reading."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError

FORMAT = "calibrate.collection"
SCHEMA_VERSION = "0.1"
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 26  # 250,000 shards
BAD = ("nan", "inf", "masked_target")
COUNTS = ("rows", "misranked", "ties", *BAD)
STATUS = ("partial", "complete")

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_COUNT = 1 << 62  # of bytes, rows or items


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """The manifest in the bytes of a file.

    Raises:
      CalibrateError: it is not a manifest, its numbers contradict each other or are out of
        range, or it has another version.
    """
    try:
        manifest = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse)
        known = manifest["format"], manifest["schema_version"]
        if known != (FORMAT, SCHEMA_VERSION):
            raise CalibrateError(
                f"{path} says {known[0]} {known[1]}, expected {FORMAT} {SCHEMA_VERSION}; "
                "collect again with this version of calibrate"
            )
        _require_one_of(manifest["status"], STATUS, "status")
        _check_configuration(manifest["configuration"])
        if manifest["status"] == "complete":
            _check_counts(manifest)
            _check_shards(manifest)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as failure:
        raise CalibrateError(
            f"{path} is not a manifest ({failure!r}); restore it or collect into a new folder"
        ) from failure
    return dict(manifest)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError(f"two of the keys {[key for key, _ in pairs]} are the same")
    return mapping


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _check_configuration(configuration: dict[str, Any]) -> None:
    for key in ("head", "fingerprint"):
        str.encode(configuration[key])
    _require_counts(configuration, ("sets", "max_bytes"))
    if type(configuration["seed"]) is not int:  # of any size, as long as it is drawn from
        raise ValueError(f"seed is {configuration['seed']!r}, not an integer")
    _require_one_of(configuration.get("keep", "misranked"), ("misranked", "all"), "keep")
    sizes = configuration["sizes"]
    _require_counts(dict(enumerate(sizes)), range(len(sizes)))
    if not sizes or sizes != sorted(set(sizes)) or not 2 <= sizes[0] <= sizes[-1] < 1 << 31:
        raise ValueError(f"sizes are {sizes!r}, not rising from 2 on")
    for layer, head in configuration.get("heads", []):
        for index in (layer, head):
            if type(index) is not int or not -1 <= index < 1 << 15:
                raise ValueError(f"heads has {index!r}, not an index of a head")


def _check_counts(manifest: dict[str, Any]) -> None:
    """What was seen of each size."""
    for entry in manifest["sizes"]:
        _require_counts(entry, ("size", *COUNTS, "kept"))
        apart = sum(entry[name] for name in COUNTS if name != "rows")  # a row is one of these
        if max(apart, entry["kept"]) > entry["rows"]:
            raise ValueError(f"of {entry['rows']} rows, {apart} and {entry['kept']} are not some")
    if [entry["size"] for entry in manifest["sizes"]] != manifest["configuration"]["sizes"]:
        raise ValueError("sizes differ from the configuration's")


def _check_shards(manifest: dict[str, Any]) -> None:
    kept: Counter[int] = Counter()
    for entry in manifest["shards"]:
        _require_counts(entry, ("size", "unit", "kept", "bytes"))
        if not _DIGEST.fullmatch(entry["sha256"]):
            raise ValueError(f"sha256 is {entry['sha256']!r}")
        if 4 * entry["size"] * entry["kept"] > entry["bytes"]:
            raise ValueError(f"{entry['kept']} rows of {entry['size']} in {entry['bytes']} bytes")
        kept[entry["size"]] += entry["kept"]
    shards = manifest["shards"]
    if len({(entry["size"], entry["unit"]) for entry in shards}) < len(shards):
        raise ValueError("a shard is listed twice")
    if kept - Counter({entry["size"]: entry["kept"] for entry in manifest["sizes"]}) or (
        sum(kept.values()) != sum(entry["kept"] for entry in manifest["sizes"])
    ):
        raise ValueError("the rows of the shards are not those of the sizes")
    if sum(entry["bytes"] for entry in shards) > manifest["configuration"]["max_bytes"]:
        raise ValueError("the shards have more bytes than max_bytes")


def _require_counts(mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
    for key in keys:
        if type(mapping[key]) is not int or not 0 <= mapping[key] < _MAX_COUNT:
            raise ValueError(f"{key} is {mapping[key]!r}, not an integer of rows, items or bytes")


def _require_one_of(value: Any, words: tuple[str, ...], key: str) -> None:
    if value not in words:
        raise ValueError(f"{key} is {value!r}, expected {' or '.join(words)}")
