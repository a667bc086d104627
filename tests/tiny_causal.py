"""Tiny causal models of Transformers in folders, with a tokenizer of whole words."""

import re
import string

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from calibrate.model import words
from calibrate.model.retrieval import TEMPLATES

MORE = {
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 8},
}
KINDS = {
    "llama": "Llama", "gemma2": "Gemma2", "gpt_oss": "GptOss", "bloom": "Bloom", "qwen2": "Qwen2",
    "qwen3": "Qwen3", "phi3": "Phi3", "olmo2": "Olmo2", "gemma3": "Gemma3",
}  # fmt: skip


def causal_model(kind="llama", **changes):
    """Random weights, four query heads and two key heads in each of two layers."""
    torch.manual_seed(0)
    of_kind = getattr(transformers, f"{KINDS[kind]}ForCausalLM")
    config = of_kind.config_class(**SIZES | MORE.get(kind, {}) | changes)
    model = of_kind(config).eval().requires_grad_(False)
    for name, x in model.named_parameters():
        if "sinks" in name:
            x.copy_(torch.randn_like(x))
    return model


def save(folder, model, tokenizer=True):
    """The folder, with the model and, if wanted, a tokenizer."""
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder):
    """Words, digits and signs are tokens; spaces are none."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(True)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)


def _vocabulary():
    frames = " ".join(t.fact + t.frame for t in TEMPLATES.values())
    known = [*re.findall(r"[a-zA-Z]+", frames), *string.digits, *string.punctuation]
    for name in ("ADJECTIVES", "NOUNS", "FIRST_NAMES", "LAST_NAMES", "TOWNS"):
        known += getattr(words, name)
    known = ["[UNK]", *dict.fromkeys(known)]
    return {word: i for i, word in enumerate(known)}


VOCABULARY = _vocabulary()
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
