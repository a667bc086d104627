"""What a model says to examples: log p of the right answers, and whether it would give them.

Letters for shapes: B examples of equal length, T tokens.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.files.examples import Cell, Example, ExampleSet, Scores

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
TOKENS_AT_ONCE = 1024  # of a batch; an example alone may be longer


class Answers(NamedTuple):
    """Of a batch."""

    log_p: Tensor  # (B,) nats: of the whole answer
    right: Tensor  # (B,) int: tokens of the answer that have the highest logit


def batches(examples: Sequence[Example], which: Iterable[int]) -> list[list[int]]:
    """Some examples by equal length, so that no batch has padding; their order is kept within."""
    by_length: dict[int, list[int]] = {}
    for i in which:
        by_length.setdefault(len(examples[i].tokens), []).append(i)
    made = []
    for length, members in by_length.items():
        size = max(1, TOKENS_AT_ONCE // length)
        made += [members[first : first + size] for first in range(0, len(members), size)]
    return made


def batch_tokens(examples: Sequence[Example], which: Iterable[int]) -> list[int]:
    """The tokens of each of the batches of some examples."""
    return [sum(len(examples[i].tokens) for i in batch) for batch in batches(examples, which)]


def answer(model: PreTrainedModel, examples: Sequence[Example]) -> Answers:
    """One forward pass over examples of equal length.

    Only logits from the first answer on are computed, where the model can leave out the others.
    """
    tokens = torch.from_numpy(np.stack([example.tokens for example in examples])).long()
    tokens = tokens.to(model.device)
    start = torch.tensor([example.start for example in examples], device=model.device)
    n_kept, inputs = tokens.shape[1] - int(start.min()), tokens[:, :-1]
    fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
    output = model(
        input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=False,
        **({"logits_to_keep": n_kept} if fewer else {}),
    )  # fmt: skip
    logits, target = output.logits[:, -n_kept:].float(), tokens[:, -n_kept:]
    at = torch.arange(tokens.shape[1] - n_kept, tokens.shape[1], device=model.device)
    of_answer = at >= start[:, None]
    # Of rows of logits: of columns, PyTorch would make a copy of them all.
    lost = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    ).view_as(target)
    log_p = -torch.where(of_answer, lost, 0).sum(1, dtype=torch.float64)
    return Answers(log_p, ((logits.argmax(-1) == target) & of_answer).sum(1))


def checked(answers: Answers, examples: Sequence[Example], cells: Sequence[Cell]) -> Scores:
    """The answers of a batch as arrays.

    Raises:
      CalibrateError: a log p is not finite.
    """
    log_p = answers.log_p.detach().cpu().numpy()
    for value, example in zip(log_p, examples, strict=True):
        if not math.isfinite(value):
            cell = cells[example.cell]
            raise CalibrateError(
                f"log p of an answer (template {cell.template}, {len(example.tokens):,} tokens) is "
                f"{value}: the model's logits are not finite; load it with --dtype float32, or "
                "restore its weights"
            )
    return Scores(np.minimum(log_p, 0.0), answers.right.cpu().numpy().astype(np.int32))


def score(
    model: PreTrainedModel,
    examples: ExampleSet,
    which: Sequence[int],
    report: Callable[[int], None] = lambda tokens: None,
) -> Scores:
    """The scores of some examples; `report` is called with the tokens of each batch."""
    log_p, right = np.empty(len(which)), np.empty(len(which), np.int32)
    place = {example: at for at, example in enumerate(which)}
    for batch in batches(examples.examples, which):
        chosen = [examples.examples[i] for i in batch]
        with torch.no_grad(), room_for(chosen):
            scores = checked(answer(model, chosen), chosen, examples.cells)
        at = [place[i] for i in batch]
        log_p[at], right[at] = scores
        report(sum(len(example.tokens) for example in chosen))
    return Scores(log_p, right)


@contextmanager
def room_for(examples: Sequence[Example]) -> Iterator[None]:
    """Raises CalibrateError where PyTorch runs out of memory on a batch."""
    try:
        yield
    except (MemoryError, RuntimeError) as failure:  # PyTorch has a class of its own on GPUs only
        words = str(failure).lower()
        if not isinstance(failure, MemoryError) and not any(w in words for w in _NO_MEMORY):
            raise
        raise CalibrateError(
            f"out of memory at {len(examples)} x {len(examples[0].tokens):,} tokens; give shorter "
            "--lengths, or --dtype bfloat16"
        ) from failure


def check_vocabulary(examples: ExampleSet, vocabulary: int) -> None:
    """Raises CalibrateError if an example has a token that a model does not know."""
    largest = max(int(example.tokens.max()) for example in examples.examples)
    if largest >= vocabulary:
        raise CalibrateError(
            f"an example has token {largest}, and this model knows 0 to {vocabulary - 1}; give the "
            "model that the examples were made for"
        )
