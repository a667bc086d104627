"""A fit as an adapter of PEFT, which multiplies the queries of a model that stays as it is.

IA3 multiplies what a projection gives by a vector: for queries, the constant of each head repeated
by its width, and 1 for the keys and values of a fused projection. Beside PEFT's files the folder
has a card, and `fit.json`, the fit, which says under "x-adapter-model" which model it was made for.
"""

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import snapshot_download
from safetensors.numpy import load, save
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError, install, parameter
from calibrate.export.architectures import require_supported
from calibrate.export.checkpoint import Export, added, plan_for, read_configuration
from calibrate.export.configuration import soft_cap
from calibrate.export.numerical_check import queries_of, queries_without_weights
from calibrate.export.plan import ExportContents, Plan
from calibrate.export.queries import Queries
from calibrate.storage.atomic_io import (
    require_outside,
    scratch_folder,
    whole_folder,
    write_atomically,
)
from calibrate.storage.json_shapes import TEXT, read_field
from calibrate.storage.model_fingerprint import digest_of_file
from calibrate.storage.npz import read_bytes
from calibrate.storage.safetensors_file import read_header
from calibrate.storage.strict_json import Refusal
from calibrate.store.coefficient_file import ADAPTER_FIT, digest, dumps, read
from calibrate.transformers.folders import ModelFolder

# PEFT's names.
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CARD = "README.md"
_TENSOR = "base_model.model.{}.ia3_l"
_MODEL = "x-adapter-model"  # in the coefficient file: the fingerprint of the model
# PEFT's keys.
_BASE = "base_model_name_or_path"
_REVISION = "revision"
_VERSION = "peft_version"


def require_peft() -> None:
    """Raises CalibrateError if PEFT, which defines what an adapter is, is not installed."""
    if not find_spec("peft"):
        raise CalibrateError(f"an adapter needs the package peft: {install('peft')}")


def vectors_of(config: Any, queries: Queries, plan: Plan) -> dict[str, np.ndarray]:
    """The factors on the outputs of each projection, by its name: float32 (outputs, 1);
    CalibrateError if an adapter cannot hold the plan.
    """
    remedy = "and an adapter only multiplies what projections give; export the weights instead"
    if plan.ratio:
        raise CalibrateError(f"the fit goes by log n, {remedy}")
    if capped := soft_cap(config):
        key, cap = capped
        raise CalibrateError(f"{key} is {cap}: the cap would have to grow with beta, {remedy}")
    vectors = {}
    for role, change in queries.changes(plan).items():
        name = queries.names[role]
        if not queries.architecture.makes_by_projection(role.module):
            raise CalibrateError(f"{name} would have to change, {remedy}")
        if role.name == "weight":  # the bias is in what the projection gives
            vector = change.factors.reshape(-1, 1).astype(np.float32)
            vectors[name.removesuffix(".weight")] = vector
    if not vectors:
        raise CalibrateError("every beta of the fit is 1, and leaves nothing to adapt")
    return vectors


def by_adapter(config: Any, original: PreTrainedModel, plan: Plan) -> Any:
    """The model under an adapter, as PEFT loads it."""
    from peft import PeftModel

    queries = queries_of(config, original)
    files = _files(queries, vectors_of(config, queries, plan), "", None)
    with scratch_folder(files) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of what Transformers will remove
        return PeftModel.from_pretrained(copy.deepcopy(original), str(folder)).eval()


def _files(
    queries: Queries, vectors: dict[str, np.ndarray], base: str, revision: str | None
) -> dict[str, bytes]:
    """The files that PEFT reads, by name."""
    from peft import IA3Config

    configuration = IA3Config(
        base_model_name_or_path=base,
        revision=revision,
        task_type="CAUSAL_LM",
        inference_mode=True,
        target_modules=sorted(vectors),
        feedforward_modules=[],
        fan_in_fan_out=any(x.is_transposed for x in queries.architecture.projections),
    ).to_dict()
    text = json.dumps(configuration, indent=2, sort_keys=True, default=sorted)  # PEFT makes sets
    tensors = {_TENSOR.format(name): vector for name, vector in vectors.items()}
    return {CONFIG: f"{text}\n".encode(), WEIGHTS: save(tensors, {"format": "pt"})}


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


