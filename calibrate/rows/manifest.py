"""The manifest of a collection: its configuration, and the list of its shards.

A collection is a folder with an npz file, a shard, for each unit of work, and `manifest.json`. The
manifest has `format`, `schema_version`, `status`, and the `configuration` that determines every
byte of the collection; it has no times, hosts or paths. The manifest of a complete collection also
lists each shard with its size and digest. Each kind of collection is a subclass of `Collection`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from msgspec import Struct

from calibrate.errors import CoefficientsError, DamagedError
from calibrate.storage.fingerprints import sha256_of
from calibrate.storage.npz import read_bytes
from calibrate.storage.strict_json import Count, Digest, convert, parse

MANIFEST = "manifest.json"
MANIFEST_VERSION = "0.1"
PARTIAL = "partial"
COMPLETE = "complete"
MAX_SHARDS = 30_000  # hours of work; a manifest of so many fits in the next limit
MAX_MANIFEST_BYTES = 1 << 23

RESTORE = "restore it or collect into a new folder"

# By format: the contents of a folder, and the command that reads them.
_CONTENTS = {
    "calibrate.collection": ("rows of a head", "calibrate"),
    "calibrate.examples": ("examples of a model", "calibrate model"),
}

ShardEntry = dict[str, Any]  # a shard as the manifest lists it
ArrayType = tuple[str, tuple[int, ...]]  # dtype and shape


class ListedFile(Struct, forbid_unknown_fields=True):
    """A file as a manifest lists it."""

    bytes: Count
    sha256: Digest


@dataclass(frozen=True)
class Collection:
    """A collection."""

    kind: ClassVar[str]
    format: ClassVar[str]
    names: ClassVar[str]  # regular expression: paths in the folder beside manifest and lock

    folder: Path
    manifest: dict[str, Any]
    digest: str  # of the manifest, and therefore of every shard
    in_memory: Any = None  # the contents of the shards; None: they are in the folder

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
        """True if the collection is unfinished."""
        return bool(self.manifest["status"] != COMPLETE)

    @staticmethod
    def checked(manifest: dict[str, Any]) -> dict[str, Any]:
        """The manifest in canonical form; raises CoefficientsError or ValueError if invalid."""
        raise NotImplementedError

    @staticmethod
    def listing(configuration: dict[str, Any], entries: Sequence[ShardEntry]) -> dict[str, Any]:
        """The fields of a complete manifest that list its shards."""
        raise NotImplementedError


Kind = TypeVar("Kind", bound=Collection)


def manifest_text(
    kind: type[Collection],
    configuration: dict[str, Any],
    entries: Sequence[ShardEntry] | None,
    status: str,
) -> str:
    """The text of a manifest; it lists the shards if entries are given."""
    manifest: dict[str, Any] = {
        "format": kind.format,
        "schema_version": MANIFEST_VERSION,
        "status": status,
        "configuration": configuration,
    }
    if entries is not None:
        manifest |= kind.listing(configuration, entries)
    return json.dumps(manifest, indent=1) + "\n"


def read_manifest(folder: Path, kind: type[Kind]) -> Kind | None:
    """Reads the collection in a folder, finished or not; None if there is no manifest.

    Raises:
      DamagedError: the manifest is of another kind or version, or invalid.
      CalibrateError: it cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    data = read_bytes(path, MAX_MANIFEST_BYTES, RESTORE)
    return kind(folder, parse_manifest(data, path, kind), sha256_of(data))


def parse_manifest(data: bytes, path: Path, kind: type[Collection]) -> dict[str, Any]:
    """The manifest of a kind of collection from the bytes of a file; see `read_manifest`."""
    try:
        manifest: dict[str, Any] = convert(parse(data), dict[str, Any], RESTORE)
        if type(manifest.get("schema_version")) is not str:
            raise ValueError(f"schema_version is {manifest.get('schema_version')!r}")
        version = f"{manifest.get('format')} {manifest['schema_version']}"
        if version != f"{kind.format} {MANIFEST_VERSION}":
            raise _another_version(path, version, kind)
        if manifest.get("status") not in (PARTIAL, COMPLETE):
            raise ValueError(f"status is {manifest.get('status')!r}")
        return kind.checked(manifest)
    except (CoefficientsError, ValueError) as failure:
        raise DamagedError(f"{path} is not a manifest ({failure}); {RESTORE}") from failure


def _another_version(path: Path, version: str, kind: type[Collection]) -> DamagedError:
    """The error for a manifest of another kind or version."""
    given = version.removesuffix(f" {MANIFEST_VERSION}")
    if given in _CONTENTS:
        contents, command = _CONTENTS[given]
        return DamagedError(
            f"{path.parent} holds {contents}; use `{command} fit`, or collect into a new folder"
        )
    return DamagedError(
        f"{path} is {version}, expected {kind.format} {MANIFEST_VERSION}; use the command for its "
        "kind, or collect into a new folder"
    )


def entry_of(data: bytes) -> ShardEntry:
    """The entry of a file with these bytes."""
    return {"bytes": len(data), "sha256": sha256_of(data)}


def listed_bytes(path: Path, entry: Mapping[str, Any], most: float = math.inf) -> bytes:
    """Reads a file and checks it against its entry in the manifest.

    Args:
      most: the largest size allowed, whatever is listed.
    Raises:
      DamagedError: the file is absent, too large, or has another digest.
    """
    if not path.exists():
        raise DamagedError(f"{path} is missing; {RESTORE}")
    data = read_bytes(path, int(min(entry["bytes"], most)), RESTORE)
    if sha256_of(data) != entry["sha256"]:
        raise DamagedError(
            f"{path} is not the file that {MANIFEST} lists: it was damaged or replaced; {RESTORE}"
        )
    return data


def check_arrays(arrays: dict[str, np.ndarray], path: Path, expected: dict[str, ArrayType]) -> None:
    """Raises DamagedError unless a file has exactly these arrays."""
    actual = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    required = {name: (np.dtype(dtype), shape) for name, (dtype, shape) in expected.items()}
    require(actual == required, path, f"its arrays are {actual}, expected {required}")


def require(condition: bool | np.bool_, path: Path, error: str) -> None:
    """Raises DamagedError with a description unless a condition is true."""
    if not condition:
        raise DamagedError(f"{path}: {error}; {RESTORE}")
