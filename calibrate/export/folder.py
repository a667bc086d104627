"""Export into a folder that Transformers and other engines load.

`prepare_folder` checks that the export is exact, `write_folder` writes it, `check_folder` reads it
back. Beside weights, configuration and tokenizer, the folder has the fit in `calibrate-fit.json`.
Its config.json has under "calibrate" the reference and id of the fit, the fingerprint of the model,
the digests of all files, and a digest of the configuration itself.
"""

import fnmatch
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.export.architectures import architecture_of
from calibrate.export.configuration import (
    FIT_FILE,
    exported_configuration,
    require_original_folder,
)
from calibrate.export.numerical_check import (
    Exporter,
    make_scaled_model,
    queries_without_weights,
    verify_numerically,
)
from calibrate.export.plan import (
    GIVE_OWN_MODEL,
    ExportContents,
    ExportPlan,
    make_plan,
    require_made_for,
)
from calibrate.export.queries import Queries, WeightChange, names_by_role
from calibrate.export.tokenizer_copy import find_copied_files, match_tokenizer
from calibrate.storage.atomic_io import (
    read_bytes,
    require_outside,
    whole_folder,
    write_atomically,
)
from calibrate.storage.fingerprints import digest_of_file
from calibrate.storage.safetensors_file import FLOATS, StoredTensor, copy_changed, read_tensor
from calibrate.storage.strict_json import describe, parse
from calibrate.store.coefficient_file import MODEL_KEY
from calibrate.store.fit import Fit, digest, dumps
from calibrate.store.loading import read
from calibrate.transformers.folder_files import (
    CHAT_TEMPLATES,
    CONFIG,
    INDEX,
    MAX_CONFIG_BYTES,
    make_index,
)
from calibrate.transformers.folders import ModelFolder
from calibrate.version import __version__

CARD = "README.md"
_MAX_COPIED_BYTES = 1 << 30
_NEVER_LOADED = (".*", "*.md")  # by any loader


@dataclass(frozen=True)
class Export:
    """An export of a fit for a model, checked and ready to be written."""

    fit: Fit
    folder: ModelFolder  # the model
    model: str  # its fingerprint
    plan: ExportPlan
    queries: Queries
    changes: Mapping[str, WeightChange]  # of tensors in the files, by name
    configuration: dict[str, Any]  # of config.json, without the record of the export
    copied: tuple[Path, ...]  # files that are copied beside the weights


def prepare_folder(
    fit: Fit,
    folder: ModelFolder,
    any_model: bool = False,
    exporter: Exporter = make_scaled_model,
) -> Export:
    """Returns the export of a fit for a model, after all checks; nothing is written.

    Args:
      any_model: accept a fit that was made for another model.
      exporter: exports a small model in memory for the numerical check.
    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model.
      CalibrateError: the fit cannot be applied exactly to such a model, or files are damaged.
    """
    config = folder.config
    require_original_folder(folder)
    if folder.is_gguf:
        raise CalibrateError(
            f"{folder.path} has its weights in {folder.files[0].name}, not in safetensors; give "
            "the folder that the file was made from"
        )
    architecture_of(config)  # raises if the table has none
    copied = find_copied_files(folder)
    _require_no_links(folder.path, [*folder.files, *copied])
    plan = plan_for_folder(fit, folder)
    stored = read_configuration(folder.path / CONFIG)
    configuration = exported_configuration(stored, config, plan)
    queries = queries_without_weights(folder)
    _require_attention(fit, folder.path, queries)
    changes = changes_of_files(folder, queries, plan)
    _require_finite(folder, changes)
    folder.require_whole()
    verify_numerically(config, bool(plan.ratio), exporter)
    fingerprint = folder.fingerprint()
    if not any_model:
        require_made_for(fit, fingerprint, folder.path, GIVE_OWN_MODEL)
    return Export(fit, folder, fingerprint, plan, queries, changes, configuration, tuple(copied))


def plan_for_folder(fit: Fit, folder: ModelFolder) -> ExportPlan:
    """Returns the plan of a fit for a model; CoefficientsError if engines cannot run it."""
    config = folder.config
    return make_plan(fit, config.num_hidden_layers, config.num_attention_heads, folder.context)


