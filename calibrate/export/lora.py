"""Export as a LoRA for PEFT, which adds a product of two matrices, B A, to weights of queries.

With D the diagonal matrix of the factors of a projection's outputs, D W = W + (D - 1) W. Only the
rows of (D - 1) W of heads whose beta is not 1 differ from 0. A holds these rows of W, and B has
beta - 1 at the place of each:

    A (rank, inputs)   in the dtype of W: its rows are copies
    B (outputs, rank)  in float32

All projections have the rank of the largest one, since engines read one rank; the other entries of
A and B are 0. The scale lora_alpha / r is 1. An engine that rounds B to bfloat16 changes beta - 1
by at most 2^-9 of it; to float16, by 2^-12.

`prepare_lora` checks that the export is exact, `write_lora` writes it, `check_lora` reads it back.
Beside PEFT's files the folder has a model card, and the fit in `fit.json`, with the fingerprint of
its model under "x-adapter-model".
"""

import copy
import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError, install, printable
from calibrate.export.architectures import SOFT_CAP, Norm
from calibrate.export.configuration import soft_cap
from calibrate.export.folder import (
    CARD,
    Export,
    added_files,
    changes_of_files,
    plan_for_folder,
    prepare_folder,
    read_configuration,
)
from calibrate.export.numerical_check import find_queries, queries_without_weights
from calibrate.export.plan import ExportContents, ExportPlan
from calibrate.export.queries import Queries, names_by_role
from calibrate.storage.atomic_io import (
    require_outside,
    whole_folder,
    write_atomically,
)
from calibrate.storage.fingerprints import digest_of_file
from calibrate.storage.strict_json import describe
from calibrate.store.coefficient_file import ADAPTER_FIT
from calibrate.store.fit import Fit, digest, dumps
from calibrate.store.loading import read
from calibrate.transformers.folder_files import CONFIG
from calibrate.transformers.folders import ModelFolder

_WEIGHTS = "and a LoRA only adds to the weights of projections; export the weights instead"
# PEFT's names of files, keys of its configuration, and tensors.
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_BASE = "base_model_name_or_path"
_REVISION = "revision"
_VERSION = "peft_version"
_TENSOR = "base_model.model.{}.lora_{}.weight"
_MODEL = "x-adapter-model"  # key of the coefficient file: the fingerprint of the model
_VALUES = re.compile(r"(?<=\.)q_proj$")

OutputFactors = dict[str, np.ndarray]  # by projection: (outputs,), the factor of each output


def is_lora(path: Path) -> bool:
    """Returns True if a folder holds a LoRA, and no model."""
    return (path / ADAPTER_CONFIG).exists() and not (path / CONFIG).exists()


def _require_peft() -> None:
    """Raises CalibrateError if PEFT is not installed."""
    if not find_spec("peft"):
        raise CalibrateError(f"a LoRA needs the package peft: {install('peft')}")


def _require_projections(config: Any, queries: Queries) -> None:
    """Raises CalibrateError unless the weights of projections alone scale the queries."""
    if cap := soft_cap(config):
        raise CalibrateError(
            f"{SOFT_CAP} is {cap}: the cap would have to grow with beta, {_WEIGHTS}"
        )
    for layer in queries.layers:
        if isinstance(norm := queries.source(layer), Norm):
            raise CalibrateError(f"{norm.module} of layer {layer} would have to change, {_WEIGHTS}")


def output_factors(config: Any, queries: Queries, plan: ExportPlan) -> OutputFactors:
    """Returns the factors of the projections that a LoRA names.

    They include projections of values, with factors of 1: SGLang fuses queries, keys and values,
    and takes no LoRA of queries alone.

    Raises:
      CalibrateError: a LoRA cannot apply the plan, or the plan changes nothing.
    """
    if plan.ratio:
        raise CalibrateError(f"the fit goes by log n, {_WEIGHTS}")
    _require_projections(config, queries)
    projections = {projection.module for projection in queries.architecture.projections}
    factors: OutputFactors = {}
    for role, change in queries.changes(plan).items():
        name = queries.names[role]
        if role.module not in projections or role.name != "weight":
            raise CalibrateError(f"{name} would have to change, {_WEIGHTS}")
        factors[name.removesuffix(".weight")] = change.factors.reshape(-1)
    if not factors:
        raise CalibrateError("every beta of the fit is 1, and leaves nothing to adapt")
    shapes = {queries.names[role]: shape for role, shape in queries.shapes.items()}
    values = {
        name: np.ones(shapes[f"{name}.weight"][0])
        for name in (_VALUES.sub("v_proj", name) for name in factors)
        if f"{name}.weight" in shapes and name not in factors
    }
    return factors | values


