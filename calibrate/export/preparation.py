"""The preparation of an export: its contents, checked, whatever form they are written in."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.export.architectures import require_listed
from calibrate.export.configuration import exported_configuration, require_original_folder
from calibrate.export.copied_files import check_no_links, copied_files
from calibrate.export.numerical_check import (
    Exporter,
    by_weights,
    queries_without_weights,
    verify_numerically,
)
from calibrate.export.plan import (
    GIVE_OWN_MODEL,
    ExportPlan,
    make_plan,
    require_made_for,
)
from calibrate.export.queries import Queries, WeightChange, names_by_role
from calibrate.storage.json_shapes import require_fields
from calibrate.storage.npz import read_bytes
from calibrate.storage.safetensors_file import FLOATS, StoredTensor, read_tensor
from calibrate.storage.strict_json import Refusal, check_free, parse
from calibrate.store.carried_fit import KEY
from calibrate.store.fit import Fit
from calibrate.transformers.folder_files import CONFIG, MAX_CONFIG_BYTES
from calibrate.transformers.folders import ModelFolder
from calibrate.transformers.loading_report import LoadingReport, require_whole


@dataclass(frozen=True)
class Export:
    """The contents to write."""

    fit: Fit
    folder: ModelFolder
    model: str  # its fingerprint
    plan: ExportPlan  # what engines apply
    queries: Queries
    changes: Mapping[str, WeightChange]  # of tensors, by name
    configuration: dict[str, Any]  # of config.json, without the digests of what is written
    copied: tuple[Path, ...]  # files that go with the weights
    report: LoadingReport | None  # of the model itself; None if it is quantised and does not load


def prepare(
    fit: Fit,
    folder: ModelFolder,
    any_model: bool = False,
    export: Exporter = by_weights,
    allow_unexpected: bool = False,
) -> Export:
    """The contents of an export, verified numerically: `export` makes that of a small model.

    Args:
      allow_unexpected: whether the model may have tensors that do not run; see `require_whole`.
    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model, without
        `any_model`.
      CalibrateError: it cannot be applied exactly to such a model, or its files are damaged.
    """
    config = folder.config
    require_original_folder(folder)
    _require_safetensors(folder)
    require_listed(config)
    copied = copied_files(folder)
    check_no_links(folder.path, [*folder.files, *copied])
    plan = plan_for(fit, folder)
    stored = read_configuration(folder.path / CONFIG)
    configuration = exported_configuration(stored, config, plan)
    queries = queries_without_weights(folder)
    _require_attention(fit, folder.path, queries)
    changes = changes_of_files(folder, queries, plan)
    _require_finite(folder, changes)
    if report := folder.report():
        require_whole(folder.path, report, allow_unexpected)
    verify_numerically(config, bool(plan.ratio), export)
    fingerprint = folder.fingerprint()
    if not any_model:
        require_made_for(fit, fingerprint, folder.path, GIVE_OWN_MODEL)
    return Export(
        fit, folder, fingerprint, plan, queries, changes, configuration, tuple(copied), report
    )


def _require_safetensors(folder: ModelFolder) -> None:
    """Raises CalibrateError for weights in a .gguf file."""
    if folder.is_gguf:
        raise CalibrateError(
            f"{folder.path} has its weights in {folder.files[0].name}, not in safetensors; give "
            "the folder that the file was made from"
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
    """The changes of tensors in the files, by name."""
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


def plan_for(fit: Fit, folder: ModelFolder) -> ExportPlan:
    """The plan of a fit for a model; CoefficientsError if engines cannot run it."""
    config = folder.config
    return make_plan(fit, config.num_hidden_layers, config.num_attention_heads, folder.context)


def read_configuration(path: Path) -> dict[str, Any]:
    """The content of config.json; raises CalibrateError unless it can be read and written back."""
    try:
        stored: dict[str, Any] = parse(read_bytes(path, MAX_CONFIG_BYTES))
        require_fields(stored, ())
        check_free(stored)
    except Refusal as refusal:
        raise CalibrateError(f"{path}: {refusal}") from refusal
    return stored


def metadata_of(stored: dict[str, Any]) -> dict[str, Any]:
    """The record of an export in a config.json; empty if there is none."""
    metadata = stored.get(KEY)
    return metadata if isinstance(metadata, dict) else {}
