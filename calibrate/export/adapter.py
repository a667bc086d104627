"""A fit as an adapter of PEFT, which multiplies the queries of a model that stays as it is.

IA3 multiplies what a projection gives by a vector: for queries, the constant of each head repeated
by its width, and 1 for the keys and values of a fused projection. Beside PEFT's files the folder
has a card, and `fit.json`, the fit, which says under "x-adapter-model" which model it was made for.
"""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.export.checkpoint import Export, added, plan_for, read_configuration
from calibrate.export.configuration import CAP
from calibrate.export.plan import Carried, Plan
from calibrate.export.proof import queries_of, queries_without_weights
from calibrate.export.queries import PROJECTIONS, Queries, require_supported
from calibrate.files.atomic_io import whole_folder, write_atomically
from calibrate.files.coefficient_file import ADAPTER_FIT, digest, dumps, read
from calibrate.files.json_shapes import TEXT, read_field
from calibrate.files.model_fingerprint import digest_of_file
from calibrate.files.safetensors_file import read_header
from calibrate.files.strict_json import Refusal
from calibrate.transformers.folders import ModelFolder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
CARD = "README.md"
_TENSOR = "base_model.model.{}.ia3_l"
_MODEL = "x-adapter-model"  # in the coefficient file: the fingerprint of the model


def vectors_of(config: Any, queries: Queries, plan: Plan) -> dict[str, np.ndarray]:
    """What the outputs of each projection are multiplied by, by its name: float32 (outputs, 1);
    CalibrateError if an adapter cannot hold the plan.
    """
    remedy = "and an adapter only multiplies what projections give; leave out --as adapter"
    if plan.ratio:
        raise CalibrateError(f"the fit goes by log n, {remedy}")
    if cap := getattr(config, CAP, None):
        raise CalibrateError(f"{CAP} is {cap}: the cap would have to grow with beta, {remedy}")
    vectors = {}
    for place, change in queries.changes(plan).items():
        name = queries.names[place]
        if place.module not in PROJECTIONS:
            raise CalibrateError(f"{name} would have to change, {remedy}")
        if place.name == "weight":  # the bias is in what the projection gives
            vector = change.factors.reshape(-1, 1).astype(np.float32)
            vectors[name.removesuffix(".weight")] = vector
    if not vectors:
        raise CalibrateError("every beta of the fit is 1, and leaves nothing to adapt")
    return vectors


def by_adapter(config: Any, original: PreTrainedModel, plan: Plan) -> Any:
    """The model under an adapter, as PEFT loads it."""
    from peft import PeftModel

    queries = queries_of(config, original)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of what Transformers will remove
        for name, data in _files(queries, vectors_of(config, queries, plan), "", None).items():
            (Path(folder) / name).write_bytes(data)
        return PeftModel.from_pretrained(copy.deepcopy(original), folder).eval()


def _files(
    queries: Queries, vectors: dict[str, np.ndarray], base: str, revision: str | None
) -> dict[str, bytes]:
    """The files that PEFT reads, by name."""
    from peft import IA3Config

    configuration = IA3Config(
        **_settings(queries, vectors), base_model_name_or_path=base, revision=revision,
        task_type="CAUSAL_LM", inference_mode=True,
    ).to_dict()  # fmt: skip
    text = json.dumps(configuration, indent=2, sort_keys=True, default=sorted)  # PEFT makes sets
    tensors = {_TENSOR.format(name): vector for name, vector in vectors.items()}
    return {CONFIG: f"{text}\n".encode(), WEIGHTS: save(tensors, {"format": "pt"})}


def _settings(queries: Queries, vectors: dict[str, np.ndarray]) -> dict[str, Any]:
    """What decides in a configuration of PEFT which vectors are applied, and how."""
    return {
        "peft_type": "IA3", "target_modules": sorted(vectors), "feedforward_modules": [],
        "exclude_modules": None, "modules_to_save": None, "auto_mapping": None,
        "fan_in_fan_out": queries.model_type == "gpt2",
    }  # fmt: skip


def base_of(path: Path) -> tuple[str, str | None]:
    """A model's name on the Hub and its revision, in the Hub's cache; else its path, and None."""
    snapshot = path.resolve()
    repository = snapshot.parents[1].name if snapshot.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), snapshot.name
    return str(path), None


def write_adapter(export: Export, out: Path, card: str) -> Carried:
    """Writes the folder of an adapter, whole or not at all; CalibrateError if it cannot be one."""
    queries = export.queries
    vectors = vectors_of(export.folder.config, queries, export.plan)
    fit = replace(export.fit, extra={**export.fit.extra, _MODEL: export.model})
    files = _files(queries, vectors, *base_of(export.folder.path))
    files |= {ADAPTER_FIT: dumps(fit).encode(), CARD: card.encode()}
    with whole_folder(out) as folder:
        for name, data in files.items():
            write_atomically(folder / name, data)
        return replace(read_adapter(folder, export.folder, export.model), path=out)


def read_adapter(path: Path, model: ModelFolder, fingerprint: str | None = None) -> Carried:
    """Reads an adapter, and compares PEFT's files with what its fit asks for in its model.

    Raises CalibrateError if it cannot be read, is not an exported adapter, or is not of the model,
    whose fingerprint may be given.
    """
    fit = read(path / ADAPTER_FIT)
    try:
        made_for: str = read_field(fit.extra, _MODEL, TEXT)
    except Refusal as refusal:
        raise CalibrateError(f"{path / ADAPTER_FIT}: {refusal}; export again") from refusal
    if (found := fingerprint or model.fingerprint()) != made_for:
        raise CalibrateError(
            f"{path} was made for {made_for}, and {model.path} is {found}; give its own --model"
        )
    require_supported(model.config.model_type)
    queries, plan = queries_without_weights(model), plan_for(fit, model)
    vectors = vectors_of(model.config, queries, plan)
    faults = added(path, (CONFIG, WEIGHTS, ADAPTER_FIT)) + _unlike(path, queries, vectors)
    said = {"fit": fit.reference, "id": digest(fit), "model": made_for}
    said["digest"] = f"sha256:{digest_of_file(path / WEIGHTS)}"
    return Carried(path, said, queries.model_type, plan, tuple(faults))


def _unlike(path: Path, queries: Queries, vectors: dict[str, np.ndarray]) -> list[str]:
    """What differs in the files of PEFT, a line each."""
    stored = read_configuration(path / CONFIG)
    settings = _settings(queries, vectors)
    faults = [f"{CONFIG} has another {key}" for key in settings if stored.get(key) != settings[key]]
    wanted = {_TENSOR.format(name): vector for name, vector in vectors.items()}
    found = {name: (x.dtype, x.shape) for name, x in read_header(path / WEIGHTS).items()}
    if found != {name: ("F32", x.shape) for name, x in wanted.items()}:
        return [*faults, f"{WEIGHTS} has other tensors than {ADAPTER_FIT} asks for"]
    tensors = load_file(path / WEIGHTS)
    unlike = [name for name, x in wanted.items() if not np.array_equal(tensors[name], x)]
    return faults + [f"{name} is not what {ADAPTER_FIT} asks for" for name in unlike]
