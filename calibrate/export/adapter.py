"""A fit as an adapter of PEFT, which multiplies the queries of a model that stays as it is.

The method is IA3 (`ia3.py`) or LoRA (`lora.py`). Beside PEFT's files the folder has a card, and
`fit.json`, the fit, which says under "x-adapter-model" which model it was made for.
"""

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError, install
from calibrate.export.adapter_base import BASE, CONFIG, REVISION, base_of, unlike_base
from calibrate.export.adapter_method import AdapterMethod, ReadWeight
from calibrate.export.architectures import require_supported
from calibrate.export.checkpoint import CARD, added
from calibrate.export.configuration import soft_cap
from calibrate.export.ia3 import Ia3
from calibrate.export.lora import Lora
from calibrate.export.numerical_check import Exporter, queries_of, queries_without_weights
from calibrate.export.plan import ExportContents, ExportPlan
from calibrate.export.preparation import Export, plan_for, read_configuration
from calibrate.export.queries import Queries, names_by_role
from calibrate.export.weight_changes import changes_of_files
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
from calibrate.transformers.folders import ModelFolder

WEIGHTS = "adapter_model.safetensors"  # as PEFT calls it
_MODEL = "x-adapter-model"  # in the coefficient file: the fingerprint of the model
_DTYPES = {np.dtype(x).name: getattr(torch, np.dtype(x).name) for x in FLOATS.values()}
_NAMES = {_DTYPES[np.dtype(x).name]: name for name, x in FLOATS.items()}  # in files
_VERSION = "peft_version"  # a key of CONFIG


def require_peft() -> None:
    """Raises CalibrateError if PEFT, which defines what an adapter is, is not installed."""
    if not find_spec("peft"):
        raise CalibrateError(f"an adapter needs the package peft: {install('peft')}")


def factors_of(
    config: Any, queries: Queries, plan: ExportPlan, method: AdapterMethod
) -> dict[str, np.ndarray]:
    """The factors on the outputs of each projection, by its name: float64 (outputs,);
    CalibrateError if an adapter cannot hold the plan.
    """
    remedy = "and an adapter only multiplies what projections give; export the weights instead"
    if plan.ratio:
        raise CalibrateError(f"the fit goes by log n, {remedy}")
    if capped := soft_cap(config):
        key, cap = capped
        raise CalibrateError(f"{key} is {cap}: the cap would have to grow with beta, {remedy}")
    factors = {}
    for role, change in queries.changes(plan).items():
        name = queries.names[role]
        if not queries.architecture.makes_by_projection(role.module):
            raise CalibrateError(f"{name} would have to change, {remedy}")
        if role.name == "weight":
            factors[name.removesuffix(".weight")] = change.factors.reshape(-1)
        elif not method.multiplies_biases:
            raise CalibrateError(
                f"{name} would have to change, and a {method.label} leaves biases as they are; "
                "export the weights instead"
            )
    if not factors:
        raise CalibrateError("every beta of the fit is 1, and leaves nothing to adapt")
    return method.prepare(factors, {queries.names[role]: x for role, x in queries.shapes.items()})


def by_adapter(method: AdapterMethod) -> Exporter:
    """The exporter whose models are under an adapter, as PEFT loads it."""
    return partial(_under_adapter, method)


def _under_adapter(
    method: AdapterMethod, config: Any, original: PreTrainedModel, plan: ExportPlan
) -> Any:
    from peft import PeftModel

    queries, weights = queries_of(config, original), original.state_dict()
    factors = factors_of(config, queries, plan, method)
    files = {
        CONFIG: _configuration_text(_configuration(method, queries, factors, "", None)),
        WEIGHTS: _packed(method.tensors(factors, _oriented(queries, weights.__getitem__))),
    }
    with scratch_folder(files) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of what Transformers will remove
        return PeftModel.from_pretrained(copy.deepcopy(original), str(folder)).eval()


def _configuration(
    method: AdapterMethod,
    queries: Queries,
    factors: dict[str, np.ndarray],
    base: str,
    revision: str | None,
) -> Any:
    """The configuration of PEFT."""
    return method.configuration(
        factors,
        base_model_name_or_path=base,
        revision=revision,
        task_type="CAUSAL_LM",
        inference_mode=True,
        target_modules=sorted(factors),
        fan_in_fan_out=_is_transposed(queries),
    )


def _configuration_text(configuration: Any) -> bytes:
    content = configuration.to_dict()
    text = json.dumps(content, indent=2, sort_keys=True, default=sorted)  # PEFT makes sets
    return f"{text}\n".encode()


def _packed(tensors: dict[str, torch.Tensor]) -> bytes:
    return save(tensors, {"format": "pt"})


