"""d log p / d log beta of every head at once: one backward pass through the frozen model."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.files.examples import Example, ExampleSet
from calibrate.model.answering import answer, batches, check_vocabulary, checked, room_for
from calibrate.transformers.betas import HeadBetas, checkpointed, head_betas

# What a layer keeps for the backward pass, in numbers for each token and channel (measured on a
# Llama); a batch that would keep more than this in all layers keeps each layer's input alone.
_KEPT = 20
MOST_KEPT_BYTES = 1 << 29


class Derivatives(NamedTuple):
    """Of each example, at beta = 1 in every head."""

    heads: list[tuple[int, int]]  # (layer, head)
    log_p: np.ndarray  # (examples,) nats: of the whole answer; of text, per token
    slope: np.ndarray  # (examples, heads) of log_p by log beta


def derivatives(
    model: PreTrainedModel,
    examples: ExampleSet,
    report: Callable[[int], None] = lambda tokens: None,
) -> Derivatives:
    """The derivative of each example's log p by log beta of every head.

    Args:
      model: frozen, in evaluation.
      examples: with tokens that it knows.
      report: called with the tokens of each batch.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: the model does not look attention up.
    """
    check_vocabulary(examples, model.config.get_text_config().vocab_size)
    n, everything = len(examples.examples), examples.examples
    per_token = np.array([examples.cells[example.cell].text for example in everything])
    log_p, slope = np.empty(n), np.empty((0, 0))
    with head_betas(model) as heads:
        slope = np.empty((n, len(heads.heads)))
        for batch in batches(everything, range(n)):
            chosen = [everything[i] for i in batch]
            with room_for(chosen):
                log_p[batch], slope[batch] = _of_batch(model, heads, examples, chosen)
            report(sum(len(example.tokens) for example in chosen))
        names = heads.heads
    n_answer = np.where(per_token, examples.n_answer(range(n)), 1)
    return Derivatives(names, log_p / n_answer, slope / n_answer[:, None])


def _of_batch(
    model: PreTrainedModel, heads: HeadBetas, examples: ExampleSet, chosen: list[Example]
) -> tuple[np.ndarray, np.ndarray]:
    """log p, and its derivatives by the betas of a row of their own for each example."""
    betas = torch.ones(len(chosen), len(heads.heads), device=model.device, requires_grad=True)
    heads.betas = betas
    try:
        with ExitStack() as stack:
            if keeps_much(model, chosen):
                stack.enter_context(checkpointed(model))
            answers = answer(model, chosen)
            scores = checked(answers, chosen, examples.cells)
            (gradient,) = torch.autograd.grad(answers.log_p.sum(), betas)
    finally:
        heads.betas = None
    slope = gradient.double().cpu().numpy()
    if not np.isfinite(slope).all():
        layer, head = heads.heads[int(np.argwhere(~np.isfinite(slope))[0, 1])]
        raise CalibrateError(
            f"the derivative by beta of layer {layer}, head {head} is not finite; load the model "
            "with --dtype float32"
        )
    return scores.log_p, slope


def keeps_much(model: PreTrainedModel, chosen: list[Example]) -> bool:
    """Whether a backward pass would keep more than a bounded memory allows, in all layers."""
    config = model.config.get_text_config()
    n_tokens = sum(len(example.tokens) for example in chosen)
    size = config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return int(_KEPT * n_tokens * size) > MOST_KEPT_BYTES
