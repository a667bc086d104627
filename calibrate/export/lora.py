"""A fit as a LoRA for PEFT, which adds a product of two matrices, B A, to weights of queries.

With D the diagonal of the factors of a projection's outputs, D W = W + (D - 1) W. The rows of
(D - 1) W are 0 but for heads whose beta is not 1. So A has those rows of W, and B, for each of
them, beta - 1 at its row:

    A (rank, inputs)   in the dtype of W: the rows are copies
    B (outputs, rank)  in float32

All projections have the rank of the largest, as engines read one rank; the rest of A and B is 0.
The scale lora_alpha / r is 1. An engine that rounds B to bfloat16 changes beta - 1 by at most 2^-9
of it; to float16, by 2^-12.

Beside PEFT's files the folder has a card, and `fit.json`, the fit, which says under
"x-adapter-model" which model it was made for.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError, command, install
from calibrate.export.architectures import Norm, require_listed
from calibrate.export.checkpoint import CARD, added
from calibrate.export.configuration import soft_cap
from calibrate.export.numerical_check import queries_of, queries_without_weights
from calibrate.export.plan import ExportContents, ExportPlan
from calibrate.export.preparation import (
    Export,
    changes_of_files,
    plan_for,
    read_configuration,
)
from calibrate.export.queries import Queries, names_by_role
from calibrate.storage.atomic_io import (
    require_outside,
    scratch_folder,
    whole_folder,
    write_atomically,
)
from calibrate.storage.json_shapes import TEXT, read_field
from calibrate.storage.model_fingerprint import digest_of_file
from calibrate.storage.safetensors_file import FLOATS, read_header, read_tensor
from calibrate.storage.strict_json import Refusal
from calibrate.store.coefficient_file import ADAPTER_FIT, digest, dumps, read
from calibrate.transformers.folder_files import CONFIG as MODEL_CONFIG
from calibrate.transformers.folder_files import cached_snapshot
from calibrate.transformers.folders import ModelFolder

MAX_RANK = 256
_WEIGHTS = "and a LoRA only adds to the weights of projections; export the weights instead"
# PEFT's names of files, of keys of its configuration, and of tensors.
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_BASE = "base_model_name_or_path"
_REVISION = "revision"
_VERSION = "peft_version"
_TENSOR = "base_model.model.{}.lora_{}.weight"
_MODEL = "x-adapter-model"  # in the coefficient file: the fingerprint of the model
_VALUES = re.compile(r"(?<=\.)q_proj$")
_DTYPES = {np.dtype(x).name: getattr(torch, np.dtype(x).name) for x in FLOATS.values()}
_NAMES = {_DTYPES[np.dtype(x).name]: name for name, x in FLOATS.items()}  # in files

Factors = dict[str, np.ndarray]  # of the outputs of each projection, by its name: (outputs,)


def is_lora(path: Path) -> bool:
    """True if a folder holds a LoRA, and no model."""
    return (path / CONFIG).exists() and not (path / MODEL_CONFIG).exists()


def require_peft() -> None:
    """Raises CalibrateError if PEFT, which defines what a LoRA is, is not installed."""
    if not find_spec("peft"):
        raise CalibrateError(f"a LoRA needs the package peft: {install('peft')}")


def require_lora(folder: ModelFolder) -> None:
    """Raises CalibrateError if no LoRA can hold factors of a model's heads."""
    require_peft()
    require_listed(folder.config)
    _require_projections(folder.config, queries_without_weights(folder))


def _require_projections(config: Any, queries: Queries) -> None:
    """Raises CalibrateError unless weights of projections alone make the queries' scale."""
    if capped := soft_cap(config):
        key, cap = capped
        raise CalibrateError(f"{key} is {cap}: the cap would have to grow with beta, {_WEIGHTS}")
    for layer in queries.layers:
        if isinstance(norm := queries.source(layer), Norm):
            raise CalibrateError(f"{norm.module} of layer {layer} would have to change, {_WEIGHTS}")


def factors_of(config: Any, queries: Queries, plan: ExportPlan) -> Factors:
    """The factors of the projections that a LoRA names; CalibrateError if it cannot hold the plan.

    Values beside queries are named too, with factors of 1: SGLang fuses queries, keys and values,
    and takes no LoRA of queries without values.
    """
    if plan.ratio:
        raise CalibrateError(f"the fit goes by log n, {_WEIGHTS}")
    _require_projections(config, queries)
    projections = {projection.module for projection in queries.architecture.projections}
    factors: Factors = {}
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
    """The indices of the outputs whose factor is not 1."""
    return np.flatnonzero(by_output != 1)


def rank_of(factors: Factors) -> int:
    """The rank of a LoRA: the outputs that change in the projection where most do."""
    return max(len(_changed_rows(by_output)) for by_output in factors.values())


