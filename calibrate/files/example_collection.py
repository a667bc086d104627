"""A collection of examples on disk: a folder with the examples, plain softmax's scores, a manifest.

manifest.json is written when the collection starts ("partial": its configuration, and the digest of
examples.npz) and once more when it is complete (each file of scores with its digest). In between,
the files of scores present are the progress: each is written atomically. Hidden files are not part
of the collection: a lock, and `.model`, where the model lay when it was last scored.
"""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, CoefficientsError, DamagedError
from calibrate.files.atomic_io import write_atomically
from calibrate.files.coefficient_schema import DIGEST
from calibrate.files.example_set import (
    MOST_CELLS,
    Cell,
    ExampleSet,
    Scores,
    parse_examples,
    parse_scores,
)
from calibrate.files.json_shapes import (
    TEXT,
    Integer,
    List,
    Map,
    Object,
    Scalar,
    Shape,
    Word,
    read_field,
)
from calibrate.files.manifest import MANIFEST, MOST_MANIFEST_BYTES, STATUS
from calibrate.files.npz import MAX_BYTES, digest_of, read_bytes
from calibrate.files.shard import listed_bytes
from calibrate.files.strict_json import parse, refuse

FORMAT, SCHEMA_VERSION = "calibrate.examples", "0.1"
EXAMPLES = "examples.npz"
MODEL = ".model"  # hidden: a path of this machine
UNIT_TOKENS = 4096  # of the examples in one file of scores: seconds of work
_OVERHEAD, _PER_EXAMPLE = 1_024, 12  # bytes of a file of scores, at most

_COUNT = Integer(0, (1 << 62) - 1)
_FILE: dict[str, Shape] = {"bytes": _COUNT, "sha256": DIGEST}


def _yes_or_no(value: Any) -> bool:
    if type(value) is not bool:
        refuse(value, "write true or false")
    return value


_CELL = Object({"template": TEXT, "length": _COUNT, "text": _yes_or_no}, required=True)
_CONFIGURATION = Object(
    {
        "model": TEXT,
        "fingerprint": DIGEST,
        "dtype": Word(("float32", "bfloat16")),
        "sources": Map(Scalar()),
        "cells": List(_CELL, most=MOST_CELLS),
        "examples": Object({"count": _COUNT, **_FILE}, required=True),
    },
    required=True,
)
_PARTIAL: dict[str, Shape] = {
    "format": TEXT,
    "schema_version": TEXT,
    "status": TEXT,
    "configuration": _CONFIGURATION,
}
_SCORES = List(Object(_FILE, required=True))


class ExampleCollection(NamedTuple):
    """A complete collection of examples."""

    folder: Path
    manifest: dict[str, Any]
    digest: str  # of the manifest, and so of every file
    set: ExampleSet
    scores: Scores  # of plain softmax, an entry per example

    @property
    def fingerprint(self) -> str:
        """The model's."""
        return str(self.manifest["configuration"]["fingerprint"])


def is_example_collection(folder: Path) -> bool:
    """Whether the folder's manifest is of examples; False if it has none, or a damaged one."""
    try:
        manifest = parse(read_bytes(folder / MANIFEST, MOST_MANIFEST_BYTES))
    except CalibrateError:
        return False
    return type(manifest) is dict and manifest.get("format") == FORMAT


def open_examples(folder: Path) -> ExampleCollection:
    """Reads a complete collection of examples, every file checked against its digest.

    Raises:
      CalibrateError: it is absent, unfinished or damaged.
    """
    found = read_manifest(folder)
    if found is None:
        raise CalibrateError(
            f"{folder} is not a collection of examples; make one with `calibrate model collect`"
        )
    manifest, digest = found
    if manifest["status"] != "complete":
        raise CalibrateError(
            f"{folder} is unfinished; run the same `calibrate model collect` command again"
        )
    configuration = manifest["configuration"]
    path = folder / EXAMPLES
    data = listed_bytes(path, configuration["examples"], MAX_BYTES)
    examples = parse_examples(data, path, cells_of(configuration))
    units = examples.units(UNIT_TOKENS)
    if len(units) != len(manifest["scores"]):
        raise DamagedError(
            f"{folder / MANIFEST} lists {len(manifest['scores'])} files of scores, expected "
            f"{len(units)}; restore it or collect into a new folder"
        )
    parts = []
    for number, (unit, entry) in enumerate(zip(units, manifest["scores"], strict=True)):
        path = scores_path(folder, number)
        parts.append(
            parse_scores(listed_bytes(path, entry, MAX_BYTES), path, examples.n_answer(unit))
        )
    columns = zip(*parts, strict=True)
    return ExampleCollection(folder, manifest, digest, examples, Scores(*map(np.hstack, columns)))


