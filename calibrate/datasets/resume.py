"""A collection on disk, whose units of work are run, resumed, repaired and discarded.

The manifest is written when the collection starts ("partial": its configuration alone) and once
more when it is complete. In between, the shards present are the progress: each is written
atomically. The folder also has a lock, an empty file.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from calibrate.datasets.collection import KINDS, Kind, open_collection
from calibrate.datasets.manifest import (
    COMPLETE,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    PARTIAL,
    RESTORE,
    Collection,
    Entry,
    entry_of,
    listed_bytes,
    manifest_text,
    read_manifest,
)
from calibrate.errors import CalibrateError, CoefficientsError, DamagedError
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.storage import atomic_io
from calibrate.storage.npz import read_bytes, sha256_of
from calibrate.storage.strict_json import parse

Content = TypeVar("Content")
Options = Mapping[str, Any]


class Shard(NamedTuple):
    """A shard that a unit of work makes; another process can make it."""

    name: str  # of the file
    most: int  # bytes
    # The entry of a shard with these bytes, from a path; DamagedError unless they are the unit's.
    check: Callable[[bytes, Path], Entry]
    make: Callable[[], tuple[bytes, Entry]]
    steps: Sequence[float]  # the work of each of its steps, for progress
    advances: bool = False  # `make` advances the progress itself, step by step


@dataclass(frozen=True)
class Plan(Generic[Kind]):
    """The contents of a collection to be made."""

    stage: str  # what progress calls the work
    kind: type[Kind]
    configuration: dict[str, Any]
    shards: Sequence[Shard]
    # None if a recorded configuration is this one; otherwise the files that changed since, and
    # the options recorded and given.
    difference: Callable[[dict[str, Any]], tuple[Sequence[str], Options, Options] | None]
    files: Mapping[str, bytes] = field(default_factory=dict)  # beside the shards
    full: str = atomic_io.SPACE  # the remedy for a full disk


def run_units(
    folder: Path, plan: Plan[Kind], jobs: Jobs = ONE_PROCESS, progress: Progress = SILENT
) -> Kind:
    """Runs the units of work of a plan; each writes its shard into the folder when it is done.

    The same plan resumes an interrupted collection, repairs damaged files of a complete one, and
    otherwise leaves that as it is.

    Args:
      jobs: processes or cluster that make the shards.
      progress: of the shards that are made, or found in an unfinished collection; it advances
        once they are written.
    Raises:
      CalibrateError: something else is in the folder, it cannot be written, or a shard that is
        made again has another digest than the manifest lists.
    Warns:
      UserWarning: a file is damaged or missing.
    """
    if len(plan.shards) > MAX_SHARDS:
        raise CalibrateError(
            f"{folder} would have {len(plan.shards):,} shards, more than the limit of "
            f"{MAX_SHARDS:,}; collect less, or into several folders"
        )
    entries = _manifest_entries(folder, plan)
    if entries is None or _damaged(folder, plan, entries) or _missing_files(folder, plan):
        with _collection_lock(folder, plan.kind):
            if not (folder / MANIFEST).exists():
                data = manifest_text(plan.kind, plan.configuration, None, PARTIAL).encode()
                try:  # or it is in the way afterwards
                    plan.kind.checked(parse(data))
                except (CoefficientsError, ValueError) as failure:
                    raise CalibrateError(f"cannot collect into {folder}: {failure}") from failure
                # Without locks another process may come first: then its configuration stays.
                with contextlib.suppress(FileExistsError):
                    atomic_io.write_atomically(
                        folder / MANIFEST, data, exclusive=True, full=plan.full
                    )
            _make_shards(folder, plan, jobs, progress)
    return open_collection(folder, plan.kind)


def _manifest_entries(folder: Path, plan: Plan[Any]) -> dict[str, Entry] | None:
    """The shards of a complete collection by name; None if it is unfinished or absent.

    Raises:
      CalibrateError: the folder is not empty and is not this collection.
    """
    collection = read_manifest(folder, (plan.kind,))
    if collection is None:
        if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise CalibrateError(f"{folder} is not a collection and not empty; choose a new folder")
        return None
    if difference := plan.difference(collection.configuration):
        raise _another_collection(folder, *difference)
    if collection.partial:
        return None
    entries: dict[str, Entry] = plan.kind.manifest_entries(collection.manifest)
    if entries.keys() != {shard.name for shard in plan.shards}:
        raise CalibrateError(f"{folder / MANIFEST} lists other shards than this call; {RESTORE}")
    return entries


def _damaged(folder: Path, plan: Plan[Any], entries: Mapping[str, Entry]) -> list[Shard]:
    """The shards that are absent, or not as listed."""
    return [s for s in plan.shards if not _is_as_listed(folder / s.name, entries[s.name])]


def _is_as_listed(path: Path, entry: Entry) -> bool:
    with contextlib.suppress(DamagedError):
        return bool(listed_bytes(path, entry))
    return False


def _missing_files(folder: Path, plan: Plan[Any]) -> dict[str, bytes]:
    """The files beside the shards that are absent, or hold something else."""
    return {n: x for n, x in plan.files.items() if not _is_as_listed(folder / n, entry_of(x))}


def _make_shards(folder: Path, plan: Plan[Any], jobs: Jobs, progress: Progress) -> None:
    """Makes the shards that are absent; of a complete collection, those that are not as listed."""
    known, shards = _manifest_entries(folder, plan), plan.shards
    for name, data in _missing_files(folder, plan).items():
        atomic_io.write_atomically(folder / name, data)
    if known is not None:
        shards = _damaged(folder, plan, known)
        for shard in shards:
            _warn_of_damage(folder / shard.name)
    absolute = folder.absolute()  # workers may have another working folder
    tasks = [partial(_make, absolute, s, (known or {}).get(s.name), plan.full) for s in shards]
    by_name = {shard.name: shard for shard in shards}
    steps = [work for shard in shards for work in shard.steps]
    progress.begin(plan.stage, len(steps), sum(steps))

    def advance(done: tuple[str, Entry, bool]) -> None:
        name, _, resumed = done
        if resumed or not by_name[name].advances:
            for work in by_name[name].steps:
                progress.advance(work, resumed)

    entries = [entry for _, entry, _ in run(tasks, jobs, advance)]
    if known is None:
        text = manifest_text(plan.kind, plan.configuration, entries, COMPLETE)
        atomic_io.write_atomically(folder / MANIFEST, text.encode(), full=plan.full)


def _make(folder: Path, shard: Shard, known: Entry | None, full: str) -> tuple[str, Entry, bool]:
    """A shard's name and entry, and whether it was on disk already."""
    path = folder / shard.name
    resumed = read_if_sound(path, shard.most, shard.check) if known is None else None
    if resumed:
        return shard.name, resumed, True
    data, entry = shard.make()
    if known is not None and sha256_of(data) != known["sha256"]:
        raise CalibrateError(
            f"{path} cannot be repaired: made again, it has another digest than {MANIFEST} lists, "
            "as on another machine or with another version; restore the file from a copy, or "
            "collect into a new folder"
        )
    atomic_io.write_atomically(path, data, full=full)
    return shard.name, entry, False