def read_configuration(path: Path) -> dict[str, Any]:
    """Returns the content of a config.json; CalibrateError if it could not be written back."""
    try:
        stored = parse(read_bytes(path, MAX_CONFIG_BYTES))
        json.dumps(stored, indent=2, allow_nan=False)
    except (CoefficientsError, ValueError, RecursionError) as failure:
        raise CalibrateError(f"{path}: {failure}; fetch it again") from failure
    if not isinstance(stored, dict):
        raise CalibrateError(f"{path} is {describe(stored)}, not an object; fetch it again")
    return stored


def _require_no_links(folder: Path, files: list[Path]) -> None:
    """Raises CalibrateError for a link out of a folder; the blobs of the Hub's cache are inside."""
    root = folder.resolve()
    repository = root.parents[1] if root.parent.name == "snapshots" else root
    for path in files:
        target = path.resolve()
        if not any(target.is_relative_to(inside) for inside in (root, repository / "blobs")):
            raise CalibrateError(
                f"{path} is a link to {target}, outside of the model's folder; put a copy there, "
                "or remove it"
            )


def _require_attention(fit: Fit, path: Path, queries: Queries) -> None:
    """Raises CoefficientsError for entries of layers without attention."""
    layers = {entry.layer for entry in fit.entries if entry.layer is not None}
    if absent := layers - set(queries.layers):
        raise CoefficientsError(
            f"{fit.reference} has entries for layers {sorted(absent)}, which have no attention in "
            f"{path}; give the model that the fit was made for"
        )


def changes_of_files(
    folder: ModelFolder, queries: Queries, plan: ExportPlan
) -> dict[str, WeightChange]:
    """Returns the changes of tensors in the files, by name.

    Raises:
      CalibrateError: a tensor occurs twice, or the tensors of queries are not those that the
        configuration declares, as plain floats.
    """
    tensors: dict[str, StoredTensor] = {}
    for path, header in folder.headers.items():
        for name, tensor in header.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise CalibrateError(f"{path} and another file have {name}; keep one of them")
    names, changes = names_by_role(tensors, queries.architecture), queries.changes(plan)
    stored = {role: tensors[name] for role, name in names.items()}
    modules = {role[:2] for role in changes}
    unlike = [role for role in stored.keys() - changes.keys() if role[:2] in modules]
    unlike += [
        role
        for role in changes
        if role not in stored
        or stored[role].dtype not in FLOATS
        or stored[role].shape != queries.shapes[role]
    ]
    if unlike:
        layer, module, name = min(unlike)
        raise CalibrateError(
            f"{module}.{name} of layer {layer} in {folder.path} is not what its {CONFIG} asks for "
            "in floating point: are the weights of queries quantised? Export the model with plain "
            "weights, and quantise the export"
        )
    return {names[role]: change for role, change in changes.items()}


def _require_finite(folder: ModelFolder, names: Collection[str]) -> None:
    """Raises CalibrateError for tensors with NaN or infinities."""
    for path, header in folder.headers.items():
        for name in header.keys() & names:
            if not np.isfinite(read_tensor(path, name)).all():
                raise CalibrateError(f"{name} in {path} has NaN or infinities; fetch it again")


def write_folder(export: Export, out: Path, card: str = "") -> ExportContents:
    """Writes an export as a folder, which appears whole or not at all.

    Args:
      card: text of the model card; "" writes none. The model's own card is not copied, since it
        describes other weights.
    Raises:
      CalibrateError: the folder exists, the disk is full, a file cannot be read, or Transformers
        would load other tensors or make other tokens than in the model.
    """
    source = export.folder.path
    require_outside(out, source)
    with whole_folder(out) as folder:
        files = _write_weights(export, folder)
        files[FIT_FILE] = _write_file(folder / FIT_FILE, dumps(export.fit).encode())
        for path in export.copied:
            name = path.relative_to(source).as_posix()
            files[name] = _write_file(folder / name, read_bytes(path, _MAX_COPIED_BYTES))
        _write_configuration(folder, export.configuration)
        written = ModelFolder(folder)
        files |= match_tokenizer(export.folder, written)
        written.require_whole()
        record: dict[str, Any] = {
            "fit": export.fit.reference,
            "id": digest(export.fit),
            "model": export.model,
            "calibrate": __version__,
            "files": files,
        }
        configuration = export.configuration | {MODEL_KEY: record}
        record["digest"] = _configuration_digest(configuration)
        _write_configuration(folder, configuration)
        if card:
            _write_file(folder / CARD, card.encode(errors="backslashreplace"))
    return ExportContents(out, record, str(configuration["model_type"]), export.plan)


