"""Scores of examples by a model: log p of right answers, and the KL of text under rules.

The KL divergence is that of the next token's distribution from the baseline's, KL(plain || rule) a
token: 0 for the baseline alone, and unlike a difference of losses it has no noise of mean zero.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.datasets.examples import N_HIGHEST, Example, Scores
from calibrate.errors import CalibrateError
from calibrate.transformers.answer_logits import answer_logits

ROWS_AT_ONCE = 256  # of logits, whose copies in float32 are held
ROWS_ON_CPU = 16  # where these copies take a third of the time in memory that is used again


def score_batch(
    model: PreTrainedModel, examples: Sequence[Example], plain: Tensor | None = None
) -> tuple[Tensor, Scores]:
    """Scores of examples of equal length by one forward pass, and their log p with its gradient.

    Args:
      plain: the logits of the baseline (examples, tokens, vocabulary), which predictions are
        compared with; without them comparisons are 0.
    Returns:
      (examples,) nats, the tensor of log p that gradients flow from; and the scores as arrays.
    Raises:
      CalibrateError: a log p is not finite.
    """
    logits = answer_logits(model, examples)
    n_kept, device = logits.shape[1], logits.device
    target = torch.from_numpy(np.stack([x.tokens[-n_kept:] for x in examples])).long().to(device)
    start = torch.tensor([x.start - len(x.tokens) + n_kept for x in examples], device=device)
    of_answer = torch.arange(n_kept, device=device) >= start[:, None]
    # By rows of logits: by columns, PyTorch would make a copy of them all.
    lost = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), target.flatten(), reduction="none"
    ).view_as(target)
    log_p = -torch.where(of_answer, lost, 0).sum(1, dtype=torch.float64)
    top = logits.argmax(-1)
    n_right = ((top == target) & of_answer).sum(1)
    scores = _scores(examples, log_p, n_right)
    if plain is not None:
        each = kl_divergence(plain.flatten(0, 1), logits.flatten(0, 1)).view_as(target)
        kl = torch.where(of_answer, each, 0)
        highest = kl.topk(min(N_HIGHEST, n_kept)).values.cpu().numpy()
        scores.highest_kl[:, : highest.shape[1]] = highest
        scores.changed[:] = ((plain.argmax(-1) != top) & of_answer).sum(1).cpu().numpy()
        scores.kl[:] = kl.sum(1).cpu().numpy()
    return log_p, scores


def log_p_of_draws(logits: Tensor, seed: int) -> Tensor:
    """log p of one class that is drawn from each prediction, summed; logits (rows, classes)."""
    log_p = logits.float().log_softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator)
    return log_p.gather(-1, drawn.to(log_p.device)).sum()


def _scores(examples: Sequence[Example], *columns: Tensor) -> Scores:
    """The scores of answers as arrays; raises CalibrateError unless each log p is finite."""
    log_p, n_right = (column.detach().cpu().numpy() for column in columns)
    if not np.isfinite(log_p).all():
        raise CalibrateError(
            f"log p of an answer of {len(examples[0].tokens):,} tokens is {log_p.min()}: the "
            "model's logits are not finite; load it in float32, or restore its weights"
        )
    return Scores.of_plain(np.minimum(log_p, 0.0), n_right.astype(np.int32))


def as_finite(gradient: Tensor) -> np.ndarray:
    """A gradient by betas as an array; raises CalibrateError unless it is finite."""
    array: np.ndarray = gradient.double().cpu().numpy()
    if not np.isfinite(array).all():
        raise CalibrateError(
            "a derivative by a head's beta is not finite; load the model in float32"
        )
    return array


def kl_divergence(plain: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax(plain) || softmax(logits)), nats, (rows,) of two (rows, classes)."""
    divergences = []
    size = ROWS_ON_CPU if logits.device.type == "cpu" else ROWS_AT_ONCE
    for rows in zip(plain.split(size), logits.split(size), strict=True):
        log_p, log_q = (x.float().log_softmax(-1) for x in rows)
        each = torch.where(log_p == -torch.inf, 0, log_p.exp() * (log_p - log_q))
        divergences.append(each.sum(-1, dtype=torch.float64))
    return torch.cat(divergences).clamp(min=0)  # rounding
