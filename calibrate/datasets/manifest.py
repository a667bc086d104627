"""The manifest of a collection: what the collection is made of, and the shards that it lists.

A collection is a folder with a shard for each unit of work, an npz file, and `manifest.json`: its
`format`, `schema_version`, `status`, and the `configuration` that determines every byte, without
times, hosts or paths. Once the collection is complete, the manifest lists each shard with its
size and digest. Each kind of collection is a subclass of `Collection`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from calibrate.errors import CoefficientsError, DamagedError
from calibrate.storage.json_shapes import TEXT, Integer, Shape, Word, read_field
from calibrate.storage.npz import read_bytes, sha256_of
from calibrate.storage.strict_json import parse
from calibrate.store.coefficient_schema import DIGEST

MANIFEST = "manifest.json"
MAX_SHARDS = 30_000  # hours of work
# Limits within which a manifest of MAX_SHARDS shards fits.
MAX_MANIFEST_BYTES = 1 << 23
_MAX_VALUES = 1 << 19
SCHEMA_VERSION = "0.1"
PARTIAL = "partial"
COMPLETE = "complete"
RESTORE = "restore it or collect into a new folder"
REPAIR = "the same `calibrate collect` command as before repairs it"

COUNT = Integer(0, (1 << 62) - 1)  # bytes, rows, items or tokens
FILE: dict[str, Shape] = {"bytes": COUNT, "sha256": DIGEST}

# By format: what a folder holds, and whose commands read it.
_HOLDS = {
    "calibrate.collection": ("rows of a head", "calibrate"),
    "calibrate.examples": ("examples of a model", "calibrate model"),
}

Entry = dict[str, Any]  # a shard as the manifest lists it
Column = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class Collection:
    """A collection; complete, unless it was opened with `allow_partial`."""

    kind: ClassVar[str]
    format: ClassVar[str]
    names: ClassVar[str]  # a pattern: of paths in the folder, beside manifest and lock

    folder: Path
    manifest: dict[str, Any]
    digest: str  # of the manifest, and so of every shard
    in_memory: Any = None  # what the shards hold; None: they are in the folder

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration, which determines the collection."""
        configuration: dict[str, Any] = self.manifest["configuration"]
        return configuration

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the head, the logits or the model."""
        return str(self.configuration["fingerprint"])

    @property
    def partial(self) -> bool:
        """True if it was not finished."""
        return bool(self.manifest["status"] != COMPLETE)

    @staticmethod
    def checked(manifest: dict[str, Any]) -> dict[str, Any]:
        """A manifest in canonical spelling; CoefficientsError or ValueError if it is wrong."""
        raise NotImplementedError

    @staticmethod
    def listing(configuration: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
        """The entries of all shards in the manifest."""
        raise NotImplementedError

    @staticmethod
    def manifest_entries(manifest: dict[str, Any]) -> dict[str, Entry]:
        """The entries of a complete collection by the names of their shards."""
        raise NotImplementedError


def manifest_text(
    kind: type[Collection],
    configuration: dict[str, Any],
    entries: Sequence[Entry] | None,
    status: str,
) -> str:
    """The text of a manifest, which lists shards if entries are given."""
    manifest: dict[str, Any] = {
        "format": kind.format,
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "configuration": configuration,
    }
    if entries is not None:
        manifest |= kind.listing(configuration, entries)
    return json.dumps(manifest, indent=1) + "\n"


def read_manifest(folder: Path, kinds: Sequence[type[Collection]]) -> Collection | None:
    """The manifest of a folder, finished or not; None if there is none.

    Raises:
      DamagedError: the manifest is of no such kind or version, or contradicts itself.
      CalibrateError: it cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    data = read_bytes(path, MAX_MANIFEST_BYTES, RESTORE)
    manifest, kind = parse_manifest(data, path, kinds)
    return kind(folder, manifest, sha256_of(data))


def parse_manifest(
    data: bytes, path: Path, kinds: Sequence[type[Collection]]
) -> tuple[dict[str, Any], type[Collection]]:
    """The manifest in the bytes of a file, and its kind; see `read_manifest`."""
    try:
        if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_VALUES:  # each takes far more memory
            raise ValueError(f"it has more than {_MAX_VALUES:,} values")
        manifest = parse(data)
        version = " ".join(read_field(manifest, key, TEXT) for key in ("format", "schema_version"))
        expected = {f"{kind.format} {SCHEMA_VERSION}": kind for kind in kinds}
        if version not in expected:
            if version.removesuffix(f" {SCHEMA_VERSION}") in _HOLDS:
                what, command = _HOLDS[manifest["format"]]
                raise DamagedError(
                    f"{path.parent} holds {what}; use `{command} fit`, or collect into a new folder"
                )
            raise DamagedError(
                f"{path} is {version}, expected {' or '.join(expected)}; use the command "
                "for its kind, or collect into a new folder"
            )
        kind = expected[version]
        read_field(manifest, "status", Word((PARTIAL, COMPLETE)))
        checked = kind.checked(manifest)
    except (CoefficientsError, ValueError) as failure:
        raise DamagedError(f"{path} is not a manifest ({failure}); {RESTORE}") from failure
    return checked, kind


def entry_of(data: bytes) -> Entry:
    """The entry of a file with these bytes."""
    return {"bytes": len(data), "sha256": sha256_of(data)}


def listed_bytes(path: Path, entry: Mapping[str, Any], most: float = math.inf) -> bytes:
    """A file's bytes, which are those that the manifest lists.

    Args:
      most: the largest size allowed, whatever is listed.
    Raises:
      DamagedError: the file is absent, too large, or has another digest.
    """
    if not path.exists():
        raise DamagedError(f"{path} is missing; {REPAIR}")
    data = read_bytes(path, int(min(entry["bytes"], most)), REPAIR)
    if sha256_of(data) != entry["sha256"]:
        raise DamagedError(
            f"{path} is not the file that {MANIFEST} lists: it was damaged or replaced; {REPAIR}"
        )
    return data


def check_arrays(arrays: dict[str, np.ndarray], path: Path, expected: dict[str, Column]) -> None:
    """Raises DamagedError unless exactly these arrays are there."""
    actual = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    required = {name: (np.dtype(dtype), shape) for name, (dtype, shape) in expected.items()}
    require(actual == required, path, f"its arrays are {actual}, expected {required}")


def require(condition: bool | np.bool_, path: Path, error: str) -> None:
    """Raises DamagedError with a description unless a condition is true."""
    if not condition:
        raise DamagedError(f"{path}: {error}; {REPAIR}")
