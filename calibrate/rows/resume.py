"""Resumable collections: makes and discards the shards of a folder.

The manifest is written when a collection starts ("partial", with its configuration) and again when
it is complete. Each shard is written atomically, so that the shards present are the progress. The
folder also has a lock, an empty file.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple

from calibrate.errors import CalibrateError, DamagedError, warn_user
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.manifest import (
    MANIFEST,
    Collection,
    Kind,
    ShardEntry,
    manifest_text,
    read_manifest,
)
from calibrate.storage.atomic_io import (
    LOCK,
    check_writable,
    locked,
    remove_leftovers,
    write_atomically,
)


class Shard(NamedTuple):
    """A shard of a collection; another process can make it."""

    name: str  # of the file
    make: Callable[[], tuple[bytes, ShardEntry]]
    read_entry: Callable[[bytes, Path], ShardEntry]  # of the file that an earlier run wrote
    work: float  # for progress


@dataclass(frozen=True)
class Plan(Generic[Kind]):
    """The contents of a collection that is to be made."""

    stage: str  # name of the work in progress displays
    kind: type[Kind]
    configuration: dict[str, Any]
    shards: Sequence[Shard]
    files: Mapping[str, bytes] = field(default_factory=dict)  # beside the shards


def run_units(
    folder: Path, plan: Plan[Kind], jobs: Jobs = ONE_PROCESS, progress: Progress = SILENT
) -> Kind:
    """Makes the shards of a plan and writes each into the folder when it is done.

    The same plan resumes an interrupted collection, and leaves a complete one unchanged.

    Args:
      folder: new, or with an earlier run of the same plan.
      plan: of the collection.
      jobs: processes or cluster that make the shards.
      progress: advances for each missing shard once it is written.
    Raises:
      CalibrateError: the folder holds something else or cannot be written.
    """
    if not _is_complete(folder, plan):
        with _collection_lock(folder):
            if not _is_complete(folder, plan):  # another process may have finished it
                _make_shards(folder, plan, jobs, progress)
    return open_collection(folder, plan.kind)


def _is_complete(folder: Path, plan: Plan[Any]) -> bool:
    """True if the folder has the whole collection, False if it is unfinished or absent.

    Raises:
      CalibrateError: the folder is not empty and is not this collection.
    """
    collection = read_manifest(folder, plan.kind)
    if collection is None:
        if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise CalibrateError(f"{folder} is not a collection and not empty; choose a new folder")
        return False
    if differences := list(_differences(collection.configuration, plan.configuration)):
        raise CalibrateError(
            f"{folder} is another collection: {'; '.join(differences)}; a collection is not "
            "extended: give the same options, another folder with folder=, or overwrite=True to "
            "replace it",
            parameter=("folder", "overwrite"),
        )
    return not collection.partial


def _differences(recorded: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """Describes each value of a configuration that differs from that of a folder."""
    for key in {**given, **recorded}:
        before, now = recorded.get(key), given.get(key)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now)
        elif key == "fingerprint":
            yield "the head, the logits or the model has changed (its fingerprint differs)"
        else:
            yield f"{key} is {before!r:.100} in the folder and {now!r:.100} in this call"


def _make_shards(folder: Path, plan: Plan[Any], jobs: Jobs, progress: Progress) -> None:
    """Makes the files and the shards that are missing, and lists all shards in the manifest."""

    def write_manifest(entries: Sequence[ShardEntry] | None) -> None:
        text = manifest_text(plan.kind, plan.configuration, entries)
        write_atomically(folder / MANIFEST, text.encode())

    write_manifest(None)
    for name, data in plan.files.items():
        write_atomically(folder / name, data)
    absolute = folder.absolute()  # workers may have another working folder
    entries, missing = dict[str, ShardEntry](), list[Shard]()
    for shard in plan.shards:
        if entry := _entry_on_disk(folder / shard.name, shard):
            entries[shard.name] = entry
        else:
            missing.append(shard)
    works = {shard.name: shard.work for shard in missing}
    progress.begin(plan.stage, len(missing), sum(works.values()))
    tasks = [partial(_make_shard, absolute, shard) for shard in missing]
    entries |= run(tasks, jobs, lambda made: progress.advance(works[made[0]]))
    write_manifest([entries[shard.name] for shard in plan.shards])


def _entry_on_disk(path: Path, shard: Shard) -> ShardEntry | None:
    """The entry of a shard that an earlier run wrote; None if it is absent or damaged."""
    if not path.exists():
        return None
    try:
        return shard.read_entry(path.read_bytes(), path)
    except DamagedError:
        warn_user(f"{path} is damaged; it is collected again")
        return None


def _make_shard(folder: Path, shard: Shard) -> tuple[str, ShardEntry]:
    """Makes and writes a shard; its name and entry."""
    data, entry = shard.make()
    write_atomically(folder / shard.name, data)
    return shard.name, entry


@contextlib.contextmanager
def _collection_lock(folder: Path) -> Iterator[None]:
    """Locks a folder that is written to; other processes wait."""
    message = f"another process is collecting into {folder}; waiting for it to finish"
    check_writable(folder / MANIFEST)
    with locked(folder, waiting=lambda: warn_user(message)) as has_locks:
        if has_locks:
            remove_leftovers(folder)
        yield


def discard_collection(folder: Path, kind: type[Collection] = RowCollection) -> None:
    """Deletes a collection of a kind, if there is one; its lock stays.

    The manifest is deleted last: until then, the same command can resume the deletion.

    Raises:
      CalibrateError: the folder has another collection, or a file that no collection of this kind
        writes; nothing is deleted.
    """
    if read_manifest(folder, kind) is None:
        return
    with _collection_lock(folder):
        paths = sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST)
        for path in paths:
            if path.name not in (MANIFEST, LOCK) and not re.fullmatch(kind.names, path.name):
                raise CalibrateError(
                    f"{path} is not part of a collection, and nothing is deleted; move it away, or "
                    "choose another folder"
                )
        for path in paths:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                os.unlink(path)
