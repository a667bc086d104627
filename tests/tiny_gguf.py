"""Tiny models in .gguf files, written by the package `gguf` as llama.cpp's converter does."""

import gguf
import numpy as np
import torch
from tiny_causal import SIZES, causal_model
from tokenizers.pre_tokenizers import ByteLevel

LETTERS = sorted(ByteLevel.alphabet())
MERGES = ["Ġ t", "Ġt h", "Ġth e"]
TOKENS = [*LETTERS, *("".join(merge.split()) for merge in MERGES)]
BASELINE, PACKED = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
ROTATED = ("llama", "mistral3", "granite")  # llama.cpp rotates neighbours, and Transformers halves


def small_model(kind="llama", **changes):
    """With rows of whole blocks, which packed weights need, and as many tokens as the tokenizer."""
    return causal_model(kind, **{"intermediate_size": 64, "vocab_size": len(TOKENS)} | changes)


def logits_of(model):
    tokens = torch.arange(3, 43).reshape(2, 20) * 5
    return model(tokens, use_cache=False).logits


def write_gguf(
    folder, model, packing=BASELINE, tokenizer=True, without=(), licence="apache-2.0",
    architecture="llama", tokens=TOKENS, add_keys=lambda writer: None,
):  # fmt: skip
    """A folder with the model in one file; `add_keys` gives the writer more keys."""
    folder.mkdir()
    config = model.config
    writer = gguf.GGUFWriter(folder / "tiny.gguf", architecture)
    writer.add_name("tiny")
    writer.add_license(licence)
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = SIZES["head_dim"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_keys(writer)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_merges(MERGES)
    add_tensors(writer, model, packing, without, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def add_tensors(writer, model, packing, without, architecture):
    kind_of = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind_of, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        data = weight.numpy()
        for part, n_heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name and architecture in ROTATED:
                data = data.reshape(n_heads, 2, -1, *data.shape[1:]).swapaxes(1, 2)
                data = np.ascontiguousarray(data.reshape(weight.shape))
        if architecture.startswith("gemma") and "norm" in name:
            data = data + 1
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if name not in without and not tied:
            kind = packing if data.ndim == 2 else BASELINE
            packed = gguf.quants.quantize(data, kind)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=kind)
