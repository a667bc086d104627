"""Resumable collections: makes and discards the shards of a folder.

The manifest is written when a collection starts ("partial", with its configuration) and again when
it is complete. Each shard is written atomically, so that the shards present are the progress. The
folder also has a lock, an empty file.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from calibrate.errors import CalibrateError, CoefficientsError, DamagedError, warn_user
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.manifest import (
    COMPLETE,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    PARTIAL,
    Collection,
    Kind,
    ShardEntry,
    manifest_text,
    read_manifest,
)
from calibrate.storage import atomic_io
from calibrate.storage.npz import read_bytes
from calibrate.storage.strict_json import parse

Parsed = TypeVar("Parsed")
Options = Mapping[str, Any]


class Shard(NamedTuple):
    """A shard that is to be made; another process can make it."""

    name: str  # of the file
    most: int  # bytes
    # The entry of a shard from its bytes and path; DamagedError unless it is this unit's.
    check: Callable[[bytes, Path], ShardEntry]
    make: Callable[[], tuple[bytes, ShardEntry]]
    steps: Sequence[float]  # the work of each step, for progress


@dataclass(frozen=True)
class Plan(Generic[Kind]):
    """The contents of a collection that is to be made."""

    stage: str  # name of the work in progress displays
    kind: type[Kind]
    configuration: dict[str, Any]
    shards: Sequence[Shard]
    # From the recorded configuration: None if it is this one; otherwise names of files that have
    # changed since, and the options recorded and given.
    difference: Callable[[dict[str, Any]], tuple[Sequence[str], Options, Options] | None]
    files: Mapping[str, bytes] = field(default_factory=dict)  # beside the shards
    full: str = atomic_io.SPACE  # the remedy for a full disk


def run_units(
    folder: Path, plan: Plan[Kind], jobs: Jobs = ONE_PROCESS, progress: Progress = SILENT
) -> Kind:
    """Makes the shards of a plan and writes each into the folder when it is done.

    The same plan resumes an interrupted collection, and leaves a complete one unchanged.

    Args:
      folder: new, or with an earlier run of the same plan.
      plan: of the collection.
      jobs: processes or cluster that make the shards.
      progress: advances for each shard once it is written, or read in an unfinished collection.
    Raises:
      CalibrateError: the folder holds something else or cannot be written.
    Warns:
      UserWarning: a shard of an unfinished collection is damaged.
    """
    if len(plan.shards) > MAX_SHARDS:
        raise CalibrateError(
            f"{folder} would have {len(plan.shards):,} shards, more than the limit of "
            f"{MAX_SHARDS:,}; collect less, or into several folders"
        )
    if not _is_complete(folder, plan):
        with _collection_lock(folder, plan.kind):
            if not (folder / MANIFEST).exists():
                _begin_collection(folder, plan)
            if not _is_complete(folder, plan):  # another process may have finished it
                _make_shards(folder, plan, jobs, progress)
    return open_collection(folder, plan.kind)


def _begin_collection(folder: Path, plan: Plan[Any]) -> None:
    """Writes the manifest of an unfinished collection."""
    data = manifest_text(plan.kind, plan.configuration, None, PARTIAL).encode()
    try:  # an invalid manifest would be in the way of the next call
        plan.kind.checked(parse(data))
    except (CoefficientsError, ValueError) as failure:
        raise CalibrateError(f"cannot collect into {folder}: {failure}") from failure
    # On a file system without locks another process may come first: its configuration stays.
    with contextlib.suppress(FileExistsError):
        atomic_io.write_atomically(folder / MANIFEST, data, exclusive=True, full=plan.full)


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
    if difference := plan.difference(collection.configuration):
        raise _another_collection(folder, *difference)
    return not collection.partial


def _make_shards(folder: Path, plan: Plan[Any], jobs: Jobs, progress: Progress) -> None:
    """Makes the files and the shards that are missing, and lists them in the manifest."""
    for name, data in plan.files.items():
        atomic_io.write_atomically(folder / name, data)
    absolute = folder.absolute()  # workers may have another working folder
    tasks = [partial(_make_or_resume, absolute, shard, plan.full) for shard in plan.shards]
    by_name = {shard.name: shard for shard in plan.shards}
    steps = [work for shard in plan.shards for work in shard.steps]
    progress.begin(plan.stage, len(steps), sum(steps))

    def advance(done: tuple[str, ShardEntry, bool]) -> None:
        name, _, resumed = done
        for work in by_name[name].steps:
            progress.advance(work, resumed)

    entries = [entry for _, entry, _ in run(tasks, jobs, advance)]
    text = manifest_text(plan.kind, plan.configuration, entries, COMPLETE)
    atomic_io.write_atomically(folder / MANIFEST, text.encode(), full=plan.full)


def _make_or_resume(folder: Path, shard: Shard, full: str) -> tuple[str, ShardEntry, bool]:
    """The name and entry of a shard, and True if it was on disk already."""
    path = folder / shard.name
    if resumed := read_if_sound(path, shard.most, shard.check):
        return shard.name, resumed, True
    data, entry = shard.make()
    atomic_io.write_atomically(path, data, full=full)
    return shard.name, entry, False


def read_if_sound(
    path: Path, most: int, parse_bytes: Callable[[bytes, Path], Parsed]
) -> Parsed | None:
    """Reads and parses a file of at most so many bytes; None if it is absent or damaged.

    Raises:
      CalibrateError: it cannot be read.
    Warns:
      UserWarning: it is damaged.
    """
    if not path.exists():
        return None
    try:
        return parse_bytes(read_bytes(path, most), path)
    except DamagedError:
        warn_user(f"{path} is damaged; it is collected again")
        return None


def _another_collection(
    folder: Path, changed: Sequence[str], recorded: Options, given: Options
) -> CalibrateError:
    """The error for a folder that holds a collection with another configuration."""
    differences = [
        f"{name} has changed since {folder} was made (or is another one)" for name in changed
    ]
    for key in {**given, **recorded}:
        before, now = recorded.get(key), given.get(key)
        if before != now and not changed:
            differences.append(
                f"{key} is {before!r:.100} in the folder and {now!r:.100} in this call"
            )
    return CalibrateError(
        f"{folder} is another collection: {'; '.join(differences)}; a collection is not extended: "
        "give the same options, another folder with folder=, or overwrite=True to replace it",
        parameter=("folder", "overwrite"),
    )


@contextlib.contextmanager
def _collection_lock(folder: Path, kind: type[Collection]) -> Iterator[None]:
    """Locks a folder that is written to; other processes wait."""
    message = f"another process is collecting into {folder}; waiting for it to finish"
    names = rf"{re.escape(MANIFEST)}|{kind.names}"
    atomic_io.check_writable(folder / MANIFEST)
    with atomic_io.locked(folder, waiting=lambda: warn_user(message)) as has_locks:
        if has_locks:
            atomic_io.remove_leftovers(folder, names)
        yield
        if has_locks:  # leftovers of workers that died
            atomic_io.remove_leftovers(folder, names)


def discard_collection(folder: Path, kind: type[Collection] = RowCollection) -> None:
    """Deletes a collection of a kind, of any version, if there is one; its lock stays.

    Raises:
      CalibrateError: the manifest is of something else; the folder has a file that no collection
        of this kind writes, and nothing is deleted; or a file cannot be deleted.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        recorded_format = parse(read_bytes(path, MAX_MANIFEST_BYTES))["format"]
    except (CalibrateError, KeyError, TypeError):
        recorded_format = None
    if recorded_format != kind.format:
        raise CalibrateError(
            f"{path} is not the manifest of a collection of {kind.kind}; choose another folder, or "
            "delete this one"
        )
    _deletable_entries(folder, kind)
    with _collection_lock(folder, kind):
        try:
            for entry in _deletable_entries(folder, kind):
                if entry.is_dir() and not entry.is_symlink():
                    os.rmdir(entry)
                elif entry.name != atomic_io.LOCK:
                    os.unlink(entry)
        except OSError as failure:
            raise CalibrateError(f"{folder} cannot be emptied: {failure.strerror}") from failure


def _deletable_entries(folder: Path, kind: type[Collection]) -> list[Path]:
    """The files that a collection wrote into its folder, in the order in which to delete them.

    The manifest is last: until it is deleted, the same command can resume the deletion.

    Raises:
      CalibrateError: the folder has other files.
    """
    names = rf"{re.escape(MANIFEST)}|{re.escape(atomic_io.LOCK)}|{kind.names}"
    entries = list[Path]()
    for entry in folder.rglob("*"):
        path = entry.with_name(atomic_io.final_name(entry.name)).relative_to(folder)
        if not re.fullmatch(names, path.as_posix()):
            raise CalibrateError(
                f"{entry} is not part of a collection, and nothing is deleted; move it away, or "
                "choose another folder"
            )
        entries.append(entry)
    return sorted(entries, key=lambda entry: (entry.name == MANIFEST, -len(entry.parts)))
