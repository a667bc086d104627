"""A collection on disk, opened: the one reader of rows and of examples."""

import json
from pathlib import Path
from typing import Any, TypeVar

from calibrate.datasets.examples import ExampleCollection
from calibrate.datasets.manifest import PARTIAL, Collection, manifest_text, read_manifest
from calibrate.datasets.row_collection import RowCollection, unlisted_shards
from calibrate.errors import CalibrateError, command
from calibrate.storage.npz import sha256_of

KINDS = (RowCollection, ExampleCollection)

Kind = TypeVar("Kind", bound=Collection)


def open_collection(
    folder: Path, kind: type[Kind] | None = None, allow_partial: bool = False
) -> Kind:
    """Opens a collection; its shards are read, and checked, when they are asked for.

    Args:
      kind: RowCollection or ExampleCollection; None opens either, by its manifest.
      allow_partial: open unfinished rows too, with the shards that are there; the digest is that
        of a manifest which lists them.
    Raises:
      CalibrateError: it is absent, unfinished, damaged, or of another kind.
    """
    collection: Any = read_manifest(folder, KINDS if kind is None else (kind,))
    if collection is None:
        raise CalibrateError(f"{folder} is not a collection; make one with `calibrate collect`")
    if not collection.partial:
        return collection  # type: ignore[no-any-return]
    of_rows = isinstance(collection, RowCollection)
    if not (allow_partial and of_rows):
        fitting = command("fit", allow_partial=True)
        instead = f" or fit its finished shards: `{fitting}`" if of_rows else ""
        raise CalibrateError(f"{folder} is unfinished; run the same command again{instead}")
    entries = unlisted_shards(folder, collection.configuration)
    if not entries:
        raise CalibrateError(f"{folder} has no shard yet; run the same command again")
    text = manifest_text(RowCollection, collection.configuration, entries, PARTIAL)
    return RowCollection(folder, json.loads(text), sha256_of(text.encode()))  # type: ignore[return-value]
