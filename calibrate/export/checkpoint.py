"""A checkpoint with a fit in it: a folder that Transformers and other engines load.

Beside the weights and the configuration it has `calibrate-fit.json`, the fit itself, and in
config.json, under "calibrate", the fit's reference and id, what it was made of, the digests of
these files, and a digest of the configuration.
"""

import fnmatch
import hashlib
import json
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.export.configuration import FIT
from calibrate.export.copied_files import match_tokenizer
from calibrate.export.plan import (
    FIT_CONSTANTS,
    ExportContents,
)
from calibrate.export.preparation import Export, metadata_of, plan_for, read_configuration
from calibrate.storage.atomic_io import require_outside, whole_folder, write_atomically
from calibrate.storage.model_fingerprint import digest_of_file
from calibrate.storage.npz import read_bytes
from calibrate.storage.safetensors_file import copy_changed
from calibrate.store.carried_fit import KEY
from calibrate.store.coefficient_file import digest, dumps, read
from calibrate.transformers.folder_files import (
    CHAT_TEMPLATES,
    CONFIG,
    INDEX,
    index_of,
    wrong_entries,
)
from calibrate.transformers.folders import ModelFolder
from calibrate.transformers.loading_report import require_whole, shown
from calibrate.version import __version__

CARD = "README.md"
UNEXPECTED = "unexpected"  # below it: tensors that do not run, where that was allowed
_MAX_OTHER_BYTES = 1 << 30
_NEVER_LOADED = (".*", "*.md")  # by any loader


def write(export: Export, out: Path, card: str = "") -> ExportContents:
    """Writes the folder of an export, which appears whole or not at all.

    Args:
      card: the text of a model card; "" writes none. The model's own card is of other weights, and
        is not copied.
    Raises:
      CalibrateError: the folder is taken, the disk is full, or a file cannot be read.
    """
    source = export.folder.path
    require_outside(out, source)
    with whole_folder(out) as folder:
        files = _write_weights(export, folder)
        files[FIT] = _write(folder / FIT, dumps(export.fit).encode())
        for path in export.copied:
            name = path.relative_to(source).as_posix()
            files[name] = _write(folder / name, read_bytes(path, _MAX_OTHER_BYTES))
        _write_configuration(folder, export.configuration)
        written = ModelFolder(folder)
        files |= match_tokenizer(export.folder, written)
        _require_same(export, written)
        metadata: dict[str, Any] = {
            "fit": export.fit.reference,
            "id": digest(export.fit),
            "model": export.model,
            "calibrate": __version__,
            "files": files,
        }
        if export.report and export.report.unexpected:
            metadata[UNEXPECTED] = list(export.report.unexpected)
        configuration = export.configuration | {KEY: metadata}
        metadata["digest"] = configuration_digest(configuration)
        _write_configuration(folder, configuration)
        if card:
            _write(folder / CARD, card.encode(errors="backslashreplace"))
    return ExportContents(
        out,
        metadata,
        str(configuration["model_type"]),
        export.plan,
        notes=_notes(metadata.get(UNEXPECTED)) + _note_on_card(source, card),
    )


def _write_weights(export: Export, folder: Path) -> dict[str, str]:
    """Writes the weights and their index, which says what the files hold; sha256 by name."""
    source, files = export.folder, {}
    for path in source.shards:
        names = source.headers[path].keys() & export.changes.keys()
        of_file = {name: export.changes[name].apply for name in names}
        files[path.name] = copy_changed(path, folder / path.name, of_file)
    if (source.path / INDEX) in source.files:
        index = json.dumps(index_of(source.headers), indent=2) + "\n"
        files[INDEX] = _write(folder / INDEX, index.encode())
    return files


def _write_configuration(folder: Path, configuration: dict[str, Any]) -> None:
    _write(folder / CONFIG, (json.dumps(configuration, indent=2) + "\n").encode())


