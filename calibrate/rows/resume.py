"""Resume: whether a folder is this configuration's collection, and which shards it lacks."""

import contextlib
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.files import collection as files
from calibrate.files.manifest import MANIFEST, another_collection
from calibrate.files.shard import is_as_listed, shard_path
from calibrate.rows.sources import Source
from calibrate.rows.work_units import Unit

# Each unit's entry in the manifest of a complete collection.
Listed = dict[Unit, dict[str, Any]]


def changed_units(folder: Path, listed: Listed) -> list[Unit]:
    """The units whose shard is absent, or not as listed."""
    paths = {unit: shard_path(folder, unit.size, unit.number) for unit in listed}
    return [unit for unit, path in paths.items() if not is_as_listed(path, listed[unit])]


def claim_folder(folder: Path, configuration: dict[str, Any], source: Source) -> Listed | None:
    """Claims the folder for this configuration; see `complete_shards`."""
    if files.read_manifest(folder) is None:
        # Without locks another process may come first: then its configuration stays.
        with contextlib.suppress(FileExistsError):
            files.write_manifest(folder, configuration, None)
    return complete_shards(folder, configuration, source)


def complete_shards(folder: Path, configuration: dict[str, Any], source: Source) -> Listed | None:
    """The shards that a complete collection's manifest lists; None if it is unfinished or absent.

    Raises:
      CalibrateError: the folder is not empty and is not this collection.
    """
    manifest = files.read_manifest(folder)
    if manifest is None:
        if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise CalibrateError(f"{folder} is not a collection and not empty; choose a new folder")
        return None
    recorded, given = (
        {"keep": "misranked"} | c for c in (manifest["configuration"], configuration)
    )
    if recorded != given:
        same_name = recorded["head"] == given["head"]
        digests = recorded.pop("fingerprint"), given.pop("fingerprint")
        changed = [source.shown] if same_name and len({*digests}) > 1 else []
        raise another_collection(folder, changed, recorded, given)
    if manifest["status"] != "complete":
        return None
    entries = {(entry["size"], entry["unit"]): entry for entry in manifest["shards"]}
    if set(entries) != {(unit.size, unit.number) for unit in source.units}:
        raise CalibrateError(
            f"{folder / MANIFEST} does not list the shards of its configuration; restore it "
            "or collect into a new folder"
        )
    return {unit: entries[unit.size, unit.number] for unit in source.units}