def write_adapter(export: Export, out: Path, card: str) -> ExportContents:
    """Writes the folder of an adapter, whole or not at all; CalibrateError if it cannot be one."""
    require_outside(out, export.folder.path)
    queries = export.queries
    vectors = vectors_of(export.folder.config, queries, export.plan)
    fit = replace(export.fit, extra={**export.fit.extra, _MODEL: export.model})
    files = _files(queries, vectors, *base_of(export.folder.path))
    files |= {ADAPTER_FIT: dumps(fit).encode(), CARD: card.encode(errors="backslashreplace")}
    with whole_folder(out) as folder:
        for name, data in files.items():
            write_atomically(folder / name, data)
        return replace(read_adapter(folder, export.folder, export.model), path=out)


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
            f"{parameter('model')}"
        )
    require_supported(model.config.model_type)
    queries, plan = queries_without_weights(model), plan_for(fit, model)
    vectors = vectors_of(model.config, queries, plan)
    stored = read_configuration(path / CONFIG)
    expected = json.loads(_files(queries, vectors, *base_of(model.path))[CONFIG])
    problems = added(path, (CONFIG, WEIGHTS, ADAPTER_FIT)) + _unlike_settings(stored, expected)
    problems += _unlike_base(stored, model, actual) + _unlike_vectors(path, vectors)
    metadata = {"fit": fit.reference, "id": digest(fit), "model": made_for}
    metadata["digest"] = f"sha256:{digest_of_file(path / WEIGHTS)}"
    return ExportContents(path, metadata, queries.architecture.model_type, plan, tuple(problems))


def _unlike_settings(stored: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """A line for each key of PEFT's configuration that is not as it would be written now.

    What the base model is has a check of its own. Another version of PEFT may have written it: keys
    that were added since, and are absent, then have their defaults.
    """
    from peft import IA3Config

    settings = dict(stored)
    expected = expected | {key: settings[key] for key in (_BASE, _REVISION) if key in settings}
    version = settings.get(_VERSION)
    if isinstance(version, str) and version != expected[_VERSION]:
        expected |= {_VERSION: version}
        settings = {field.name: field.default for field in fields(IA3Config)} | settings
    keys, absent = sorted(expected.keys() | settings.keys()), object()
    unlike = [key for key in keys if settings.get(key, absent) != expected.get(key, absent)]
    return [f"{CONFIG} has another {key}" for key in unlike]


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
    try:
        return Path(snapshot_download(base, revision=revision, local_files_only=True)).resolve()
    except Exception as failure:  # it is not the name of a repository, or was not fetched
        raise CalibrateError(
            "the Hub's cache on this machine does not have it (hf download fetches it)"
        ) from failure


def _unlike_vectors(path: Path, vectors: Mapping[str, np.ndarray]) -> list[str]:
    """A line for each tensor of an adapter that is not the vector that its fit asks for."""
    expected = {_TENSOR.format(name): vector for name, vector in vectors.items()}
    stored = {name: (x.dtype, x.shape) for name, x in read_header(path / WEIGHTS).items()}
    if stored != {name: ("F32", x.shape) for name, x in expected.items()}:
        return [f"{WEIGHTS} has other tensors than {ADAPTER_FIT} asks for"]
    tensors = load(read_bytes(path / WEIGHTS))  # a path that is not UTF-8 safetensors cannot open
    unlike = [name for name, x in expected.items() if not np.array_equal(tensors[name], x)]
    return [f"{name} is not what {ADAPTER_FIT} asks for" for name in unlike]
