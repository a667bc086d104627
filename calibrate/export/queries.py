"""The tensors of a model whose rows make its queries, by layer and head.

Up to softmax, logits are linear in a head's queries, and these in rows of a projection, or where a
norm follows the projection, in that norm's weights. Scaled by beta, they give beta z:

    q_proj, q_b_proj   rows by head: (heads width, inputs); their biases likewise
    qkv_proj, c_attn   fused: the rows of queries come first (GPT-2's are columns)
    query_key_value    fused by head: (heads, [query, key, value], width, inputs)
    q_norm and others  one weight for all heads (width,), or one each (heads width,), (heads, width)
    sinks              a logit of each head beside those of its keys, which beta multiplies too
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.export.plan import Plan

# Types of models that tests run; another may be, whose queries are not what its weights' names say.
_TESTED = """
    afmoe apertus arcee cohere cohere2 cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe
    exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2
    gpt_bigcode gpt_neox gpt_oss granite granitemoe granitemoeshared helium hunyuan_v1_dense
    hunyuan_v1_moe hyperclovax internlm3 jais2 lfm2 lfm2_moe llama minicpm3 minimax_m2
    ministral ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open
    stablelm starcoder2 vaultgemma youtu
"""
SUPPORTED = frozenset(_TESTED.split())
_BIAS = "its logits have a bias by position, which scaled queries would leave as it is"
_NO_WEIGHT = "its queries are normalised without a weight that could scale them"
_REASONS = {
    "bloom": _BIAS, "falcon": _BIAS, "mpt": _BIAS, "t5": _BIAS, "llama4_text": _NO_WEIGHT,
    "nanochat": _NO_WEIGHT,
}  # fmt: skip
_FROM_ONE = ("gemma3_text", "qwen3_next", "qwen3_5_text")  # norms that multiply by 1 + weight
_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
PROJECTIONS = ("q_b_proj", "q_proj", "qkv_proj", "query_key_value", "c_attn")
_SINKS = "sinks"
_TENSOR = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,6})\.(?:self_attn|attn|attention)\.(\w+)\.?(.*)")


class Place(NamedTuple):
    """The role of a tensor in a layer's attention: ("q_proj", "bias"), say."""

    layer: int
    module: str
    name: str  # "" of a parameter of the attention itself


class Change(NamedTuple):
    """The change of a tensor: (x + base) factors - base."""

    factors: np.ndarray  # of a shape that broadcasts to the tensor's
    base: float = 0.0

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The changed tensor, in float64."""
        changed: np.ndarray = (x.astype(np.float64) + self.base) * self.factors - self.base
        return changed


def places_of(names: Iterable[str]) -> dict[Place, str]:
    """The tensors of attention among those of a checkpoint or a model, by their place."""
    tensors: dict[Place, str] = {}
    for name in names:
        if match := _TENSOR.search(name):
            place = Place(int(match[1]), match[2], match[3])
            if (other := tensors.setdefault(place, name)) != name:
                raise CalibrateError(
                    f"{other} and {name} are both of layer {place.layer}; only models with one "
                    "attention a layer can be exported"
                )
    return tensors


def require_supported(model_type: str) -> None:
    """Raises CalibrateError if queries of such models cannot be scaled, or were not tested."""
    if model_type not in SUPPORTED:
        reason = _REASONS.get(model_type, "untested architecture")
        raise CalibrateError(
            f"a model of type {model_type!r} cannot be exported: {reason}; serve it with "
            f"calibrate.transformers, or give one of {', '.join(sorted(SUPPORTED))}"
        )


def _norm_of(name: str) -> re.Match[str] | None:
    """The head in the name of a weight of a list of norms, one for each head."""
    return re.match(r"norms\.(\d{1,6})\.", name)


class Queries:
    """The tensors that make the queries, by the shapes of all tensors of a model of Transformers.

    Attributes:
      shapes: of all tensors of attention, by place.
      names: of the same.
      layers: those that have attention.
      width: of a head.
    """

    def __init__(self, config: Any, shapes: Mapping[str, Sequence[int]]):
        self.model_type = config.model_type
        self.n_heads = config.num_attention_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.n_heads
        self._is_fused_by_head = not getattr(config, "multi_query", True)
        self.names = places_of(shapes)
        self.shapes = {place: tuple(shapes[name]) for place, name in self.names.items()}
        self.layers = sorted({place.layer for place in self.names})
        rows = max((axis for shape in self.shapes.values() for axis in shape), default=0)
        if type(self.width) is not int or not 0 < self.width * self.n_heads <= rows:
            raise CalibrateError(
                f"the configuration has {self.n_heads} heads of head_dim = {self.width!r}, and "
                f"tensors of attention have at most {rows:,} rows; fetch it again"
            )

    def source(self, layer: int) -> str:
        """The module whose weights are scaled: the norm after the projection if there is one."""
        modules = {place.module for place in self.shapes if place.layer == layer}
        for module in (*_NORMS, *PROJECTIONS):
            if module in modules:
                return module
        raise CalibrateError(
            f"layer {layer} of the {self.model_type} has no weights of queries that this version "
            f"knows, among {', '.join(sorted(modules))}; a model of another type can be exported"
        )

    def heads_share(self, layer: int) -> bool:
        """True if the heads of a layer can have one factor alone."""
        source = self.source(layer)
        return source in _NORMS and any(
            place[:2] == (layer, source) and shape == (self.width,) and not _norm_of(place.name)
            for place, shape in self.shapes.items()
        )

    def changes(self, plan: Plan) -> dict[Place, Change]:
        """The changes of tensors that scale the queries of each head by its factor."""
        changes = {}
        for layer in self.layers:
            f, source = np.array(plan.of_layer(layer)), self.source(layer)
            if self.heads_share(layer) and np.ptp(f):
                raise CalibrateError(
                    f"the heads of layer {layer} have factors of {f.min():.4g} to {f.max():.4g}, "
                    f"and a norm with one weight for all of them ({source}) makes their queries; "
                    f"a fit with one rule for all heads of a layer can be exported"
                )
            for place, shape in self.shapes.items():
                if place.layer == layer and place.module in (source, _SINKS) and np.any(f != 1):
                    changes[place] = self._change(place, shape, f)
        return changes

    def _change(self, place: Place, shape: tuple[int, ...], f: np.ndarray) -> Change:
        if place.module in _NORMS:
            return Change(self._of_norm(place, shape, f), float(self.model_type in _FROM_ONE))
        if self.model_type == "gpt2" and place.name == "weight":  # (inputs, outputs)
            return Change(self._of_outputs(place.module, shape[-1], f))
        by_output = self._of_outputs(place.module, shape[0], f)
        return Change(by_output.reshape(-1, *[1] * (len(shape) - 1)))

    def _of_outputs(self, module: str, n_outputs: int, f: np.ndarray) -> np.ndarray:
        if module in ("qkv_proj", "c_attn", "query_key_value"):
            if module == "query_key_value" or self._is_fused_by_head:
                by_head = np.ones((self.n_heads, 3, self.width))
                by_head[:, 0] = f[:, None]
                return by_head.reshape(-1)
            by_output = np.ones(n_outputs)
            by_output[: self.n_heads * self.width] = f.repeat(self.width)
            return by_output
        return f.repeat(n_outputs // self.n_heads)

    def _of_norm(self, place: Place, shape: tuple[int, ...], f: np.ndarray) -> np.ndarray:
        if match := _norm_of(place.name):
            head = int(match[1])
            return f[head : head + 1]
        if shape == (self.width,):
            return f[:1]
        return f[:, None] if shape == (self.n_heads, self.width) else f.repeat(self.width)
