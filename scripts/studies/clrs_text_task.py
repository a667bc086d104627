"""Six tasks of CLRS-Text (Markeeva et al. 2024), and a small Llama that learns them.

A prompt and its answer are CLRS-Text's, without traces, of numbers of two decimals:

    minimum:
    key: [0.63 0.49 0.58 0.93]
    min:
    0.49

CLRS-Text answers with the index of an item; here the item's value is the answer, as CLRS-Text
itself does for sorted keys: beyond the trained lengths, indices are words that no model ever saw as
an answer. Only the place of a match of strings remains an index. A digit is a token, and so is all
that is between two digits: a number of two decimals is three tokens.

Rotary positions fail at distances that training had not. Training leaves gaps before items, at
random, so that all distances of long prompts occur; without them, positions are 0, 1, 2 ...
"""

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from small_models import save_model, train, warm_up_and_cosine
from study import RUNS
from transformers import LlamaConfig, LlamaForCausalLM

# Of each task: what a prompt has before, between and behind its numbers, and what answers have.
TASKS = {
    "minimum": ("minimum:\nkey: [0.", "]\nmin:\n"),
    "quickselect": ("quickselect:\nkey: [0.", "]\nmedian:\n"),
    "binary_search": ("binary_search:\nkey: [0.", "], target: 0.", "\nreturn:\n"),
    "find_maximum_subarray_kadane": (
        "find_maximum_subarray_kadane:\nkey: [0.", "find_maximum_subarray_kadane:\nkey: [-0.",
        "]\nstart, end:\n", "-0.", ", 0.", ", -0.",
    ),
    "naive_string_matcher": ("naive_string_matcher:\nstring: [", "], key: [", "]\nmatch:\n"),
    "insertion_sort": ("insertion_sort:\nkey: [0.", "]\npred:\n", "[0.", "]\n\n"),  # the long one
}  # fmt: skip
LONG = "insertion_sort"  # the task with a long answer
INDEX = "naive_string_matcher"  # the task whose answer is an index
DECIMALS = 2
DIGITS = "0123456789"
PIECES = (*DIGITS, " ", "0.", " 0.", " -0.", "\n\n", *sum(TASKS.values(), ()))
TOKEN = {piece: i for i, piece in enumerate(PIECES)}
PIECE = re.compile(r"\D*?-?0\.|\d|\D+")
ONE_DECIMAL = re.compile(r"\.\d\D")
TRAINED_LENGTHS = (4, 16)  # items of a prompt in training, least and most
SPAN = 400  # positions, as many as the longest prompt that is measured has
LAYERS, HEADS, WIDTH = 3, 4, 96
PROMPTS_A_STEP = 6  # of each task
PROMPTS_AT_ONCE = 50
STREAMS = ("train", "tune", "calibrate", "measure")
WARM_UP = 100  # steps
WHEELS = RUNS / "clrs-text" / "package"  # dm-clrs, and what its samplers import

Pair = tuple[list[int], list[int]]  # tokens of a prompt and of its answer


class Prompts(NamedTuple):
    """Prompts with their answers, padded behind them."""

    tokens: torch.Tensor  # (prompts, width)
    answer: torch.Tensor  # (prompts, width) bool: tokens of the answer


def add_wheels() -> None:
    """Makes the samplers of dm-clrs importable from its wheel, of which nothing is installed.

    Its packages are not executed: they import TensorFlow and Haiku, which samplers do not need,
    except for the name of one class.
    """
    if "clrs" in sys.modules:
        return
    sys.path += map(str, sorted(WHEELS.glob("*.whl")))
    (clrs,) = WHEELS.glob("dm_clrs*.whl")
    for name in ("clrs", "clrs._src", "clrs._src.clrs_text"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(clrs / name.replace(".", "/"))]
    sys.modules["tensorflow"] = ModuleType("tensorflow")
    sys.modules["tensorflow"].Tensor = type("Tensor", (), {})


def sample(task: str, length: int, numbers: Sequence[int], count: int) -> list[tuple[str, str]]:
    """Prompts with answers of dm-clrs; other numbers give others. No published set has such seeds.

    Reference: `clrs._src.clrs_text.huggingface_generators`, with the same options.
    """
    add_wheels()
    from clrs._src import samplers
    from clrs._src.clrs_text import clrs_utils

    words = np.random.SeedSequence([list(TASKS).index(task), length, *numbers]).generate_state(1)
    sampler, _ = samplers.build_sampler(
        task, -1, seed=int(words[0]) | 1 << 31, track_max_steps=False, length=length,
        truncate_decimals=DECIMALS,
    )  # fmt: skip
    texts = (clrs_utils.format_clrs_example(task, sampler.next(1)) for _ in range(count))
    return [(prompt, with_values(task, prompt, answer)) for prompt, answer in texts]


def with_values(task: str, prompt: str, answer: str) -> str:
    """An answer with the items' values in place of their indices."""
    if task in (LONG, INDEX):
        return answer
    items = prompt[prompt.index("[") + 1 : prompt.index("]")].split()
    return ", ".join(items[int(i)] for i in answer.split(", ")) + "\n\n"


