"""A checkpoint with a fit in it: a folder that Transformers and other engines load.

Beside the weights and the configuration it has `calibrate-fit.json`, the fit itself, and in
config.json, under "calibrate", the fit's reference and id, what it was made of, the digests of
these files, and a digest of the configuration.
"""

import fnmatch
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calibrate
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.export.configuration import exported_configuration
from calibrate.export.plan import Carried, Plan, make_plan, refuse_exported, require_made_for
from calibrate.export.proof import Exporter, by_weights, prove, queries_without_weights
from calibrate.export.queries import Change, Queries, places_of, require_supported
from calibrate.files.atomic_io import require_outside, whole_folder, write_atomically
from calibrate.files.coefficient_file import digest, dumps, read
from calibrate.files.coefficients import Coefficients
from calibrate.files.json_shapes import require_fields
from calibrate.files.model_fingerprint import digest_of_file
from calibrate.files.npz import read_bytes
from calibrate.files.safetensors_file import FLOATS, Tensor, copy_changed
from calibrate.files.strict_json import Refusal, check_free, parse
from calibrate.transformers.folders import CONFIG, INDEX, MOST_CONFIG_BYTES, ModelFolder

FIT = "calibrate-fit.json"
KEY = "calibrate"  # of config.json
_MOST_OTHER_BYTES = 1 << 30
# What tokenizers, generation and licences need; no code, no other weights, no card of the original.
_COPIED = (
    "tokenizer*", "*.jinja", "vocab*", "merges.txt", "*.model", "*.tiktoken", "added_tokens.json",
    "special_tokens_map.json", "generation_config.json", "chat_template*", "LICENSE*", "LICENCE*",
    "NOTICE*", "COPYING*", "USE_POLICY*",
)  # fmt: skip
_NEVER_LOADED = (".*", "*.md")  # by any loader
_NEVER_COPIED = ("*.py", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Export:
    """What is to be written."""

    fit: Coefficients
    folder: ModelFolder
    model: str  # its fingerprint
    plan: Plan  # what engines apply
    queries: Queries
    changes: Mapping[str, Change]  # of tensors, by name
    configuration: dict[str, Any]  # of config.json, without the digests of what is written


def prepare(
    fit: Coefficients, folder: ModelFolder, any_model: bool = False, export: Exporter = by_weights
) -> Export:
    """Finds out how a fit is written into a model, and proves it: `export` makes a small one.

    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model, without
        `any_model`.
      CalibrateError: it cannot be applied exactly to such a model, or its files are damaged.
    """
    config = folder.config
    if folder.is_gguf:
        raise CalibrateError(
            f"{folder.path} has its weights in {folder.files[0].name}, not in safetensors; give "
            "the folder that the file was made from"
        )
    require_supported(config.model_type)
    _refuse_links(folder.path, [*folder.files, *_others(folder.path)])
    plan = plan_for(fit, folder)
    stored = read_configuration(folder.path / CONFIG)
    refuse_exported(folder.path, _said(stored).get("fit"))
    configuration = exported_configuration(stored, config, plan)
    queries = queries_without_weights(folder)
    named = {entry.layer for entry in fit.entries if entry.layer is not None}
    if absent := named - set(queries.layers):
        raise CoefficientsError(
            f"{fit.reference} has entries for layers {sorted(absent)}, which have no attention in "
            f"{folder.path}; give the model that the fit was made for"
        )
    changes = _changes(folder, queries, plan)
    prove(config, bool(plan.ratio), export)
    fingerprint = folder.fingerprint()
    if not any_model:
        remedy = "give the model that it was made for, or --any-model"
        require_made_for(fit, fingerprint, folder.path, remedy)
    return Export(fit, folder, fingerprint, plan, queries, changes, configuration)


def plan_for(fit: Coefficients, folder: ModelFolder) -> Plan:
    """The plan of a fit for a model; CoefficientsError if engines cannot run it."""
    config = folder.config
    return make_plan(fit, config.num_hidden_layers, config.num_attention_heads, folder.context)


def read_configuration(path: Path) -> dict[str, Any]:
    """The content of config.json; raises CalibrateError unless it can be read and written back."""
    try:
        stored: dict[str, Any] = parse(read_bytes(path, MOST_CONFIG_BYTES))
        require_fields(stored, ())
        check_free(stored)
    except Refusal as refusal:
        raise CalibrateError(f"{path}: {refusal}") from refusal
    return stored


def _said(stored: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says about an export; empty if nothing."""
    said = stored.get(KEY)
    return said if isinstance(said, dict) else {}


def _changes(folder: ModelFolder, queries: Queries, plan: Plan) -> dict[str, Change]:
    """What becomes of tensors in the files, by name."""
    tensors: dict[str, Tensor] = {}
    for path, header in folder.headers.items():
        for name, tensor in header.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise CalibrateError(f"{path} and another file have {name}; keep one of them")
    places, wanted = places_of(tensors), queries.changes(plan)
    stored = {place: tensors[name] for place, name in places.items()}
    modules = {place[:2] for place in wanted}
    unlike = [place for place in stored.keys() - wanted.keys() if place[:2] in modules]
    unlike += [
        place for place in wanted
        if place not in stored or stored[place].dtype not in FLOATS
        or stored[place].shape != queries.shapes[place]
    ]  # fmt: skip
    if unlike:
        layer, module, name = min(unlike)
        raise CalibrateError(
            f"{module}.{name} of layer {layer} in {folder.path} is not what its {CONFIG} asks for "
            "in floating point: are the weights of queries quantised? Export the model with plain "
            "weights, and quantise the export"
        )
    return {places[place]: change for place, change in wanted.items()}


def write(export: Export, out: Path) -> Carried:
    """Writes the folder of an export, which appears whole or not at all.

    Raises:
      CalibrateError: the folder is taken, the disk is full, or a file cannot be read.
    """
    source = export.folder.path
    require_outside(out, source)
    with whole_folder(out) as folder:
        files = {}
        for path in export.folder.shards:
            names = export.folder.headers[path].keys() & export.changes.keys()
            of_file = {name: export.changes[name].apply for name in names}
            files[path.name] = copy_changed(path, folder / path.name, of_file)
        if (source / INDEX) in export.folder.files:
            files[INDEX] = _write(folder / INDEX, (source / INDEX).read_bytes())
        files[FIT] = _write(folder / FIT, dumps(export.fit).encode())
        for path in _others(source):
            files[path.name] = _write(folder / path.name, read_bytes(path, _MOST_OTHER_BYTES))
        said: dict[str, Any] = {
            "fit": export.fit.reference, "id": digest(export.fit), "model": export.model,
            "calibrate": calibrate.__version__, "files": files,
        }  # fmt: skip
        configuration = export.configuration | {KEY: said}
        said["digest"] = digest_of(configuration)
        _write(folder / CONFIG, (json.dumps(configuration, indent=2) + "\n").encode())
        ModelFolder(folder)  # Transformers reads it
    return Carried(out, said, str(configuration["model_type"]), export.plan)


def _write(path: Path, data: bytes) -> str:
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def digest_of(configuration: dict[str, Any]) -> str:
    """sha256 of the content of an exported config.json, but for this digest."""
    rest = {key: value for key, value in configuration[KEY].items() if key != "digest"}
    text = json.dumps(configuration | {KEY: rest}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _others(folder: Path) -> list[Path]:
    """The files that go with the weights."""
    return [
        path for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in _COPIED)
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _NEVER_COPIED)
    ]  # fmt: skip


def _refuse_links(folder: Path, files: list[Path]) -> None:
    """Raises CalibrateError for a link out of a folder; blobs of the Hub's cache are within it."""
    root = folder.resolve()
    repository = root.parents[1] if root.parent.name == "snapshots" else root
    for path in files:
        target = path.resolve()
        if not any(target.is_relative_to(x) for x in (root, repository / "blobs")):
            raise CalibrateError(
                f"{path} is a link to {target}, outside of the model's folder; put a copy there, "
                "or remove it"
            )


def read_export(path: Path) -> Carried:
    """Reads an exported folder, and compares its files with what was written."""
    folder = ModelFolder(path)
    if folder.is_gguf:
        raise CalibrateError(f"{path} has no {CONFIG}; give a folder that calibrate export wrote")
    stored = read_configuration(path / CONFIG)
    said = _said(stored)
    if not isinstance(said.get("files"), dict):
        raise CalibrateError(
            f"{path} is not an exported model; give a folder that calibrate export wrote"
        )
    plan, faults = None, _faults(path, said["files"])
    if said.get("digest") != digest_of(stored):
        faults = [f"{CONFIG} was changed", *faults]
    try:
        fit = read(path / FIT)
        if digest(fit) != said.get("id"):
            faults.append(f"{FIT} is {digest(fit)}, and {CONFIG} says {said.get('id')}")
        plan = plan_for(fit, folder)
    except CalibrateError as failure:
        faults.append(str(failure))
    return Carried(path, said, folder.config.model_type, plan, tuple(faults))


def _faults(folder: Path, written: dict[str, Any]) -> list[str]:
    """What differs from what was written."""
    faults = added(folder, {CONFIG, *written})
    for name in sorted(written):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            faults.append(f"{name} is missing")
        elif digest_of_file(path) != written[name]:
            faults.append(f"{name} was changed")
    return faults


def added(folder: Path, written: Collection[str]) -> list[str]:
    """A line for each file that is new in a folder, but for what nothing loads."""
    present = {path.name for path in folder.iterdir()}.difference(written)
    known = {name for pattern in _NEVER_LOADED for name in fnmatch.filter(present, pattern)}
    return [f"{name} was added" for name in sorted(present - known)]
