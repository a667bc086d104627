"""Logits of the answers of examples, by one forward pass of a model."""

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.datasets.examples import Example
from calibrate.errors import CalibrateError


def answer_logits(model: PreTrainedModel, examples: Sequence[Example]) -> Tensor:
    """Logits (examples, tokens, vocabulary) of one forward pass over examples of equal length.

    They are of the tokens from the first answer on alone, where the model can leave out the others.
    """
    tokens = torch.from_numpy(np.stack([example.tokens for example in examples])).long()
    largest, known = int(tokens.max()), model.config.get_text_config().vocab_size
    if largest >= known:
        raise CalibrateError(
            f"an example has token {largest}, and this model knows 0 to {known - 1}; give the "
            "model that the examples were made for"
        )
    tokens = tokens.to(model.device)
    n_kept, inputs = _n_kept(examples), tokens[:, :-1]
    takes_number = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": n_kept} if takes_number else {}
    mask = torch.ones_like(inputs)
    output = model(input_ids=inputs, attention_mask=mask, use_cache=False, **options)
    logits: Tensor = output.logits[:, -n_kept:]
    return logits


def _n_kept(examples: Sequence[Example]) -> int:
    """Tokens from the first answer on."""
    return max(len(example.tokens) - example.start for example in examples)