def _changed_rows(by_output: np.ndarray) -> np.ndarray:
    """Returns the indices of the outputs whose factor is not 1."""
    return np.flatnonzero(by_output != 1)


def lora_rank(factors: OutputFactors) -> int:
    """Returns the largest number of outputs of one projection that change."""
    return max(len(_changed_rows(by_output)) for by_output in factors.values())


def prepare_lora(
    fit: Fit,
    folder: ModelFolder,
    any_model: bool = False,
) -> Export:
    """Returns the export of a fit as a LoRA for a model, after all checks; nothing is written.

    Args:
      any_model: accept a fit that was made for another model.
    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model.
      CalibrateError: a LoRA cannot apply the fit to such a model, or files are damaged.
    """
    _require_peft()
    export = prepare_folder(fit, folder, any_model, make_lora_model)
    output_factors(folder.config, export.queries, export.plan)  # raises if a LoRA cannot apply them
    return export


def make_lora_model(config: Any, original: PreTrainedModel, plan: ExportPlan) -> Any:
    """Returns a model in memory with its LoRA, as PEFT loads it from files."""
    from peft import PeftModel

    queries, weights = find_queries(config, original), original.state_dict()
    factors = output_factors(config, queries, plan)
    tensors = _lora_tensors(factors, weights.__getitem__)
    files = _adapter_files(_lora_configuration(factors, "", None), tensors)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        warnings.simplefilter("ignore")  # deprecations in PEFT's use of Transformers
        return PeftModel.from_pretrained(copy.deepcopy(original), folder).eval()


def _lora_tensors(
    factors: OutputFactors, read_weight: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns A and B of each projection by PEFT's names; `read_weight` gives W by its name."""
    rank, tensors = lora_rank(factors), dict[str, torch.Tensor]()
    for name, by_output in factors.items():
        weight, rows = read_weight(f"{name}.weight"), _changed_rows(by_output)
        a = weight.new_zeros((rank, weight.shape[1]))
        a[: len(rows)] = weight[torch.from_numpy(rows)]
        b = np.zeros((len(by_output), rank), np.float32)
        b[rows, np.arange(len(rows))] = by_output[rows] - 1
        tensors[_TENSOR.format(name, "A")] = a
        tensors[_TENSOR.format(name, "B")] = torch.from_numpy(b)
    return tensors


def _lora_configuration(factors: OutputFactors, base: str, revision: str | None) -> Any:
    """Returns the LoraConfig for a base model."""
    from peft import LoraConfig

    rank = lora_rank(factors)
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=base,
        revision=revision,
        task_type="CAUSAL_LM",
        inference_mode=True,
        target_modules=sorted(factors),
    )


