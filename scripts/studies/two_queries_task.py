"""A task with two kinds of query for the same heads, and a small Llama that learns it.

A prompt is items and a query; each is one token. An item has a level and a class. The query
"one" asks for the class of the item of the highest level: a single item answers. The query "many"
names a level, and asks which class is the most frequent among the items near it: all of them
answer. Items of similar levels have similar classes, except the highest one: a head that attends to
its neighbours answers wrongly.

The model has no positional encoding, which might fail at smaller sizes than attention: all rotary
positions are 0. The task does not depend on order, and attention is causal.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from small_models import save_model, train, warm_up_and_cosine
from transformers import LlamaConfig, LlamaForCausalLM

LEVELS, CLASSES = 64, 8
NEAR = 6  # levels: the query is about items at most this far from its own
REGION = 8  # levels that have a class in common
SHARE = (0.3, 0.6)  # of the items of a region that have its class, whatever else is drawn
ONE = LEVELS * CLASSES  # token of the query "one"; those of "many" follow, one for each level
ANSWER = ONE + 1 + LEVELS  # the first of the tokens that answer
KINDS = ("one", "many")
TRAINED_SIZES = (4, 32)  # items of a prompt in training, least and most
PROMPTS, WARM_UP = 256, 200  # of a training step; steps
TOKENS_AT_ONCE = 1 << 14


class Prompts(NamedTuple):
    """Prompts of one kind and size."""

    tokens: torch.Tensor  # (prompts, size + 1), the query last
    answer: np.ndarray  # (prompts,) class
    asked: np.ndarray  # (prompts, size) bool: the items that the query is about


def draw(rng: np.random.Generator, size: int, count: int, kind: str) -> Prompts:
    """Up to `count` prompts with one answer each; those of kind "many" that tie are left out."""
    rows = np.arange(count)
    top = rng.integers(LEVELS // 4, LEVELS, (count, 1))
    levels = rng.integers(0, top, (count, size))
    highest = rng.integers(0, size, count)
    levels[rows, highest] = top[:, 0]
    regions = rng.integers(0, CLASSES, (count, LEVELS // REGION + 1))
    of_region = np.take_along_axis(
        regions, (levels + rng.integers(0, REGION, (count, 1))) // REGION, 1
    )
    alike = rng.random((count, size)) < rng.uniform(*SHARE, (count, 1))
    classes = np.where(alike, of_region, rng.integers(0, CLASSES, (count, size)))
    other = of_region[rows, highest] + rng.integers(1, CLASSES, count)
    classes[rows, highest] = other % CLASSES
    if kind == "one":
        query, asked = np.full(count, ONE), np.arange(size) == highest[:, None]
    else:
        level = rng.integers(0, top[:, 0])
        query, asked = ONE + 1 + level, np.abs(levels - level[:, None]) <= NEAR
    votes = ((classes[..., None] == np.arange(CLASSES)) & asked[..., None]).sum(axis=1)
    second, first = np.sort(votes, axis=1)[:, -2:].T
    tokens = np.concatenate([levels * CLASSES + classes, query[:, None]], axis=1)
    unique = first > second
    return Prompts(torch.from_numpy(tokens[unique]), votes.argmax(axis=1)[unique], asked[unique])


def prompts_of(stream: str, seed: int, size: int, kind: str, count: int) -> list[Prompts]:
    """At least `count` prompts, in pieces; another stream has others."""
    numbers = [("calibrate", "measure").index(stream), seed, size, KINDS.index(kind)]
    rng, pieces = np.random.default_rng([1, *numbers]), []
    while sum(len(piece.answer) for piece in pieces) < count:
        pieces.append(draw(rng, size, min(count, TOKENS_AT_ONCE // size), kind))
    return pieces


def new_model(heads: int, seed: int) -> LlamaForCausalLM:
    """An untrained model of two layers with this number of heads each."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ANSWER + CLASSES, hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=4096, initializer_range=0.04, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip


def answers(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """(prompts, CLASSES) logits of the answers."""
    nowhere = torch.zeros_like(tokens)
    # Without a mask, Transformers treats every position 0 as the start of a new sequence.
    out = model(
        input_ids=tokens, position_ids=nowhere, attention_mask=torch.ones_like(tokens),
        use_cache=False, logits_to_keep=1,
    )  # fmt: skip
    return out.logits[:, 0, ANSWER : ANSWER + CLASSES]


def train_into(folder: Path, model: LlamaForCausalLM, seed: int, steps: int, rate: float) -> None:
    """Trains on prompts of the trained sizes, both kinds equally, and saves the model."""
    rng = np.random.default_rng([seed, 0])

    def loss_at(step: int) -> torch.Tensor:
        size = int(rng.integers(TRAINED_SIZES[0], TRAINED_SIZES[1] + 1))
        drawn = [draw(rng, size, PROMPTS // len(KINDS), kind) for kind in KINDS]
        logits = answers(model, torch.cat([part.tokens for part in drawn]))
        answer = torch.from_numpy(np.concatenate([part.answer for part in drawn]))
        return torch.nn.functional.cross_entropy(logits, answer)

    train(model, loss_at, warm_up_and_cosine(rate, WARM_UP, steps), steps, folder.name)
    save_model(folder, model)


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM,
    pieces: list[Prompts],
    before: Callable[[Prompts], None] = lambda prompts: None,
) -> float:
    right = []
    for prompts in pieces:
        before(prompts)
        right.append(answers(model, prompts.tokens).argmax(dim=-1).numpy() == prompts.answer)
    return float(np.concatenate(right).mean())
