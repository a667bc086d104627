"""A fit as a key of the configuration, which scales all logits of a model that stays as it is.

Engines override such a key when they load the model. The export is one file of JSON: the keys to
override, nested as the model's configuration nests them, and under "calibrate" the fit itself, its
reference and id, the fingerprint of the model that the values are for, and a digest of the whole.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from calibrate.errors import CalibrateError, CoefficientsError, command
from calibrate.export.checkpoint import configuration_digest
from calibrate.export.logit_scale import ScaledModel, logit_scale
from calibrate.export.numerical_check import new_model, verify_numerically
from calibrate.export.plan import (
    GIVE_OWN_MODEL,
    ExportContents,
    ExportPlan,
    make_plan,
    require_made_for,
)
from calibrate.export.preparation import KEY, read_configuration
from calibrate.storage.atomic_io import check_free, require_outside, write_atomically
from calibrate.store.coefficient_file import digest, dumps, loads
from calibrate.store.coefficients import Coefficients
from calibrate.version import __version__

GLOBAL_CONSTANT = command("model fit RUN", kind="constant", sharing="global")
_FIT = "coefficients"  # below KEY
_PROVED = 1 / 2  # a factor that integer keys hold exactly, too
_ROUNDING = 2.0**-8  # of bfloat16, in which weights would hold the factor
_MAX_ARGUMENT = 100_000  # bytes: Linux takes arguments of 128 KiB


def overrides_of(fit: Coefficients, model: ScaledModel) -> tuple[dict[str, Any], ExportPlan]:
    """The keys that apply a fit to a model with their values, and the factors that these make.

    Raises:
      CoefficientsError: the fit is not one constant for all heads of the model.
      CalibrateError: no value that the key accepts is near enough.
    """
    plan, name = make_plan(fit, *model.sizes), model.scale.key.name
    betas = {beta for (layer, _), beta in plan.factors.items() if layer in model.layers}
    lowest, highest = min(betas), max(betas)
    if plan.ratio or lowest != highest:
        given = f"has factors of {lowest:.4g} to {highest:.4g}"
        given = "goes by log n" if plan.ratio else given
        raise CoefficientsError(
            f"{fit.reference} {given}, and {name} holds one constant for all heads: fit that "
            f"({GLOBAL_CONSTANT}), or export the weights"
        )
    if lowest == 1:
        raise CoefficientsError("every beta of the fit is 1, and leaves nothing to export")
    beta = model.scale.beta(lowest)
    if abs(beta / lowest - 1) > _ROUNDING:
        raise CalibrateError(
            f"{name} is {model.scale.value:g} in the model, and takes integers alone: the nearest "
            f"to the constant {lowest:.4g} makes {beta:.4g}; export the weights"
        )
    values: dict[str, Any] = model.scale.values(lowest)
    applied = {head: beta if head[0] in model.layers else 1.0 for head in plan.factors}
    return {model.section: values} if model.section else values, ExportPlan(applied, 0.0)


def by_key(config: Any, original: PreTrainedModel, plan: ExportPlan) -> PreTrainedModel:
    """The model with the same weights, and the keys of one factor for all heads."""
    (beta,) = set(plan.factors.values())
    values = logit_scale(config).values(beta)
    scaled = new_model(AutoConfig.for_model(**config.to_dict() | values))
    scaled.load_state_dict(original.state_dict())
    return scaled


def export_key(
    fit: Coefficients, model: ScaledModel, out: Path, any_model: bool = False
) -> ExportContents:
    """Writes the keys that apply a fit, verified numerically for a model of Transformers.

    Raises:
      CoefficientsError: the fit is not one constant, or was made for another model, without
        `any_model`.
      CalibrateError: the key does not scale logits as it should, or the disk fails.
    """
    check_free(out)
    overrides, plan = overrides_of(fit, model)
    if not model.is_gguf:
        require_outside(out, model.path)
        verify_numerically(model.config, False, by_key, _PROVED)
    if not any_model:
        require_made_for(fit, model.fingerprint, model.path, GIVE_OWN_MODEL)
    metadata: dict[str, Any] = {
        "fit": fit.reference,
        "id": digest(fit),
        "model": model.fingerprint,
        "calibrate": __version__,
        _FIT: json.loads(dumps(fit)),
    }
    metadata["digest"] = configuration_digest(overrides | {KEY: metadata})
    text = json.dumps(overrides | {KEY: metadata}, indent=2)
    write_atomically(out, f"{text}\n".encode())
    return _contents(out, metadata, model, overrides, plan)


def read_key(path: Path, model: ScaledModel) -> ExportContents:
    """Reads exported keys, and compares them with what their fit asks of the model.

    Raises:
      CalibrateError: it cannot be read, is no such export, or is for another model.
    """
    stored = read_configuration(path)
    metadata = stored.pop(KEY, None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_FIT), dict):
        raise CalibrateError(
            f"{path} is not an exported key; give a file that calibrate export wrote"
        )
    if metadata.get("model") != model.fingerprint:
        raise CalibrateError(
            f"{path} was made for {metadata.get('model')}, and {model.path} is {model.fingerprint}"
            "; give its own with model=",
            parameter="model",
        )
    fit = loads(json.dumps(metadata[_FIT]).encode())
    overrides, plan = overrides_of(fit, model)
    problems = []
    if metadata.get("digest") != configuration_digest(stored | {KEY: metadata}):
        problems.append(f"{path.name} was changed")
    if metadata.get("id") != digest(fit):
        problems.append(f"the fit in it is {digest(fit)}, and it says {metadata.get('id')}")
    if stored != overrides:
        asked = f"{json.dumps(overrides)} of {model.path}, and it has {json.dumps(stored)}"
        problems.append(f"its fit asks for {asked}")
    return _contents(path, metadata, model, stored, plan, tuple(problems))


def _contents(
    path: Path,
    metadata: dict[str, Any],
    model: ScaledModel,
    overrides: dict[str, Any],
    plan: ExportPlan,
    problems: tuple[str, ...] = (),
) -> ExportContents:
    known = {key: value for key, value in metadata.items() if key != _FIT}
    known["overrides"] = overrides
    notes = () if problems else (*_changes(model, overrides), *serving(path, model, overrides))
    return ExportContents(
        path, known, model.model_type, plan, problems, notes, holds="its keys and its fit"
    )


def _changes(model: ScaledModel, overrides: dict[str, Any]) -> tuple[str, ...]:
    """A line for each key: its value in the model, and the one to serve with."""
    values = overrides[model.section] if model.section else overrides
    before = {model.scale.key.name: model.scale.value}
    if model.scale.cap:
        before |= dict([model.scale.cap])
    where = f"{model.section}." if model.section else ""
    return tuple(
        f"{where}{name}: {before[name]:.6g} in the model, {value:.6g} with the fit."
        for name, value in values.items()
    )


def serving(path: Path, model: ScaledModel, overrides: dict[str, Any]) -> tuple[str, ...]:
    """A command for each engine that serves the model with the keys of an exported file."""
    folder = shlex.quote(str(model.path))
    if model.is_gguf:
        keys = " ".join(f"--override-kv {name}=float:{x!r}" for name, x in overrides.items())
        return (f"llama.cpp: llama-server -m {folder} {keys}",)
    is_short = path.stat().st_size < _MAX_ARGUMENT
    keys = f'"$(cat {shlex.quote(str(path))})"' if is_short else f"'{json.dumps(overrides)}'"
    vllm = f"vLLM: vllm serve {folder} --hf-overrides {keys}"
    sglang = f"SGLang: python -m sglang.launch_server --model-path {folder} "
    sglang += f"--json-model-override-args {keys}"
    loaded = f"AutoConfig.from_pretrained({str(model.path)!r}, **json.load(open({str(path)!r})))"
    return vllm, sglang, f"Transformers: config = {loaded}"
