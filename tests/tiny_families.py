"""Tiny causal models of several families with large random weights, and tokens."""

import numpy as np
import torch
from tiny_causal import causal_model

LENGTH, WINDOW = 40, 6  # prompts take two fused calls, single tokens a block
# Grouped queries throughout, and what else each of them has.
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW},
    "gemma3": {"sliding_window": WINDOW},
    "gpt2": {"n_head": 4},
    "gpt_oss": {"sliding_window": WINDOW, "num_experts_per_tok": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
}  # fmt: skip
IDS = torch.tensor(np.random.default_rng(0).integers(1, 60, (2, LENGTH)))
PADDED = torch.ones(2, LENGTH, dtype=torch.long)
PADDED[0, :7] = 0
POSITIONS = (PADDED.cumsum(-1) - 1).clamp(min=0)


def make_model(family, **changes):
    sizes = {"vocab_size": 60, "max_position_embeddings": 128, "initializer_range": 0.4}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return causal_model(family, **sizes | ends | FAMILIES[family] | changes)