def recorded_model(folder: Path) -> Path:
    """Where the collection's model lay when its examples were last scored.

    Raises:
      CalibrateError: that is not recorded, as in a copy of the collection without hidden files.
    """
    try:
        text = read_bytes(folder / MODEL, 1 << 16).decode().removesuffix("\n")
    except (CalibrateError, UnicodeDecodeError):
        text = ""
    if not text or not (path := Path(text)).is_dir():
        raise CalibrateError(
            f"{folder} does not know where its model is; name its folder with --model"
        )
    return path


def read_manifest(folder: Path) -> tuple[dict[str, Any], str] | None:
    """The manifest of a folder and its digest; None if it has none.

    Raises:
      CalibrateError: it is not a manifest of examples of this version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    data = read_bytes(path, MOST_MANIFEST_BYTES, "restore it or collect into a new folder")
    try:
        manifest = parse(data)
        version = [read_field(manifest, key, TEXT) for key in ("format", "schema_version")]
        if version != [FORMAT, SCHEMA_VERSION]:
            raise CalibrateError(
                f"{path} is {version[0]} {version[1]}, expected {FORMAT} {SCHEMA_VERSION}; "
                "collect into a new folder with this version of calibrate"
            )
        complete = read_field(manifest, "status", Word(STATUS)) == "complete"
        Object(_PARTIAL | ({"scores": _SCORES} if complete else {}), required=True)(manifest)
    except CoefficientsError as failure:
        raise DamagedError(
            f"{path} is not a manifest ({failure}); restore it or collect into a new folder"
        ) from failure
    return manifest, digest_of(data)


def write_manifest(
    folder: Path, configuration: dict[str, Any], scores: list[dict[str, Any]] | None = None
) -> None:
    """Writes the manifest: partial without the entries of the files of scores, else complete."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "status": STATUS[scores is not None],
        "configuration": configuration,
    }
    if scores is not None:
        manifest["scores"] = scores
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def configuration_of(
    model: str, fingerprint: str, dtype: str, sources: dict[str, Any], examples: ExampleSet
) -> dict[str, Any]:
    """What determines a collection of examples."""
    cells = [cell._asdict() for cell in examples.cells]
    file = {"count": len(examples.examples), **entry_of(examples.pack())}
    return {
        "model": model, "fingerprint": fingerprint, "dtype": dtype, "sources": sources,
        "cells": cells, "examples": file,
    }  # fmt: skip


def cells_of(configuration: dict[str, Any]) -> tuple[Cell, ...]:
    """The cells that a configuration lists."""
    return tuple(Cell(**cell) for cell in configuration["cells"])


def entry_of(data: bytes) -> dict[str, Any]:
    """A file's entry in the manifest."""
    return {"bytes": len(data), "sha256": digest_of(data)}


def scores_path(folder: Path, unit: int) -> Path:
    """The path of the scores of a unit of examples."""
    return folder / f"scores-{unit:05d}.npz"


def find_scores(path: Path, lengths: np.ndarray, listed: dict[str, Any] | None) -> bytes | None:
    """A file of scores, of answers of these lengths; None if it is absent or damaged.

    Args:
      listed: its entry in the manifest of a complete collection.
    Warns:
      UserWarning: it is damaged.
    """
    if not path.exists():
        return None
    try:
        if listed is not None:
            return listed_bytes(path, listed, MAX_BYTES)
        data = read_bytes(path, _OVERHEAD + _PER_EXAMPLE * len(lengths))
        parse_scores(data, path, lengths)
    except DamagedError:
        warnings.warn(f"{path} is damaged; it is collected again", stacklevel=3)
        return None
    return data