def _write_weights(export: Export, folder: Path) -> dict[str, str]:
    """Writes the weights and an index of what the files hold; returns sha256 by file name."""
    source, files = export.folder, {}
    for path in source.shards:
        names = source.headers[path].keys() & export.changes.keys()
        changes = {name: export.changes[name].apply for name in names}
        files[path.name] = copy_changed(path, folder / path.name, changes)
    if (source.path / INDEX) in source.files:
        index = json.dumps(make_index(source.headers), indent=2) + "\n"
        files[INDEX] = _write_file(folder / INDEX, index.encode())
    return files


def _write_configuration(folder: Path, configuration: dict[str, Any]) -> None:
    _write_file(folder / CONFIG, (json.dumps(configuration, indent=2) + "\n").encode())


def _write_file(path: Path, data: bytes) -> str:
    """Writes a file; returns the sha256 of its content."""
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def _configuration_digest(configuration: dict[str, Any]) -> str:
    """Returns the sha256 of an exported configuration without this digest."""
    record = {key: value for key, value in configuration[MODEL_KEY].items() if key != "digest"}
    text = json.dumps(configuration | {MODEL_KEY: record}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def check_folder(path: Path) -> ExportContents:
    """Reads an exported folder and compares its files with what was written.

    Raises:
      CalibrateError: the folder cannot be read, or is not an export.
    """
    if not (path / CONFIG).is_file():
        raise CalibrateError(f"{path} has no {CONFIG}; give a folder that calibrate export wrote")
    stored = read_configuration(path / CONFIG)
    record = stored.get(MODEL_KEY)
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        raise CalibrateError(
            f"{path} is not an exported model; give a folder that calibrate export wrote"
        )
    plan, problems = None, _changed_files(path, record["files"])
    if record.get("digest") != _configuration_digest(stored):
        problems = [f"{CONFIG} was changed", *problems]
    try:
        fit = read(path / FIT_FILE)
        if digest(fit) != record.get("id"):
            problems.append(f"{FIT_FILE} is {digest(fit)}, and {CONFIG} says {record.get('id')}")
        folder = ModelFolder(path)
        plan = plan_for_folder(fit, folder)
        folder.require_whole()
    except CalibrateError as failure:
        problems.append(str(failure))
    return ExportContents(path, record, str(stored.get("model_type")), plan, tuple(problems))


def _changed_files(folder: Path, written: dict[str, Any]) -> list[str]:
    """Returns a line for each file that is new, missing or changed.

    Args:
      written: sha256 of the files as they were written, by name.
    """
    problems = added_files(folder, {CONFIG, *written})
    for name in sorted(written):
        path, plain = folder / name, Path(name).name
        if name not in (plain, f"{CHAT_TEMPLATES}/{plain}") or not path.is_file():
            problems.append(f"{name} is missing")
        elif digest_of_file(path) != written[name]:
            problems.append(f"{name} was changed")
    return problems


def added_files(folder: Path, written: Collection[str]) -> list[str]:
    """Returns a line for each new file in a folder, except files that no loader reads."""
    present = {path.name for path in folder.iterdir()}
    if any(name.startswith(f"{CHAT_TEMPLATES}/") for name in written) and CHAT_TEMPLATES in present:
        templates = (folder / CHAT_TEMPLATES).glob("*")
        present |= {path.relative_to(folder).as_posix() for path in templates}
        present.discard(CHAT_TEMPLATES)
    present = present.difference(written)
    harmless = {name for pattern in _NEVER_LOADED for name in fnmatch.filter(present, pattern)}
    return [f"{name} was added" for name in sorted(present - harmless)]
