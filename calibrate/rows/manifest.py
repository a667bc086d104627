"""The manifest of a collection: its configuration, and the list of its shards.

A collection is a folder with an npz file, a shard, for each unit of work, and `manifest.json`. The
manifest has `format`, `schema_version`, `status`, and the `configuration` that determines every
byte of the collection; it has no times, hosts or paths. The manifest of a complete collection also
lists each shard with its size and digest. Each kind of collection is a subclass of `Collection`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from calibrate.errors import DamagedError
from calibrate.storage.fingerprints import sha256_of

MANIFEST = "manifest.json"
MANIFEST_VERSION = "0.1"
PARTIAL = "partial"
COMPLETE = "complete"

RESTORE = "restore it or collect into a new folder"

# By format: the command that reads such a collection.
_COMMANDS = {"calibrate.collection": "calibrate fit", "calibrate.examples": "calibrate model fit"}

ShardEntry = dict[str, Any]  # a shard as the manifest lists it


@dataclass(frozen=True)
class Collection:
    """A collection."""

    format: ClassVar[str]
    names: ClassVar[str]  # regular expression: files in the folder beside manifest and lock

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
    def listing(configuration: dict[str, Any], entries: Sequence[ShardEntry]) -> dict[str, Any]:
        """The fields of a complete manifest that list its shards."""
        raise NotImplementedError


Kind = TypeVar("Kind", bound=Collection)


def manifest_text(
    kind: type[Collection], configuration: dict[str, Any], entries: Sequence[ShardEntry] | None
) -> str:
    """The text of a manifest: of a complete collection with these shards, or of a partial one."""
    manifest: dict[str, Any] = {
        "format": kind.format,
        "schema_version": MANIFEST_VERSION,
        "status": PARTIAL if entries is None else COMPLETE,
        "configuration": configuration,
    }
    if entries is not None:
        manifest |= kind.listing(configuration, entries)
    return json.dumps(manifest, indent=1) + "\n"


def read_manifest(folder: Path, kind: type[Kind]) -> Kind | None:
    """Reads the collection in a folder, finished or not; None if there is no manifest.

    Raises:
      DamagedError: the manifest is of another kind or version, or not JSON.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
        given = f"{manifest['format']} {manifest['schema_version']}"
        _ = manifest["status"], manifest["configuration"]
    except (ValueError, TypeError, KeyError) as failure:
        raise DamagedError(f"{path} is not a manifest; {RESTORE}") from failure
    if given != f"{kind.format} {MANIFEST_VERSION}":
        command = _COMMANDS.get(given.removesuffix(f" {MANIFEST_VERSION}"))
        remedy = f"use `{command}`, or" if command else "use the command for its kind, or"
        raise DamagedError(
            f"{path} is {given}, expected {kind.format} {MANIFEST_VERSION}; {remedy} collect into "
            "a new folder"
        )
    return kind(folder, manifest, sha256_of(data))


def entry_of(data: bytes) -> ShardEntry:
    """The entry of a file with these bytes."""
    return {"bytes": len(data), "sha256": sha256_of(data)}


def listed_bytes(path: Path, entry: Mapping[str, Any]) -> bytes:
    """Reads a file; DamagedError unless it is the one that the manifest lists."""
    data = path.read_bytes() if path.exists() else b""
    if sha256_of(data) != entry["sha256"]:
        raise DamagedError(
            f"{path} is missing, damaged or replaced: {MANIFEST} lists another file; {RESTORE}"
        )
    return data