def _is_transposed(queries: Queries) -> bool:
    return any(x.is_transposed for x in queries.architecture.projections)


def _oriented(queries: Queries, read: ReadWeight) -> ReadWeight:
    """Weights with a row for each output."""
    return (lambda name: read(name).T) if _is_transposed(queries) else read


def weights_of_files(folder: ModelFolder, queries: Queries, plan: ExportPlan) -> ReadWeight:
    """Weights of queries, by their names in the model, as the files have them.

    Raises CalibrateError if they are not what the configuration asks for.
    """
    changes_of_files(folder, queries, plan)
    paths = {name: path for path, header in folder.headers.items() for name in header}
    by_role = names_by_role(paths, queries.architecture)
    stored = {name: by_role[role] for role, name in queries.names.items() if role in by_role}
    return _oriented(queries, lambda name: _read(paths[stored[name]], stored[name]))


def _read(path: Path, name: str) -> torch.Tensor:
    """A tensor of a file; NumPy has no bfloat16 that PyTorch would take."""
    x = read_tensor(path, name)
    bits = np.array(x.view(f"i{x.itemsize}"))
    return torch.from_numpy(bits).view(_DTYPES[x.dtype.name])


def write_adapter(export: Export, out: Path, card: str, method: AdapterMethod) -> ExportContents:
    """Writes the folder of an adapter, whole or not at all; CalibrateError if it cannot be one."""
    source = export.folder
    require_outside(out, source.path)
    queries = export.queries
    factors = factors_of(source.config, queries, export.plan, method)
    method.check(factors)
    weights = weights_of_files(source, queries, export.plan)
    configuration = _configuration(method, queries, factors, *base_of(source.path))
    fit = replace(export.fit, extra={**export.fit.extra, _MODEL: export.model})
    files = {
        CONFIG: _configuration_text(configuration),
        WEIGHTS: _packed(method.tensors(factors, weights)),
        ADAPTER_FIT: dumps(fit).encode(),
        CARD: card.encode(errors="backslashreplace"),
    }
    with whole_folder(out) as folder:
        for name, data in files.items():
            write_atomically(folder / name, data)
        return replace(read_adapter(folder, source, export.model), path=out)


def read_adapter(path: Path, model: ModelFolder, fingerprint: str | None = None) -> ExportContents:
    """Reads an adapter, and compares PEFT's files with what its fit asks for in its model.

    Raises CalibrateError if it cannot be read, is not an exported adapter, or is not of the model,
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
    require_supported(model.config)
    queries, plan = queries_without_weights(model), plan_for(fit, model)
    stored = read_configuration(path / CONFIG)
    method = _method_of(stored)
    factors = factors_of(model.config, queries, plan, method)
    configuration = _configuration(method, queries, factors, *base_of(model.path))
    tensors = method.tensors(factors, weights_of_files(model, queries, plan))
    problems = added(path, (CONFIG, WEIGHTS, ADAPTER_FIT))
    problems += _unlike_settings(stored, configuration)
    problems += unlike_base(stored, model, actual) + _unlike_tensors(path, tensors)
    metadata = {"fit": fit.reference, "id": digest(fit), "model": made_for}
    metadata["digest"] = f"sha256:{digest_of_file(path / WEIGHTS)}"
    model_type, notes = queries.architecture.model_type, method.notes(factors)
    return ExportContents(path, metadata, model_type, plan, tuple(problems), notes)


def _method_of(stored: Mapping[str, Any]) -> AdapterMethod:
    """The method of a configuration, though some of its keys may have been changed."""
    is_lora = stored.get("peft_type") == "LORA" or "lora_alpha" in stored
    return Lora() if is_lora else Ia3()


def _unlike_settings(stored: dict[str, Any], configuration: Any) -> list[str]:
    """A line for each key of PEFT's configuration that is not as it would be written now.

    What the base model is has a check of its own. Another version of PEFT may have written it: keys
    that were added since, and are absent, then have their defaults.
    """
    settings, expected = dict(stored), json.loads(_configuration_text(configuration))
    expected = expected | {key: settings[key] for key in (BASE, REVISION) if key in settings}
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
    """A line for each tensor of an adapter that is not what its fit asks for."""
    file = path / WEIGHTS
    stored = {name: (x.dtype, x.shape) for name, x in read_header(file).items()}
    if stored != {name: (_NAMES[x.dtype], tuple(x.shape)) for name, x in tensors.items()}:
        return [f"{WEIGHTS} has other tensors than {ADAPTER_FIT} asks for"]
    unlike = [name for name, x in tensors.items() if not torch.equal(_read(file, name), x)]
    return [f"{name} is not what {ADAPTER_FIT} asks for" for name in unlike]