def _check_rank(factors: Factors, max_rank: int, width: int) -> None:
    """Raises CalibrateError if the rank is larger than allowed; heads have `width` rows."""
    largest = max(factors, key=lambda name: len(_changed_rows(factors[name])))
    rank = len(_changed_rows(factors[largest]))
    if rank > max_rank:
        fewer = command("model fit RUN", heads_per_layer=str(max(max_rank // width, 1)))
        raise CalibrateError(
            f"{largest} needs a LoRA of rank {rank:,}, and {max_rank:,} is allowed; give "
            f"max_rank={rank}, which PEFT takes (vLLM up to 512), fit fewer heads ({fewer}), or "
            "export the weights instead",
            parameter="max_rank",
        )


def _tensors(
    factors: Factors, read_weight: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A and B of each projection, by PEFT's names; weights are read by name."""
    rank, tensors = rank_of(factors), dict[str, torch.Tensor]()
    for name, by_output in factors.items():
        weight, rows = read_weight(f"{name}.weight"), _changed_rows(by_output)
        a = weight.new_zeros((rank, weight.shape[1]))
        a[: len(rows)] = weight[torch.from_numpy(rows)]
        b = np.zeros((len(by_output), rank), np.float32)
        b[rows, np.arange(len(rows))] = by_output[rows] - 1
        tensors[_TENSOR.format(name, "A")] = a
        tensors[_TENSOR.format(name, "B")] = torch.from_numpy(b)
    return tensors


def _packed(tensors: dict[str, torch.Tensor]) -> bytes:
    return save(tensors, {"format": "pt"})


def _configuration(factors: Factors, base: str, revision: str | None) -> Any:
    """The configuration of PEFT."""
    from peft import LoraConfig

    rank = rank_of(factors)
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


def _configuration_text(configuration: Any) -> bytes:
    content = configuration.to_dict()
    text = json.dumps(content, indent=2, sort_keys=True, default=sorted)  # PEFT makes sets
    return f"{text}\n".encode()


def by_lora(config: Any, original: PreTrainedModel, plan: ExportPlan) -> Any:
    """The model under a LoRA, as PEFT loads it."""
    from peft import PeftModel

    queries, weights = queries_of(config, original), original.state_dict()
    factors = factors_of(config, queries, plan)
    files = {
        CONFIG: _configuration_text(_configuration(factors, "", None)),
        WEIGHTS: _packed(_tensors(factors, weights.__getitem__)),
    }
    with scratch_folder(files) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of what Transformers will remove
        return PeftModel.from_pretrained(copy.deepcopy(original), str(folder)).eval()


def _tensors_of_files(
    folder: ModelFolder, queries: Queries, plan: ExportPlan, factors: Factors
) -> dict[str, torch.Tensor]:
    """A and B by the weights in a model's files.

    Raises CalibrateError if these are not what the configuration asks for.
    """
    changes_of_files(folder, queries, plan)
    paths = {name: path for path, header in folder.headers.items() for name in header}
    by_role = names_by_role(paths, queries.architecture)
    stored = {name: by_role[role] for role, name in queries.names.items() if role in by_role}
    return _tensors(factors, lambda name: _read(paths[stored[name]], stored[name]))


def _read(path: Path, name: str) -> torch.Tensor:
    """A tensor of a file; NumPy has no bfloat16 that PyTorch would take."""
    x = read_tensor(path, name)
    bits = np.array(x.view(f"i{x.itemsize}"))
    return torch.from_numpy(bits).view(_DTYPES[x.dtype.name])


def write_lora(export: Export, out: Path, card: str, max_rank: int = MAX_RANK) -> ExportContents:
    """Writes the folder of a LoRA, whole or not at all; CalibrateError if it cannot be one."""
    source, queries, plan = export.folder, export.queries, export.plan
    require_outside(out, source.path)
    factors = factors_of(source.config, queries, plan)
    _check_rank(factors, max_rank, queries.width)
    fit = replace(export.fit, extra={**export.fit.extra, _MODEL: export.model})
    files = {
        CONFIG: _configuration_text(_configuration(factors, *base_of(source.path))),
        WEIGHTS: _packed(_tensors_of_files(source, queries, plan, factors)),
        ADAPTER_FIT: dumps(fit).encode(),
        CARD: card.encode(errors="backslashreplace"),
    }
    with whole_folder(out) as folder:
        for name, data in files.items():
            write_atomically(folder / name, data)
        return replace(read_lora(folder, source, export.model), path=out)


def read_lora(path: Path, model: ModelFolder, fingerprint: str | None = None) -> ExportContents:
    """Reads a LoRA, and compares PEFT's files with what its fit asks for in its model.

    Raises CalibrateError if it cannot be read, is not an exported LoRA, or is not of the model,
    whose fingerprint may be given.
    """
    require_peft()
    fit = read(path / ADAPTER_FIT)
    try:
        made_for: str = read_field(fit.extra, _MODEL, TEXT)
    except Refusal as refusal:
        raise CalibrateError(f"{path / ADAPTER_FIT}: {refusal}; export again") from refusal
    if (actual := fingerprint or model.fingerprint()) != made_for:
        raise CalibrateError(
            f"{path} was made for {made_for}, and {model.path} is {actual}; give its own with "
            "model=",
            parameter="model",
        )
    require_listed(model.config)
    queries, plan = queries_without_weights(model), plan_for(fit, model)
    stored = read_configuration(path / CONFIG)
    factors = factors_of(model.config, queries, plan)
    configuration = _configuration(factors, *base_of(model.path))
    tensors = _tensors_of_files(model, queries, plan, factors)
    problems = added(path, (CONFIG, WEIGHTS, ADAPTER_FIT))
    problems += _unlike_settings(stored, configuration)
    problems += _unlike_base(stored, model, actual) + _unlike_tensors(path, tensors)
    metadata = {"fit": fit.reference, "id": digest(fit), "model": made_for}
    metadata["digest"] = f"sha256:{digest_of_file(path / WEIGHTS)}"
    model_type, notes = queries.architecture.model_type, (f"A LoRA of rank {rank_of(factors):,}.",)
    return ExportContents(path, metadata, model_type, plan, tuple(problems), notes)


def _unlike_settings(stored: dict[str, Any], configuration: Any) -> list[str]:
    """A line for each key of PEFT's configuration that is not as it would be written now.

    What the base model is has a check of its own. Another version of PEFT may have written it: keys
    that were added since, and are absent, then have their defaults.
    """
    settings, expected = dict(stored), json.loads(_configuration_text(configuration))
    expected = expected | {key: settings[key] for key in (_BASE, _REVISION) if key in settings}
    version = settings.get(_VERSION)
    if isinstance(version, str) and version != expected[_VERSION]:
        expected |= {_VERSION: version}
        defaults = {field.name: _default(field) for field in fields(configuration)}
        settings = {key: x for key, x in defaults.items() if key in expected} | settings
    keys, absent = sorted(expected.keys() | settings.keys()), object()
    unlike = [key for key in keys if settings.get(key, absent) != expected.get(key, absent)]
    return [f"{CONFIG} has another {key}" for key in unlike]


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _unlike_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    """A line for each tensor of a LoRA that is not what its fit asks for."""
    file = path / WEIGHTS
    stored = {name: (x.dtype, x.shape) for name, x in read_header(file).items()}
    if stored != {name: (_NAMES[x.dtype], tuple(x.shape)) for name, x in tensors.items()}:
        return [f"{WEIGHTS} has other tensors than {ADAPTER_FIT} asks for"]
    unlike = [name for name, x in tensors.items() if not torch.equal(_read(file, name), x)]
    return [f"{name} is not what {ADAPTER_FIT} asks for" for name in unlike]


def base_of(path: Path) -> tuple[str, str | None]:
    """A model's name on the Hub and its revision, in the Hub's cache; else its path, and None.

    The path is absolute: a relative one PEFT looks up in the folder where it happens to run, and
    where nothing is there, on the Hub.
    """
    snapshot = path.resolve()
    repository = snapshot.parents[1].name if snapshot.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), snapshot.name
    return str(snapshot), None


def _unlike_base(stored: Mapping[str, Any], model: ModelFolder, fingerprint: str) -> list[str]:
    """A line if the base model of PEFT's configuration is not the model at hand.

    It may be named otherwise than it was written, by its name on the Hub, say: then the files that
    PEFT would load, without a network, decide.
    """
    base, revision = stored.get(_BASE), stored.get(_REVISION)
    if (base, revision) == base_of(model.path):
        return []
    try:
        folder = _base_folder(base, revision)
        if folder == model.path.resolve() or ModelFolder(folder).fingerprint() == fingerprint:
            return []
        reason = f"it is another one than {model.path}"
    except CalibrateError as failure:
        reason = str(failure)
    name = repr(base) if revision is None else f"{base!r} at revision {revision!r}"
    return [f"{CONFIG} names the base model {name}: {reason}"]


def _base_folder(base: Any, revision: Any) -> Path:
    """The folder that PEFT would load a base model from; CalibrateError if it is not here."""
    if not isinstance(base, str) or not isinstance(revision, str | None):
        raise CalibrateError("that is no name of a model")
    path = Path(base)
    if path.is_absolute() or path.is_dir():
        if not path.is_absolute():
            raise CalibrateError("a relative path, which depends on where it is loaded")
        if revision is not None:
            raise CalibrateError("a folder has no revisions")
        if not path.is_dir():
            raise CalibrateError("there is no such folder")
        return path.resolve()
    return cached_snapshot(base, revision).resolve()
