"""A fit as an adapter of PEFT, which multiplies the queries of a model that stays as it is.

IA3 multiplies what a projection gives by a vector: for queries, the constant of each head repeated
by its width, and 1 for the keys and values of a fused projection. Beside PEFT's two files the
folder has `fit.json`, the coefficient file, which says under "x-adapter" what it was made for, and
a model card that may be edited.
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

import calibrate
from calibrate.errors import CalibrateError
from calibrate.export.checkpoint import Export, added, plan_for, prepare, require_outside
from calibrate.export.configuration import CAP
from calibrate.export.plan import Carried, Plan, make_plan
from calibrate.export.proof import queries_of, queries_without_weights
from calibrate.export.queries import PROJECTIONS, Queries, require_supported
from calibrate.files.atomic_io import whole_folder, write_atomically
from calibrate.files.coefficient_file import digest, dumps, read
from calibrate.files.coefficients import MAX_INDEX, Coefficients
from calibrate.files.json_shapes import TEXT, Integer, Map, Object, Scalar, read_field
from calibrate.files.model_fingerprint import digest_of_file
from calibrate.files.npz import read_bytes
from calibrate.files.safetensors_file import read_header
from calibrate.files.strict_json import Refusal, parse
from calibrate.transformers.folders import MOST_CONFIG_BYTES, ModelFolder

CONFIG, WEIGHTS, FIT, CARD = (
    "adapter_config.json", "adapter_model.safetensors", "fit.json", "README.md",
)  # fmt: skip
_MADE_FOR = "x-adapter"  # in the coefficient file
_MOST_OUTPUTS, _MOST_HEADS = 1 << 24, 1 << 20  # of a model: Llama 3.1 405B has 2,064,384, 16,128
_SHAPE = Object(
    {
        "model": TEXT, "calibrate": TEXT, "model_type": TEXT,
        "num_attention_heads": Integer(1, MAX_INDEX + 1), "head_dim": Integer(1, 1 << 15),
        "multi_query": Scalar(), "max_position_embeddings": Integer(1, 1 << 53, null=True),
        "outputs": Map(Integer(1, _MOST_OUTPUTS)),
    },
    required=True,
)  # fmt: skip


def prepare_adapter(fit: Coefficients, folder: ModelFolder, any_model: bool = False) -> Export:
    """Finds out how a fit becomes an adapter, and proves it with PEFT on a small copy.

    Raises:
      CoefficientsError, CalibrateError: as `checkpoint.prepare`; or an adapter cannot hold it.
    """
    export = prepare(fit, folder, any_model, _adapted)
    vectors_of(folder.config, export.queries, export.plan)
    return export


def vectors_of(config: Any, queries: Queries, plan: Plan) -> dict[str, np.ndarray]:
    """What the outputs of each projection are multiplied by, by its name: float32 (outputs, 1).

    Raises:
      CalibrateError: an adapter cannot hold the plan.
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


def _adapted(config: Any, original: PreTrainedModel, plan: Plan) -> Any:
    """The model under the adapter, as PEFT loads it."""
    from peft import PeftModel

    queries = queries_of(config, original)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of what Transformers will remove
        _write(Path(folder), _files(queries, vectors_of(config, queries, plan), "", None))
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
    tensors = {_tensor(name): vector for name, vector in vectors.items()}
    return {CONFIG: f"{text}\n".encode(), WEIGHTS: save(tensors, {"format": "pt"})}


def _settings(queries: Queries, vectors: dict[str, np.ndarray]) -> dict[str, Any]:
    """What decides in a configuration of PEFT which vectors are applied, and how."""
    return {
        "peft_type": "IA3", "target_modules": sorted(vectors), "feedforward_modules": [],
        "exclude_modules": None, "modules_to_save": None, "auto_mapping": None,
        "fan_in_fan_out": queries.is_transposed,
    }  # fmt: skip


def _tensor(module: str) -> str:
    return f"base_model.model.{module}.ia3_l"


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        write_atomically(folder / name, data)


def base_of(path: Path) -> tuple[str, str | None]:
    """A model's name on the Hub and its revision, in the Hub's cache; else its path, and None."""
    snapshot = path.resolve()
    repository = snapshot.parents[1].name if snapshot.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), snapshot.name
    return str(path), None


