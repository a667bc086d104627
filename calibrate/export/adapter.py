"""A fit as an adapter of PEFT, which multiplies the queries of a model that stays as it is.

IA3 multiplies what a projection gives by a vector: for queries, the constant of each head repeated
by its width, and 1 for the keys and values of a fused projection. Beside PEFT's files the folder
has a card, and `fit.json`, the fit, which says under "x-adapter" what it was made for.
"""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.export.checkpoint import Export, added, plan_for, read_configuration
from calibrate.export.configuration import CAP
from calibrate.export.plan import Carried, Plan, make_plan
from calibrate.export.proof import queries_of, queries_without_weights
from calibrate.export.queries import PROJECTIONS, Queries, require_supported
from calibrate.files.atomic_io import whole_folder, write_atomically
from calibrate.files.coefficient_file import ADAPTER_FIT, digest, dumps, read
from calibrate.files.coefficients import Coefficients
from calibrate.files.json_shapes import TEXT, Integer, Map, Object, Scalar, read_field
from calibrate.files.model_fingerprint import digest_of_file
from calibrate.files.safetensors_file import read_header
from calibrate.files.strict_json import Refusal
from calibrate.transformers.folders import ModelFolder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
CARD = "README.md"
_TENSOR = "base_model.model.{}.ia3_l"
_MADE_FOR = "x-adapter"  # in the coefficient file
_MOST_OUTPUTS, _MOST_HEADS = 1 << 24, 1 << 20  # of a model: Llama 3.1 405B has 2,064,384, 16,128
_COUNT = Integer(1, _MOST_HEADS)
_SHAPE = Object(
    {
        "model": TEXT, "model_type": TEXT, "num_hidden_layers": _COUNT,
        "num_attention_heads": _COUNT, "head_dim": _COUNT, "multi_query": Scalar(),
        "max_position_embeddings": Integer(1, 1 << 53, null=True), "outputs": Map(_COUNT),
    },
    required=True,
)  # fmt: skip


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
    config, queries = export.folder.config, export.queries
    vectors = vectors_of(config, queries, export.plan)
    made_for = {
        "model": export.model, "model_type": queries.model_type, "head_dim": queries.width,
        "num_hidden_layers": config.num_hidden_layers, "num_attention_heads": queries.n_heads,
        "multi_query": getattr(config, "multi_query", True),
        "max_position_embeddings": export.folder.context,
        "outputs": {name: len(vector) for name, vector in vectors.items()},
    }  # fmt: skip
    fit = replace(export.fit, extra={**export.fit.extra, _MADE_FOR: made_for})
    files = _files(queries, vectors, *base_of(export.folder.path))
    files |= {ADAPTER_FIT: dumps(fit).encode(), CARD: card.encode()}
    with whole_folder(out) as folder:
        for name, data in files.items():
            write_atomically(folder / name, data)
        return replace(read_adapter(folder), path=out)


def read_adapter(path: Path, model: ModelFolder | None = None) -> Carried:
    """Reads an adapter, and compares PEFT's files with what its fit asks for, in a model if given.

    Raises CalibrateError if it cannot be read, or is not an exported adapter.
    """
    fit = read(path / ADAPTER_FIT)
    try:
        made_for = read_field(fit.extra, _MADE_FOR, _SHAPE)
        if model:
            require_supported(model.config.model_type)
            config, queries, plan = (
                model.config,
                queries_without_weights(model),
                plan_for(fit, model),
            )
        else:
            config, queries, plan = _made_for(fit, made_for)
        vectors = vectors_of(config, queries, plan)
    except (Refusal, ValueError) as failure:  # ValueError: NumPy's, of sizes that are not a model's
        raise CalibrateError(f"{path / ADAPTER_FIT}: {failure}; export again") from failure
    faults = added(path, (CONFIG, WEIGHTS, ADAPTER_FIT)) + _unlike(path, queries, vectors)
    if model and (found := model.fingerprint()) != made_for["model"]:
        faults.append(f"it was made for {made_for['model']}, and {model.path} is {found}")
    said = {"fit": fit.reference, "id": digest(fit), "model": made_for["model"]}
    said["digest"] = f"sha256:{digest_of_file(path / WEIGHTS)}"
    return Carried(path, said, queries.model_type, plan, tuple(faults))


def _made_for(fit: Coefficients, made_for: dict[str, Any]) -> tuple[Any, Queries, Plan]:
    """What a file says of the model: its configuration, its queries, and the plan."""
    config = SimpleNamespace(**made_for)
    n_layers, n_heads = config.num_hidden_layers, config.num_attention_heads
    if n_layers * n_heads > _MOST_HEADS or sum(config.outputs.values()) > _MOST_OUTPUTS:
        raise Refusal((_MADE_FOR,), "beyond any model", "restore the file")
    # Square, so that outputs are rows as well as columns; inputs take no part.
    queries = Queries(config, {f"{name}.weight": (n, n) for name, n in config.outputs.items()})
    return config, queries, make_plan(fit, n_layers, n_heads, config.max_position_embeddings)


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
