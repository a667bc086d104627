"""The table of architectures that can be exported, with the modules that compute their queries.

To add an architecture:
1. Add an `Architecture` with its `model_type` to `_TABLE`; list only what differs from a Llama.
2. Give its modules the names that Transformers uses: `attention`, `projections`, `query_norm`,
   `sinks`.
3. If llama.cpp runs it, name its graph in `gguf`.
4. Run tests/test_export*.py with `-m ""`: they export a tiny model of it and compare logits.
5. Run tests/test_architectures.py, and copy the table that it expects into guides/architectures.md.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from calibrate.errors import CalibrateError


class Layout(Enum):
    """The order of the outputs of a projection."""

    SEPARATE = auto()  # queries alone, by head
    QUERIES_FIRST = auto()  # queries by head, then keys, then values
    INTERLEAVED = auto()  # for each head its query, key and value


@dataclass(frozen=True)
class Projection:
    """A projection whose outputs are the queries, or include them."""

    module: str  # name within the attention module of a layer
    layout: Layout = Layout.SEPARATE
    is_transposed: bool = False  # the weight has the shape (inputs, outputs)


@dataclass(frozen=True)
class Norm:
    """A norm that follows the projection of the queries and multiplies them by base + weight."""

    module: str
    base: float = 0.0


@dataclass(frozen=True)
class Architecture:
    """A model type of Transformers.

    A model of the type has the first of `projections` that is among its modules, the norm if it is
    among them, and a bias where its configuration gives the projection or the norm one.
    """

    model_type: str  # in config.json
    attention: str = "layers.{layer}.self_attn"  # module, as tensor names have it after any prefix
    projections: tuple[Projection, ...] = (Projection("q_proj"),)
    query_norm: Norm | None = None
    sinks: str | None = None  # parameter with one logit a head, which beta multiplies too
    becomes_ministral: bool = False  # the same weights in a Ministral 3 are the same model
    gguf: str | None = None  # graph of files that llama.cpp's converter writes for the type

    def query_modules(self) -> tuple[Norm | Projection, ...]:
        """Modules whose weights can scale the queries; a layer uses the first that it has."""
        norms = () if self.query_norm is None else (self.query_norm,)
        return (*norms, *self.projections)


# Projections and norms
_LOW_RANK = (Projection("q_b_proj"), Projection("q_proj"))  # q_proj if q_lora_rank is None
_QKV_PROJ = (Projection("qkv_proj", Layout.QUERIES_FIRST),)
_QUERY_KEY_VALUE = (Projection("query_key_value", Layout.INTERLEAVED),)
_GPT2 = (Projection("c_attn", Layout.QUERIES_FIRST, is_transposed=True),)
_BIGCODE = (Projection("c_attn", Layout.QUERIES_FIRST),)  # with multi_query
_Q_NORM = Norm("q_norm")
_Q_NORM_FROM_ONE = Norm("q_norm", base=1.0)
_Q_LAYERNORM = Norm("q_layernorm")
_QUERY_LAYERNORM = Norm("query_layernorm")
SOFT_CAP = "attn_logit_softcapping"  # key of config.json: the cap of all logits, if it is set

_TABLE = (
    # Llama and Mistral
    Architecture("llama", becomes_ministral=True, gguf="llama"),
    Architecture("mistral", becomes_ministral=True, gguf="llama"),
    Architecture("ministral"),
    Architecture("ministral3"),
    Architecture("mixtral"),
    # Qwen
    Architecture("qwen2", gguf="qwen2"),
    Architecture("qwen2_moe"),
    Architecture("qwen3", query_norm=_Q_NORM, gguf="qwen3"),
    Architecture("qwen3_moe", query_norm=_Q_NORM),
    Architecture("qwen3_next", query_norm=_Q_NORM_FROM_ONE),
    Architecture("qwen3_5_text", query_norm=_Q_NORM_FROM_ONE),
    Architecture("qwen3_5_moe_text", query_norm=_Q_NORM_FROM_ONE),
    # Phi
    Architecture("phi", query_norm=_Q_LAYERNORM),
    Architecture("phi3", projections=_QKV_PROJ, gguf="phi3"),
    Architecture("phimoe"),
    # OLMo
    Architecture("olmo"),
    Architecture("olmo2", query_norm=_Q_NORM, gguf="olmo2"),
    Architecture("olmo3", query_norm=_Q_NORM),
    Architecture("olmo_hybrid", query_norm=_Q_NORM),
    Architecture("olmoe", query_norm=_Q_NORM),
    Architecture("flex_olmo", query_norm=_Q_NORM),
    # Gemma
    Architecture("gemma"),
    Architecture("gemma2"),
    Architecture("gemma3_text", query_norm=_Q_NORM_FROM_ONE, gguf="gemma3"),
    Architecture("vaultgemma"),
    # GPT, and others with fused projections
    Architecture("gpt2", attention="h.{layer}.attn", projections=_GPT2),
    Architecture("gpt_bigcode", attention="h.{layer}.attn", projections=_BIGCODE),
    Architecture("gpt_neox", attention="layers.{layer}.attention", projections=_QUERY_KEY_VALUE),
    Architecture("gpt_oss", sinks="sinks"),
    Architecture("gptj", attention="h.{layer}.attn"),
    Architecture(
        "ctrl", attention="h.{layer}.multi_head_attention", projections=(Projection("Wq"),)
    ),
    Architecture("persimmon", projections=_QUERY_KEY_VALUE, query_norm=_Q_LAYERNORM),
    # DeepSeek, and others with queries of low rank
    Architecture("deepseek_v2", projections=_LOW_RANK),
    Architecture("deepseek_v3", projections=_LOW_RANK),
    Architecture("axk1", projections=_LOW_RANK),
    Architecture("glm4_moe_lite", projections=_LOW_RANK),
    Architecture("minicpm3", projections=_LOW_RANK),
    Architecture("sarvam_mla", projections=_LOW_RANK),
    Architecture("youtu", projections=_LOW_RANK),
    # Granite
    Architecture("granite", gguf="granite"),
    Architecture("granitemoe"),
    Architecture("granitemoeshared"),
    Architecture("granitemoehybrid"),
    Architecture("granite_swa", sinks="sinks"),
    Architecture("granitemoe_swa", sinks="sinks"),
    # Others
    Architecture("afmoe", query_norm=_Q_NORM),
    Architecture("apertus", query_norm=_Q_NORM),
    Architecture("apertus1p5_text", query_norm=_Q_NORM),
    Architecture("arcee"),
    Architecture("aria_text"),
    Architecture("bamba"),
    Architecture("beam", query_norm=_Q_NORM),
    Architecture("biogpt"),
    Architecture("bitnet"),
    Architecture("cohere", query_norm=_Q_NORM),
    Architecture("cohere2"),
    Architecture("cohere2_moe"),
    Architecture("cohere_compass_text"),
    Architecture("cwm"),
    Architecture("diffllama"),
    Architecture("dots1", query_norm=_Q_NORM),
    Architecture("ernie4_5"),
    Architecture("ernie4_5_moe"),
    Architecture("exaone4", query_norm=_Q_NORM),
    Architecture("exaone_moe", query_norm=_Q_NORM),
    Architecture("falcon_h1"),
    Architecture("glm"),
    Architecture("glm4"),
    Architecture("glm4_moe", query_norm=_Q_NORM),
    Architecture("helium"),
    Architecture("hunyuan_v1_dense", query_norm=_QUERY_LAYERNORM),
    Architecture("hunyuan_v1_moe", query_norm=_QUERY_LAYERNORM),
    Architecture("hy_v3", query_norm=_Q_NORM),
    Architecture("hyperclovax"),
    Architecture("internlm3"),
    Architecture("iquestcoder"),
    Architecture("jais2"),
    Architecture("jamba"),
    Architecture("kolibri1", query_norm=_Q_NORM),
    Architecture("lara_mini", query_norm=_Q_NORM),
    Architecture("lfm2", query_norm=_Q_LAYERNORM),
    Architecture("lfm2_moe", query_norm=_Q_LAYERNORM),
    Architecture("lfm3", query_norm=_Q_NORM),
    Architecture("mellum", query_norm=_Q_NORM),
    Architecture("minimax_m2", query_norm=_Q_NORM),
    Architecture("minimax_m3_vl_text", query_norm=_Q_NORM_FROM_ONE),
    Architecture("modernbert-decoder", attention="layers.{layer}.attn"),
    Architecture("nemotron"),
    Architecture("opt"),
    Architecture("seed_oss"),
    Architecture("smollm3"),
    Architecture("solar_open"),
    Architecture("stablelm", query_norm=_Q_LAYERNORM),
    Architecture("starcoder2"),
)
ARCHITECTURES = {architecture.model_type: architecture for architecture in _TABLE}
GGUF_GRAPHS = tuple(dict.fromkeys(x.gguf for x in _TABLE if x.gguf))  # that can be exported


def architecture_of(config: Any) -> Architecture:
    """Returns the architecture of a configuration; CalibrateError if the table has none."""
    if config.model_type not in ARCHITECTURES:
        types = ", ".join(sorted(ARCHITECTURES))
        raise CalibrateError(
            f"a model of type {config.model_type!r} cannot be exported: it is not in the table of "
            "architectures; calibrate.transformers runs other types, too, and verifies each model, "
            f"or give one of {types}"
        )
    return ARCHITECTURES[config.model_type]