def tokens_of(text: str) -> list[int]:
    return [TOKEN[piece] for piece in PIECE.findall(text)]


def draw(stream: str, seed: int, task: str, length: int, count: int, step: int = 0) -> list[Pair]:
    """Prompts with their answers; another stream has others, and so has another step."""
    numbers = [STREAMS.index(stream), seed, step]
    texts = sample(task, length, numbers, count)
    return [(tokens_of(prompt), tokens_of(answer)) for prompt, answer in texts]


def draw_even(stream: str, seed: int, task: str, length: int, count: int) -> list[Pair]:
    """Prompts whose numbers all have two decimals: they are as long as each other, and so batch."""
    found: list[Pair] = []
    steps = itertools.count()
    while len(found) < count:
        texts = sample(task, length, [STREAMS.index(stream), seed, next(steps)], count)
        found += [(tokens_of(p), tokens_of(a)) for p, a in texts if not ONE_DECIMAL.search(p + a)]
    return found[:count]


def padded(pairs: Sequence[Pair]) -> Prompts:
    ends = [len(prompt) + len(answer) for prompt, answer in pairs]
    tokens = torch.zeros(len(pairs), max(ends), dtype=torch.long)
    asked = torch.zeros(len(pairs), max(ends), dtype=torch.bool)
    for i, ((prompt, answer), end) in enumerate(zip(pairs, ends, strict=True)):
        tokens[i, :end] = torch.tensor([*prompt, *answer])
        asked[i, len(prompt) : end] = True
    return Prompts(tokens, asked)


def new_model(seed: int, width: int = WIDTH) -> LlamaForCausalLM:
    """An untrained model, by default of 0.28 million parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(PIECES), hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
            max_position_embeddings=1024, initializer_range=0.04, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip


def gaps(tokens: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Positions that leave gaps before tokens that are not digits, SPAN positions at most."""
    rows, width = tokens.shape
    shares = np.where(tokens.numpy() >= len(DIGITS), rng.exponential(size=(rows, width)), 0.0)
    spare = rng.uniform(0, SPAN - width, (rows, 1))
    left_out = np.cumsum(spare * shares / shares.sum(axis=1, keepdims=True), axis=1)
    return torch.from_numpy(np.arange(width) + np.floor(left_out)).long()


def log_p(
    model: LlamaForCausalLM, tokens: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each token but the first, and whether it is the likeliest: (prompts, width - 1)."""
    out = model(
        input_ids=tokens, position_ids=positions, use_cache=False,
        # Without a mask, Transformers treats each gap as the start of a new sequence.
        attention_mask=torch.ones_like(tokens),
    )  # fmt: skip
    wanted = tokens[:, 1:, None]
    of_all = out.logits[:, :-1].log_softmax(dim=-1)
    return of_all.gather(2, wanted)[..., 0], of_all.argmax(dim=-1) == wanted[..., 0]


def loss_of(
    model: LlamaForCausalLM, stream: str, seed: int, step: int, with_gaps: bool
) -> torch.Tensor:
    """Mean -log p of the answers' tokens, all tasks at one length."""
    rng = np.random.default_rng([STREAMS.index(stream), seed, step])
    length = int(rng.integers(TRAINED_LENGTHS[0], TRAINED_LENGTHS[1] + 1))
    *short, long = (draw(stream, seed, task, length, PROMPTS_A_STEP, step) for task in TASKS)
    losses = []
    for batch in (padded([*itertools.chain(*short)]), padded(long)):
        positions = gaps(batch.tokens, rng) if with_gaps else None
        losses.append(-log_p(model, batch.tokens, positions)[0][batch.answer[:, 1:]])
    return torch.cat(losses).mean()


def train_into(
    folder: Path, model: LlamaForCausalLM, stream: str, seed: int, steps: int, rate: float,
    checkpoint: Path, with_gaps: bool = True,
) -> None:  # fmt: skip
    """Trains, from the checkpoint if there is one, and saves the model in half precision."""
    train(
        model, lambda step: loss_of(model, stream, seed, step, with_gaps),
        warm_up_and_cosine(rate, WARM_UP, steps), steps, folder.name, checkpoint,
    )  # fmt: skip
    save_model(folder, model.half())
    checkpoint.unlink(missing_ok=True)


@torch.no_grad()
def scores(model: LlamaForCausalLM, pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Of each prompt, whether greedy decoding gives the answer, and mean log p of its tokens."""
    found: dict[str, list[float]] = {"right": [], "log_p": []}
    for i in range(0, len(pairs), PROMPTS_AT_ONCE):
        batch = padded(pairs[i : i + PROMPTS_AT_ONCE])
        log, likeliest = log_p(model, batch.tokens)
        asked = batch.answer[:, 1:]
        found["right"] += (likeliest | ~asked).all(dim=1).int().tolist()
        found["log_p"] += ((log * asked).sum(dim=1) / asked.sum(dim=1)).tolist()
    return found