def _require_same(export: Export, written: ModelFolder) -> None:
    """Raises CalibrateError unless Transformers loads of an export what it loads of the model."""
    before, after = export.report, written.report()
    if before and after and before[1:] != after[1:]:
        names = sorted({*chain(*before[1:])} ^ {*chain(*after[1:])})
        raise CalibrateError(
            f"Transformers loads other tensors of {export.folder.path} as a {after.model}: "
            f"{shown(names)}; export a fit of constants: {FIT_CONSTANTS}"
        )


def _notes(unexpected: Any) -> tuple[str, ...]:
    """A line for tensors that do not run."""
    if not isinstance(unexpected, list) or not unexpected:
        return ()
    names = shown([str(name) for name in unexpected])
    return (f"Tensors of the files that Transformers drops, as was allowed: {names}.",)


def _note_on_card(model: Path, card: str) -> tuple[str, ...]:
    """A line on the card of a model that has one."""
    if not card or not (model / CARD).exists():
        return ()
    return (f"{CARD} is a new card, which names the model; the model's own was not copied.",)


def _write(path: Path, data: bytes) -> str:
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def configuration_digest(configuration: dict[str, Any]) -> str:
    """sha256 of the content of an exported config.json, but for this digest."""
    rest = {key: value for key, value in configuration[KEY].items() if key != "digest"}
    text = json.dumps(configuration | {KEY: rest}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def read_export(path: Path) -> ExportContents:
    """Reads an exported folder, and compares its files with what was written."""
    if not (path / CONFIG).is_file():
        raise CalibrateError(f"{path} has no {CONFIG}; give a folder that calibrate export wrote")
    stored = read_configuration(path / CONFIG)
    metadata = metadata_of(stored)
    if not isinstance(metadata.get("files"), dict):
        raise CalibrateError(
            f"{path} is not an exported model; give a folder that calibrate export wrote"
        )
    plan, problems = None, _problems(path, metadata["files"])
    if metadata.get("digest") != configuration_digest(stored):
        problems = [f"{CONFIG} was changed", *problems]
    try:
        fit = read(path / FIT)
        if digest(fit) != metadata.get("id"):
            problems.append(f"{FIT} is {digest(fit)}, and {CONFIG} says {metadata.get('id')}")
        folder = ModelFolder(path)
        plan = plan_for(fit, folder)
        problems += _unloaded(folder, metadata.get(UNEXPECTED) or ())
    except CalibrateError as failure:
        problems.append(str(failure))
    kind, notes = str(stored.get("model_type")), _notes(metadata.get(UNEXPECTED))
    return ExportContents(path, metadata, kind, plan, tuple(problems), notes)


def _problems(folder: Path, written: dict[str, Any]) -> list[str]:
    """The differences from the files as written."""
    problems = added(folder, {CONFIG, *written})
    for name in sorted(written):
        path, plain = folder / name, Path(name).name
        if name not in (plain, f"{CHAT_TEMPLATES}/{plain}") or not path.is_file():
            problems.append(f"{name} is missing")
        elif digest_of_file(path) != written[name]:
            problems.append(f"{name} was changed")
    return problems


def _unloaded(folder: ModelFolder, allowed: Collection[str]) -> list[str]:
    """Tensors of an exported folder that Transformers does not load, and errors of its index."""
    problems = []
    if (folder.path / INDEX) in folder.files:
        problems = wrong_entries(folder.path / INDEX, folder.headers)
    if report := folder.report():
        require_whole(folder.path, report, {*report.unexpected} <= {*allowed})
    return problems


def added(folder: Path, written: Collection[str]) -> list[str]:
    """A line for each file that is new in a folder, but for what nothing loads."""
    present = {path.name for path in folder.iterdir()}
    if any(name.startswith(f"{CHAT_TEMPLATES}/") for name in written) and CHAT_TEMPLATES in present:
        templates = (folder / CHAT_TEMPLATES).glob("*")
        present |= {path.relative_to(folder).as_posix() for path in templates}
        present.discard(CHAT_TEMPLATES)
    present = present.difference(written)
    known = {name for pattern in _NEVER_LOADED for name in fnmatch.filter(present, pattern)}
    return [f"{name} was added" for name in sorted(present - known)]