def read_if_sound(
    path: Path, most: int, parse_bytes: Callable[[bytes, Path], Content]
) -> Content | None:
    """The content of a file of at most so many bytes; None if it is absent or damaged.

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
        _warn_of_damage(path)
        return None


def _warn_of_damage(path: Path) -> None:
    state = "damaged" if path.exists() else "missing"
    warnings.warn(f"{path} is {state}; it is collected again", stacklevel=4)


def _another_collection(
    folder: Path, changed: Sequence[str], recorded: Options, given: Options
) -> CalibrateError:
    """The error for a folder with a collection that a call does not ask for."""
    differences = [f"{x} has changed since {folder} was made (or is another one)" for x in changed]
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
    """Locks a folder that is written to; others wait."""
    message = f"another process is collecting into {folder}; waiting for it to finish"
    names = rf"{re.escape(MANIFEST)}|{kind.names}"
    atomic_io.check_writable(folder / MANIFEST)
    with atomic_io.locked(
        folder, waiting=lambda: warnings.warn(message, stacklevel=2)
    ) as has_locks:
        if has_locks:
            atomic_io.remove_leftovers(folder, names)
        yield
        if has_locks:  # of workers that died
            atomic_io.remove_leftovers(folder, names)


def discard_collection(folder: Path) -> None:
    """Deletes a collection of any kind and version, if there is one; its lock stays.

    Raises:
      CalibrateError: the manifest is of something else, there is a file that no collection of its
        kind writes (then nothing is deleted), or a file cannot be deleted.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        made_of = parse(read_bytes(path, MAX_MANIFEST_BYTES))["format"]
        kind = next(kind for kind in KINDS if kind.format == made_of)
    except (CalibrateError, KeyError, TypeError, StopIteration):
        raise CalibrateError(
            f"{path} is not the manifest of a collection; choose another folder, or delete this one"
        ) from None
    _entries(folder, kind)
    with _collection_lock(folder, kind):
        try:
            for entry in _entries(folder, kind):
                if entry.is_dir() and not entry.is_symlink():
                    os.rmdir(entry)
                elif entry.name != atomic_io.LOCK:
                    os.unlink(entry)
        except OSError as failure:
            raise CalibrateError(f"{folder} cannot be emptied: {failure.strerror}") from failure


def _entries(folder: Path, kind: type[Collection]) -> list[Path]:
    """The files that a collection wrote into its folder, in the order in which they can be deleted.

    The manifest comes last: until then the same command can do this again.

    Raises:
      CalibrateError: there is something else.
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