def write_adapter(export: Export, out: Path, card: str) -> Carried:
    """Writes the folder of an adapter, which appears whole or not at all.

    Raises:
      CalibrateError: the folder is taken, or the disk is full.
    """
    source, queries = export.folder, export.queries
    require_outside(out, source.path)
    made_for = {
        "model": export.model, "calibrate": calibrate.__version__,
        "model_type": queries.model_type, "num_attention_heads": queries.n_heads,
        "head_dim": queries.width, "multi_query": getattr(source.config, "multi_query", True),
        "max_position_embeddings": source.context, "outputs": queries.outputs(),
    }  # fmt: skip
    fit = replace(export.fit, extra={**export.fit.extra, _MADE_FOR: made_for})
    vectors = vectors_of(source.config, queries, export.plan)
    with whole_folder(out) as folder:
        _write(folder, _files(queries, vectors, *base_of(source.path)))
        _write(folder, {FIT: dumps(fit).encode(), CARD: card.encode()})
        return replace(read_adapter(folder), path=out)


def is_adapter(path: Path) -> bool:
    """Whether a folder is an adapter for PEFT, and not a model."""
    return (path / CONFIG).exists() and not (path / "config.json").exists()


def read_adapter(path: Path, model: ModelFolder | None = None) -> Carried:
    """Reads an adapter, and compares PEFT's files with what its fit asks for, in a model if given.

    Raises:
      CalibrateError: it cannot be read, or is not an exported adapter.
    """
    fit = read(path / FIT)
    if _MADE_FOR not in fit.extra:
        raise CalibrateError(
            f"{path} is not an exported adapter; give a folder that calibrate export wrote"
        )
    faults = added(path, (CONFIG, WEIGHTS, FIT))
    try:
        made_for = read_field(fit.extra, _MADE_FOR, _SHAPE)
        config, queries, plan = _made_for(fit, made_for) if model is None else _of(fit, model)
        vectors = vectors_of(config, queries, plan)
        faults += _unlike(path, _settings(queries, vectors), vectors)
    except (Refusal, ValueError) as failure:  # ValueError: NumPy's, of sizes that are not a model's
        raise CalibrateError(f"{path / FIT}: {failure}; export again") from failure
    if model is not None and (found := model.fingerprint()) != made_for["model"]:
        faults.append(f"it was made for {made_for['model']}, and {model.path} is {found}")
    said = {
        "fit": fit.reference, "id": digest(fit), "model": made_for["model"],
        "calibrate": made_for["calibrate"], "digest": f"sha256:{digest_of_file(path / WEIGHTS)}",
    }  # fmt: skip
    return Carried(path, said, queries.model_type, plan, tuple(faults))


def _of(fit: Coefficients, model: ModelFolder) -> tuple[Any, Queries, Plan]:
    require_supported(model.config.model_type)
    return model.config, queries_without_weights(model), plan_for(fit, model)


def _made_for(fit: Coefficients, made_for: dict[str, Any]) -> tuple[Any, Queries, Plan]:
    """The same, by what the file says of the model."""
    outputs, config = made_for["outputs"], SimpleNamespace(**made_for)
    # Square, so that outputs are rows as well as columns; inputs take no part.
    queries = Queries(config, {f"{name}.weight": (n, n) for name, n in outputs.items()})
    n_layers, n_heads = 1 + max(queries.layers), queries.n_heads
    if sum(outputs.values()) > _MOST_OUTPUTS or n_layers * n_heads > _MOST_HEADS:
        raise Refusal((_MADE_FOR, "outputs"), "beyond any model", "give the file that was exported")
    context = made_for["max_position_embeddings"]
    return config, queries, make_plan(fit, n_layers, n_heads, context)


def _unlike(path: Path, settings: dict[str, Any], vectors: dict[str, np.ndarray]) -> list[str]:
    """What differs in the files of PEFT, a line each."""
    stored = parse(read_bytes(path / CONFIG, MOST_CONFIG_BYTES))
    stored = stored if isinstance(stored, dict) else {}
    faults = [
        f"{CONFIG} has another {key} than {FIT} asks for"
        for key, value in settings.items() if stored.get(key) != value
    ]  # fmt: skip
    found = {name: (x.dtype, x.shape) for name, x in read_header(path / WEIGHTS).items()}
    if found != {_tensor(name): ("F32", vector.shape) for name, vector in vectors.items()}:
        return [*faults, f"{WEIGHTS} has other tensors than {FIT} asks for"]
    tensors = load_file(path / WEIGHTS)
    return faults + [
        f"{name} in {WEIGHTS} is not what {FIT} asks for"
        for name, vector in vectors.items() if not np.array_equal(tensors[_tensor(name)], vector)
    ]  # fmt: skip
