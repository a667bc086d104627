"""The rules that a model can be exported with, verified numerically on a small copy.

The copy has the model's own configuration with few layers, narrow MLPs and random weights. A
change of names or shapes that this package does not know, in a later version of Transformers, say,
fails here, and nothing is written.
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

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import Rule
from calibrate.errors import CalibrateError
from calibrate.export.architectures import require_listed
from calibrate.export.configuration import (
    exported_configuration,
    require_original_folder,
    soft_cap,
    unlike_ministral,
)
from calibrate.export.plan import Exportable, ExportPlan
from calibrate.export.queries import Queries
from calibrate.storage.safetensors_file import FLOATS
from calibrate.transformers.betas import HeadRules, head_betas
from calibrate.transformers.folder_files import CONFIG
from calibrate.transformers.folders import ModelFolder, in_one_line

TOLERANCE = 1e-4  # of the largest logit
_N_TOKENS = 24
_VOCABULARY = 64
_NARROW = 16
_RATIO = 0.3
# By parameter sharing: how much a factor grows from layer to layer, and from head to head.
_STEPS = {
    Sharing.GLOBAL: (0.0, 0.0),
    Sharing.PER_LAYER: (0.1, 0.0),
    Sharing.PER_HEAD: (0.1, 0.01),
}
_SEEDS = (0, 1, 2)  # routers of experts may choose others where two are nearly alike
_MLP = re.compile(r"\w*intermediate_size\w*|ffn_dim|n_inner")
_LAYER_KINDS = ("layer_types", "mlp_layer_types")
# Keys that place attention among other layers: in a small copy, the last of two.
_ATTENTION_LAST = {"attn_layer_indices": [1], "attn_layer_period": 2, "attn_layer_offset": 1}
# What becomes of a model: by its configuration, the model, and the plan.
Exporter = Callable[[Any, PreTrainedModel, ExportPlan], Any]


def exportable(folder: ModelFolder) -> Exportable:
    """The rules that an export of a model can hold, verified on a small copy."""
    config = folder.config
    require_original_folder(folder)
    require_listed(config)
    queries = queries_without_weights(folder)
    _require_exportable(config, queries, Sharing.GLOBAL)
    factors, no_size = Sharing.GLOBAL, unlike_ministral(config)
    with suppress(CalibrateError):
        for sharing in (Sharing.PER_LAYER, Sharing.PER_HEAD):
            _require_exportable(config, queries, sharing)
            factors = sharing
    verify_numerically(config, by_size=no_size is None)
    return Exportable(factors, no_size)


def _require_exportable(config: Any, queries: Queries, sharing: Sharing) -> None:
    """Raises CalibrateError unless such a model can have factors of its own by layer or head."""
    by_layer, by_head = _STEPS[sharing]
    factors = {
        (layer, head): 2 + by_layer * layer + by_head * head
        for layer, head in product(queries.layers, range(queries.n_heads))
    }
    plan = ExportPlan(factors, 0.0)
    queries.changes(plan)
    exported_configuration(config.to_dict(), config, plan)


def by_weights(config: Any, original: PreTrainedModel, plan: ExportPlan) -> PreTrainedModel:
    """The model that an exported folder or file holds."""
    weights: dict[str, Tensor] = dict(original.state_dict())
    queries = queries_of(config, original)
    for role, change in queries.changes(plan).items():
        name = queries.names[role]
        x = weights[name]
        weights[name] = torch.from_numpy(change.apply(x.numpy())).to(x.dtype)
    stored = exported_configuration(config.to_dict(), config, plan)
    exported = new_model(AutoConfig.for_model(**stored))
    exported.load_state_dict(weights, assign=True)
    return exported


def verify_numerically(config: Any, by_size: bool, export: Exporter = by_weights) -> None:
    """Raises CalibrateError unless exports of such models give the logits of our runtime."""
    errors = []
    for seed in _SEEDS:
        with in_one_line(f"cannot make a small copy of a {config.model_type}"):
            effect, error = _compare(small_copy(config), by_size, seed, export)
        if error < TOLERANCE < effect / 10:
            return
        errors.append(f"{error:.2g} where plain softmax differs by {effect:.2g}")
    raise CalibrateError(
        f"a {config.model_type} of this configuration cannot be exported: with scaled queries, a "
        f"small random copy has logits unlike those of our runtime (by {errors[0]} of the largest)"
        "; serve it with calibrate.transformers"
    )


def small_copy(config: Any) -> Any:
    """The configuration with two layers, or one of each kind, and narrow MLPs."""
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
            small[key] = min(value, _NARROW)
        elif key in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            small[key] = 0
    return _plain_configuration(config, small)


def _plain_configuration(config: Any, changes: dict[str, Any]) -> Any:
    """The configuration with changes, of a model with plain weights."""
    values = config.to_dict() | changes
    for key in ("quantization_config", "model_type"):
        values.pop(key, None)
    return type(config)(**values)


def _compare(config: Any, by_size: bool, seed: int, export: Exporter) -> tuple[float, float]:
    """Relative to the largest logit: the effect of our runtime, and the error of an export."""
    generator = torch.Generator().manual_seed(seed)
    original = new_model(config)
    with torch.no_grad():
        for x in original.parameters():
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(noise * 1.5 / x.shape[-1] ** 0.5 if x.ndim > 1 else x + 0.3 * noise)
    tokens = torch.randint(_VOCABULARY, (1, _N_TOKENS), generator=generator) % config.vocab_size
    with torch.no_grad(), head_betas(original) as heads:
        plan = _random_plan(config, original, heads.heads, by_size, generator)
        plain = original(tokens, use_cache=False).logits
        b = torch.tensor([plan.factors[head] for head in heads.heads])
        heads.rules = HeadRules(
            Rule.log_size(1e-3, 1e3), torch.stack([plan.ratio * b, b]), (0.0, 16.0)
        )
        ours = original(tokens, use_cache=False).logits
    theirs = export(config, original, plan)(tokens, use_cache=False).logits
    scale = float(ours.abs().max())
    return float((plain - ours).abs().max()) / scale, float((theirs - ours).abs().max()) / scale


def _random_plan(
    config: Any,
    model: PreTrainedModel,
    heads: list[tuple[int, int]],
    by_size: bool,
    generator: torch.Generator,
) -> ExportPlan:
    """A random plan, as unlike from head to head as such a model allows."""
    queries = queries_of(config, model)
    random = {head: 0.5 + 1.5 * float(torch.rand((), generator=generator)) for head in heads}
    factors = {
        (layer, head): random[layer, 0] if queries.heads_share(layer) else random[layer, head]
        for layer, head in heads
    }
    if soft_cap(config):
        factors = dict.fromkeys(factors, 3.0)
    return ExportPlan(factors, _RATIO if by_size else 0.0)


def queries_of(config: Any, model: PreTrainedModel) -> Queries:
    """The tensors of a model that make its queries."""
    return Queries(config, {name: x.shape for name, x in model.state_dict().items()})


def queries_without_weights(folder: ModelFolder) -> Queries:
    """The same of a model that takes no memory; CalibrateError unless it may be that of the files.

    A model has at most a weight for each bit, and those that files have under its own names have
    its shapes.
    """
    config = folder.config
    failure = f"cannot make a {config.model_type} as {folder.path / CONFIG} says"
    with in_one_line(failure), torch.device("meta"):
        model = new_model(_plain_configuration(config, {}))
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


def new_model(config: Any) -> PreTrainedModel:
    """A model with random weights, and attention as Transformers spells it out itself."""
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]
