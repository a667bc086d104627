"""A numerical check of an export, on a small random model of the same configuration.

The small model has few layers, narrow MLPs and random weights. Its export must have the logits of
our runtime. A change of names or shapes in a later version of Transformers, which the table of
architectures does not know, fails this check, and nothing is written.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from calibrate.core.rule import RuleForm, Sharing
from calibrate.errors import CalibrateError
from calibrate.export.architectures import architecture_of
from calibrate.export.configuration import (
    exported_configuration,
    require_original_folder,
    soft_cap,
)
from calibrate.export.plan import ExportPlan
from calibrate.export.queries import Queries
from calibrate.storage.safetensors_file import FLOATS
from calibrate.transformers.betas import HeadRules, head_betas
from calibrate.transformers.folder_files import CONFIG
from calibrate.transformers.folders import ModelFolder, in_one_line

_MAX_ERROR = 1e-4  # of the logits, relative to the largest
_N_TOKENS = 24
_VOCABULARY = 64
_MLP_WIDTH = 16
_RATIO = 0.3
# By parameter sharing: the growth of a factor from layer to layer, and from head to head.
_STEPS = {
    Sharing.GLOBAL: (0.0, 0.0),
    Sharing.PER_LAYER: (0.1, 0.0),
    Sharing.PER_HEAD: (0.1, 0.01),
}
# Several, since a router may send a token to other experts where two have nearly equal scores.
_SEEDS = (0, 1, 2)
_MLP = re.compile(r"\w*intermediate_size\w*|ffn_dim|n_inner")
_LAYER_KINDS = ("layer_types", "mlp_layer_types")
# Keys that place attention among layers of other kinds: of two layers, the last has attention.
_ATTENTION_LAST = {"attn_layer_indices": [1], "attn_layer_period": 2, "attn_layer_offset": 1}
# Exports a model in memory: (configuration, model, plan) -> exported model.
Exporter = Callable[[Any, PreTrainedModel, ExportPlan], Any]


def exportable(folder: ModelFolder) -> Sharing:
    """Returns the sharing of constants that an export can apply, checked on a small random model.

    Raises:
      CalibrateError: not even one constant can be exported for the model.
    """
    config = folder.config
    require_original_folder(folder)
    architecture_of(config)  # raises if the table has none
    queries = queries_without_weights(folder)
    _require_exportable(config, queries, Sharing.GLOBAL)
    factors = Sharing.GLOBAL
    with suppress(CalibrateError):
        for sharing in (Sharing.PER_LAYER, Sharing.PER_HEAD):
            _require_exportable(config, queries, sharing)
            factors = sharing
    verify_numerically(config, by_size=False)
    return factors


def _require_exportable(config: Any, queries: Queries, sharing: Sharing) -> None:
    """Raises CalibrateError unless factors of that parameter sharing can be exported."""
    by_layer, by_head = _STEPS[sharing]
    factors = {
        (layer, head): 2 + by_layer * layer + by_head * head
        for layer, head in product(queries.layers, range(queries.n_heads))
    }
    plan = ExportPlan(factors, 0.0)
    queries.changes(plan)
    exported_configuration(config.to_dict(), config, plan)


def make_scaled_model(config: Any, original: PreTrainedModel, plan: ExportPlan) -> PreTrainedModel:
    """Returns the model of an exported folder: scaled weights, and its own configuration."""
    weights: dict[str, Tensor] = dict(original.state_dict())
    queries = find_queries(config, original)
    for role, change in queries.changes(plan).items():
        name = queries.names[role]
        x = weights[name]
        weights[name] = torch.from_numpy(change.apply(x.numpy())).to(x.dtype)
    stored = exported_configuration(config.to_dict(), config, plan)
    exported = _make_model(AutoConfig.for_model(**stored))
    exported.load_state_dict(weights, assign=True)
    return exported


def verify_numerically(config: Any, by_size: bool, export: Exporter = make_scaled_model) -> None:
    """Raises CalibrateError unless an export of a small model has the logits of our runtime."""
    failures = []
    for seed in _SEEDS:
        with in_one_line(f"cannot make a small copy of a {config.model_type}"):
            effect, error = _compare_logits(_small_configuration(config), by_size, seed, export)
        if error < _MAX_ERROR < effect / 10:
            return
        failures.append(f"{error:.2g} where plain softmax differs by {effect:.2g}")
    raise CalibrateError(
        f"a {config.model_type} of this configuration cannot be exported: with scaled queries, a "
        f"small random copy has logits unlike those of our runtime (by {failures[0]} of the "
        "largest); serve it with calibrate.transformers"
    )


def _small_configuration(config: Any) -> Any:
    """Returns the configuration with two layers, or one of each kind, and narrow MLPs."""
    full = config.to_dict()
    count = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    kinds = [full[key] for key in _LAYER_KINDS if isinstance(full.get(key), list)]
    first = {kind: i for i, kind in reversed(list(enumerate(zip(*kinds, strict=True))))}
    kept = sorted({*first.values(), 0, 1} if kinds else {0, 1})
    kept = [i for i in kept if i < config.num_hidden_layers]
    small = {count: len(kept), "vocab_size": min(_VOCABULARY, config.vocab_size)}
    small |= {key: x for key, x in _ATTENTION_LAST.items() if full.get(key) is not None}
    for key, value in full.items():
        if key in _LAYER_KINDS and isinstance(value, list):
            small[key] = [value[i] for i in kept]
        elif _MLP.fullmatch(key) and isinstance(value, int):
            small[key] = min(value, _MLP_WIDTH)
        elif key in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            small[key] = 0
    return _float_configuration(config, small)


def _float_configuration(config: Any, changes: dict[str, Any]) -> Any:
    """Returns the configuration with changes, and without its quantisation."""
    values = config.to_dict() | changes
    for key in ("quantization_config", "model_type"):
        values.pop(key, None)
    return type(config)(**values)


def _compare_logits(config: Any, by_size: bool, seed: int, export: Exporter) -> tuple[float, float]:
    """Returns the effect of our runtime and the error of an export, relative to the largest logit.

    Both are largest absolute differences of logits: of our runtime from the baseline, and of the
    export from our runtime.
    """
    generator = torch.Generator().manual_seed(seed)
    original = _make_model(config)
    with torch.no_grad():
        for x in original.parameters():
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(noise * 1.5 / x.shape[-1] ** 0.5 if x.ndim > 1 else x + 0.3 * noise)
    tokens = torch.randint(_VOCABULARY, (1, _N_TOKENS), generator=generator) % config.vocab_size
    with torch.no_grad(), head_betas(original) as heads:
        plan = _random_plan(config, original, heads.heads, by_size, generator)
        baseline = original(tokens, use_cache=False).logits
        b = torch.tensor([plan.factors[head] for head in heads.heads])
        heads.rules = HeadRules(
            RuleForm.log_size(1e-3, 1e3), torch.stack([plan.ratio * b, b]), (0.0, 16.0)
        )
        runtime = original(tokens, use_cache=False).logits
    exported = export(config, original, plan)(tokens, use_cache=False).logits
    largest = float(runtime.abs().max())
    effect, error = (baseline - runtime).abs().max(), (exported - runtime).abs().max()
    return float(effect) / largest, float(error) / largest


def _random_plan(
    config: Any,
    model: PreTrainedModel,
    heads: list[tuple[int, int]],
    by_size: bool,
    generator: torch.Generator,
) -> ExportPlan:
    """Returns a plan with random factors, one for each head where the model allows that."""
    queries = find_queries(config, model)
    random = {head: 0.5 + 1.5 * float(torch.rand((), generator=generator)) for head in heads}
    factors = {
        (layer, head): random[layer, 0] if queries.heads_share(layer) else random[layer, head]
        for layer, head in heads
    }
    if soft_cap(config):
        factors = dict.fromkeys(factors, 3.0)
    return ExportPlan(factors, _RATIO if by_size else 0.0)


def find_queries(config: Any, model: PreTrainedModel) -> Queries:
    """Returns the tensors that compute the queries of a model in memory."""
    return Queries(config, {name: x.shape for name, x in model.state_dict().items()})


def queries_without_weights(folder: ModelFolder) -> Queries:
    """Returns the tensors that compute the queries of a folder's model, without reading weights.

    Raises:
      CalibrateError: the configuration gives no such model, more weights than the files have bits,
        or other shapes than tensors of these names have in the files.
    """
    config = folder.config
    failure = f"cannot make a {config.model_type} as {folder.path / CONFIG} says"
    with in_one_line(failure), torch.device("meta"):
        model = _make_model(_float_configuration(config, {}))
        shapes = {name: x.shape for name, x in model.state_dict().items()}
        queries = Queries(config, shapes)
    n_weights = sum(map(math.prod, shapes.values()))
    n_bits = 8 * sum(path.stat().st_size for path in folder.files)
    if n_weights > n_bits:
        raise CalibrateError(
            f"{folder.path} declares a model of {n_weights:,} weights, and its files have "
            f"{n_bits:,} bits; fetch it again"
        )
    expected = shapes | {name.partition(".")[2]: shape for name, shape in shapes.items()}
    for name, tensor in chain(*(header.items() for header in folder.headers.values())):
        shape = tuple(expected.get(name, tensor.shape))
        if tensor.dtype in FLOATS and tensor.shape != shape:
            raise CalibrateError(
                f"{name} in {folder.path} has the shape {tensor.shape}, and its {CONFIG} asks for "
                f"{shape}; fetch it again"
            )
    return queries


def _make_model(config: Any) -> PreTrainedModel:
    """Returns a model with random weights, in float32, with the eager attention of its class."""
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]
