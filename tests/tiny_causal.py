"""Tiny causal models of Transformers in folders, with a tokenizer of whole words."""

import re
import string
from functools import cache

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from calibrate.model.runner import Loaded, Runner
from calibrate.prompts import retrieval_task
from calibrate.prompts.examples import Cell, Example, ExampleSet
from calibrate.prompts.retrieval_task import PROMPT_TEMPLATES
from calibrate.transformers.betas import head_betas

MORE = {
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "granite": {
        "attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


def causal_model(kind="llama", **changes):
    """Random weights, four query heads and two key heads in each of two layers."""
    torch.manual_seed(0)
    of_kind = transformers.CONFIG_MAPPING["gemma3_text" if kind == "gemma3" else kind]
    config = of_kind(**SIZES | MORE.get(kind, {}) | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, x in model.named_parameters():
        if "sinks" in name:
            x.copy_(torch.randn_like(x))
    return model


def save(folder, model, tokenizer=True, **options):
    """The folder, with the model and, if wanted, a tokenizer."""
    model.save_pretrained(folder, **options)
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
    frames = " ".join(f"{t.fact} {t.frame} {t.answer}" for t in PROMPT_TEMPLATES.values())
    known = [*re.findall(r"[a-zA-Z]+", frames), *string.digits, *string.punctuation]
    for name in ("ADJECTIVES", "NOUNS", "FIRST_NAMES", "LAST_NAMES", "TOWNS"):
        known += getattr(retrieval_task, name)
    known = ["[UNK]", *dict.fromkeys([*known, "on"])]
    return {word: i for i, word in enumerate(known)}


VOCABULARY = _vocabulary()
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip

LENGTHS = (20, 20, 20, 33)


def some_examples(lengths=LENGTHS, text=False):
    rng = np.random.default_rng(0)
    return ExampleSet(
        (Cell("some", 32, False), Cell("text", 32, True))[: 1 + text],
        tuple(
            Example(rng.integers(3, 500, n).astype(np.int32), 1 if i % 2 and text else n - 3,
                    i % 2 if text else 0)
            for i, n in enumerate(lengths)
        ),
    )  # fmt: skip


def runner_of(model, **limits):
    """A runner of a model in memory, or of what a call makes; `limits` are fields of Loaded."""

    @cache
    def load():
        loaded = model if isinstance(model, torch.nn.Module) else model()
        held = head_betas(loaded)
        return Loaded(loaded, held.__enter__(), held, **limits)

    return Runner(load)


ITEMS, MARKED, QUERY = 10, 20, 30  # tokens: an item of one of eight classes, marked or not


def planted_model():
    """Head 0 finds the marked item, too diffusely; head 2 finds the others, and misleads.

    The first features are the class, one for marked items, one for the query, one for the others;
    heads write the class they find into features 16 to 23, which the logits are read from. The last
    pair of a head's channels is hardly rotated.
    """
    config = transformers.LlamaConfig(
        **SIZES | {"vocab_size": 64},
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for x in model.parameters():
        x.fill_(1.0) if x.ndim == 1 else x.zero_()
    embedding, first = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    for i in range(8):
        embedding[ITEMS + i, [i, 10]] = embedding[MARKED + i, [i, 8]] = 1.0
        model.lm_head.weight[ITEMS + i, 16 + i] = 2.0
        for head in range(4):
            first.o_proj.weight[16 + i, 8 * head + i] = 0.25
        for group in range(2):
            first.v_proj.weight[8 * group + i, i] = 1.0
    embedding[QUERY, 9] = 2**0.5
    for head, strength in ((0, 0.15), (2, 0.15)):
        first.q_proj.weight[8 * head + 3, 9] = strength
    first.k_proj.weight[3, 8] = first.k_proj.weight[8 + 3, 10] = 2**0.5
    return model


def planted_examples(lengths=(12, 24), count=12):
    """Items, the marked one among them, and the query; the answer is the marked item's class."""
    rng, examples = np.random.default_rng(3), []
    for cell, n in enumerate(lengths):
        for _ in range(count):
            classes = rng.integers(0, 8, n)
            tokens, marked = ITEMS + classes, rng.integers(0, n)
            tokens[marked] += MARKED - ITEMS
            tokens = np.array([*tokens, QUERY, ITEMS + classes[marked]], np.int32)
            examples.append(Example(tokens, n + 1, cell))
    return ExampleSet(tuple(Cell("marked", n, False) for n in lengths), tuple(examples))


def prompt_lines(examples):
    """The lines of a file of prompts, with a template for each length."""
    return [
        {"prompt_ids": e.tokens[: e.start].tolist(), "answer_ids": e.tokens[e.start :].tolist(),
         "template": f"n{e.cell}"}
        for e in examples.examples
    ]  # fmt: skip