def _adapter_files(configuration: Any, tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Returns PEFT's two files, by name."""
    content = configuration.to_dict()  # some of its values are sets
    text = json.dumps(content, indent=2, sort_keys=True, default=sorted) + "\n"
    return {
        ADAPTER_CONFIG: text.encode(),
        _ADAPTER_WEIGHTS: save(tensors, {"format": "pt"}),
    }


def _lora_tensors_of_folder(
    folder: ModelFolder, queries: Queries, plan: ExportPlan, factors: OutputFactors
) -> dict[str, torch.Tensor]:
    """Returns A and B of each projection by the weights in a model's files.

    Raises:
      CalibrateError: the files do not have the weights that the configuration declares.
    """
    changes_of_files(folder, queries, plan)
    paths = {name: path for path, header in folder.headers.items() for name in header}
    by_role = names_by_role(paths, queries.architecture)
    stored = {name: by_role[role] for role, name in queries.names.items() if role in by_role}

    def read_weight(name: str) -> torch.Tensor:
        with safe_open(paths[stored[name]], "pt") as file:
            weight: torch.Tensor = file.get_tensor(stored[name])
            return weight

    return _lora_tensors(factors, read_weight)


def write_lora(export: Export, out: Path, card: str) -> ExportContents:
    """Writes an export as a LoRA, in a folder that appears whole or not at all.

    Args:
      card: text of the model card.
    Raises:
      CalibrateError: the folder exists, the disk is full, or a LoRA cannot apply the plan.
    """
    source, queries, plan = export.folder, export.queries, export.plan
    require_outside(out, source.path)
    factors = output_factors(source.config, queries, plan)
    fit = replace(export.fit, extra={**export.fit.extra, _MODEL: export.model})
    files = {
        **_adapter_files(
            _lora_configuration(factors, *name_base_model(source.path)),
            _lora_tensors_of_folder(source, queries, plan, factors),
        ),
        ADAPTER_FIT: dumps(fit).encode(),
        CARD: card.encode(errors="backslashreplace"),
    }
    with whole_folder(out) as folder:
        for name, data in files.items():
            write_atomically(folder / name, data)
        return replace(check_lora(folder, source, export.model), path=out)


def check_lora(path: Path, model: ModelFolder, fingerprint: str | None = None) -> ExportContents:
    """Reads a LoRA and compares PEFT's files with what its fit asks for in its model.

    Args:
      fingerprint: of the model, if it is known.
    Raises:
      CalibrateError: the LoRA cannot be read, is not an export, or is not of this model.
    """
    _require_peft()
    fit = read(path / ADAPTER_FIT)
    made_for = fit.extra.get(_MODEL)
    if not isinstance(made_for, str):
        raise CalibrateError(
            f"{path / ADAPTER_FIT} has {_MODEL} = {describe(made_for)}, expected the fingerprint "
            "of a model; export again"
        )
    if (actual := fingerprint or model.fingerprint()) != made_for:
        raise CalibrateError(
            f"{path} was made for {printable(made_for[:80])}, and {model.path} is {actual}; give "
            "its own with model=",
            parameter="model",
        )
    queries, plan = queries_without_weights(model), plan_for_folder(fit, model)
    factors = output_factors(model.config, queries, plan)
    files = _adapter_files(
        _lora_configuration(factors, *name_base_model(model.path)),
        _lora_tensors_of_folder(model, queries, plan, factors),
    )
    problems = [
        *added_files(path, (ADAPTER_CONFIG, _ADAPTER_WEIGHTS, ADAPTER_FIT)),
        *_differing_files(path, files),
    ]
    metadata = {"fit": fit.reference, "id": digest(fit), "model": made_for}
    metadata["digest"] = f"sha256:{digest_of_file(path / _ADAPTER_WEIGHTS)}"
    model_type = queries.architecture.model_type
    return ExportContents(path, metadata, model_type, plan, tuple(problems))


def _differing_files(path: Path, files: Mapping[str, bytes]) -> list[str]:
    """Returns a line for each of PEFT's files that differs from that of a new export.

    The name of the base model may differ: a publisher edits it, and the fingerprint in the fit
    decides.
    """
    stored = read_configuration(path / ADAPTER_CONFIG)
    expected = json.loads(files[ADAPTER_CONFIG])
    differing = []
    if _without_base(stored) != _without_base(expected):
        versions = f"by PEFT {stored.get(_VERSION)}; of a new export, by {expected[_VERSION]}"
        differing.append(f"{ADAPTER_CONFIG} differs from what {ADAPTER_FIT} asks for ({versions})")
    weights = hashlib.sha256(files[_ADAPTER_WEIGHTS]).hexdigest()
    if digest_of_file(path / _ADAPTER_WEIGHTS) != weights:
        differing.append(f"{_ADAPTER_WEIGHTS} differs from what {ADAPTER_FIT} asks for")
    return differing


def _without_base(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in settings.items() if key not in (_BASE, _REVISION, _VERSION)}


def name_base_model(path: Path) -> tuple[str, str | None]:
    """Returns the name and revision of a model in the Hub's cache; else its path, and None.

    The path is absolute. PEFT looks up a relative one in the working folder, and on the Hub if
    nothing is there.
    """
    snapshot = path.resolve()
    repository = snapshot.parents[1].name if snapshot.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), snapshot.name
    return str(snapshot), None
