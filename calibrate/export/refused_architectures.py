"""The types of models that are not exported, by reason."""

from typing import Any

_BY_POSITION = "its logits have a bias by position, which scaled queries would leave as it is"
_BY_KEY = "its logits have a bias by key, which scaled queries would leave as it is"
_NO_WEIGHT = "its queries are normalised without a weight that could scale them"
_NO_SOFTMAX = "it has no softmax attention"
_ENCODER = "it is an encoder, which continues text only if is_decoder is set"
_CROSS = "it is a decoder that attends to the outputs of an encoder, too"
_OWN_FUNCTION = "its attention is a function of its own, in which no fit of this package runs"
_INDEXER = "it chooses or compresses its keys by an indexer"
_OTHER_LAYERS = "its layers without softmax attention have modules of the same names"
_OTHER_HEADS = "its number of heads may differ from layer to layer"
_OTHER_WIDTHS = "the width of its heads differs from layer to layer"
_OTHER_NAMES = "its checkpoints name tensors otherwise than its class in Transformers"
_NO_COPY = "no small copy of its configuration can be made, on which an export would be proved"
_SHARED_LAYERS = "several of its layers share one attention, or a number"
_NOT_LOADED = "AutoModelForCausalLM of Transformers does not load it"
_EXPERTS = "experts make its queries"
_OWN_MODULES = "its projections are modules of a kind of their own, which adapters do not know"
_BLOCKS = "its fused projection holds the heads in blocks"
_DRAFTER = "it drafts tokens for another model, whose keys it reads"
_TWO_PARTS = "it is an encoder and a decoder that attends to its outputs, or one of the two"
_UNTESTED = "untested architecture"
NOT_RUN = (_NO_SOFTMAX, _OWN_FUNCTION)  # nor does the runtime of this package run these


def _container(text_type: str) -> str:
    return f"it holds several models; its text model is of type {text_type}"


REFUSALS: dict[str, str] = {
    _BY_POSITION: "bloom falcon inkling_text inkling2_text inkling2_loop_text mpt t5",
    _BY_KEY: "doge",
    _NO_WEIGHT: "llama4_text nanochat zaya",
    _NO_SOFTMAX: "falcon_mamba mamba mamba2 rwkv xlstm",
    _ENCODER: "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert "
    "rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
    _CROSS: "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
    "prophetnet trocr whisper",
    _OWN_FUNCTION: "cpmant gpt_neox_japanese openai-gpt reformer xglm xlm xlnet",
    _INDEXER: "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4",
    _OTHER_LAYERS: "bailing_hybrid kimi_linear minimax nemotron_h recurrent_gemma",
    _OTHER_HEADS: "dots3_note_text laguna",
    _OTHER_WIDTHS: "gemma4_text gemma4_unified_text",
    _OTHER_NAMES: "exaone flint mimo_v2_flash sarvam_moe",
    _NO_COPY: "dbrx dory gemma3n_text gpt_neo qwen4_exp_text",
    _SHARED_LAYERS: "hrm_text longcat_flash zamba zamba2",
    _NOT_LOADED: "granite4_vision_text granite_docling_text mistral4 qwen3_vl_text step3p5",
    _EXPERTS: "jetmoe",
    _OWN_MODULES: "moshi",
    _BLOCKS: "codegen",
    _DRAFTER: "gemma4_assistant gemma4_unified_assistant",
    _TWO_PARTS: "t5_gemma_module t5gemma t5gemma2 t5gemma2_decoder t5gemma2_text",
    _container("blt_global_transformer"): "blt",
    _container("dots3_note_text"): "dots3_note",
    _container("emu3_text_model"): "emu3",
    _container("gemma3_text"): "gemma3",
    _container("gemma3n_text"): "gemma3n",
    _container("gemma4_text"): "gemma4",
    _container("gemma4_unified_text"): "gemma4_unified",
    _container("git"): "git",
    _container("llama4_text"): "llama4",
    _container("mllama_text_model"): "mllama",
    _container("musicgen_decoder"): "musicgen",
    _container("musicgen_melody_decoder"): "musicgen_melody",
    _container("persimmon"): "fuyu",
    _container("phi4_multimodal"): "phi4_multimodal",
    _container("qwen2"): "got_ocr2",
    _container("qwen3"): "moss_transcribe_diarize",
    _container("qwen3_5_text"): "qwen3_5",
    _container("qwen3_5_moe_text"): "qwen3_5_moe",
    _container("qwen3_vl_text"): "qwen3_vl",
    _container("qwen4_exp_text"): "qwen4_exp",
}


def refusal_of_unlisted(config: Any) -> str:
    """The reason for a configuration whose type is in no table."""
    from calibrate.transformers.loading_report import text_part  # it loads Transformers

    text = text_part(config)
    return _UNTESTED if text is config else _container(text.model_type)
