"""Sensitivity of a model's heads: d log p / d log beta of each, from one backward pass.

A head with a positive slope gains by a larger beta. Templates and lengths have equal weight. Plain
text is kept apart: a change that is good for answers may be bad for it.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrate.datasets.examples import Example, ExampleSet, Scores
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import PLAIN, Evidence
from calibrate.evidence.metrics import LOG_P
from calibrate.evidence.significance import significant_fdr
from calibrate.model.answers import as_finite, score_batch
from calibrate.model.batches import BACKWARD_WORK, Passes, begin_passes, length_batches, n_tokens
from calibrate.model.memory import bounded_memory, parts
from calibrate.model.objective import plain_alone
from calibrate.model.questions import per_question, question_of, shares_of
from calibrate.model.runner import Loaded, Runner
from calibrate.parallel.progress import SILENT, Progress

STEP = 1.1  # times beta, or divided by it: the step whose first-order gain is shown
SHARPER = "sharper"
DIFFUSE = "more diffuse"
UNCLEAR = "unclear"


class ExampleDerivatives(NamedTuple):
    """Derivatives of examples at beta = 1 in every head."""

    heads: list[tuple[int, int]]  # (layer, head)
    scores: Scores  # of the baseline
    slope: np.ndarray  # (examples, heads) nats by log beta: of the whole answer; of text, per token


class Slopes(NamedTuple):
    """Means over some of the examples."""

    slope: Estimate  # (heads,) nats per unit of log beta
    log_p: float  # nats
    examples: int


class HeadSensitivity(NamedTuple):
    """A head; None where there are no examples of the kind."""

    layer: int
    head: int
    answers: tuple[float, float] | None  # slope and error
    text: tuple[float, float] | None
    wants: str  # SHARPER, DIFFUSE or UNCLEAR: by the answers, or by text where there are none
    text_wants: str
    gain: float  # nats, to first order: of a step of beta by 10 % in the direction of the slope


class ModelSensitivity(NamedTuple):
    """The sensitivity of a model to beta of each head."""

    answers: Slopes | None
    text: Slopes | None
    by_length: dict[int, Slopes]  # of the answers
    by_template: dict[str, Slopes]  # of the answers
    heads: list[HeadSensitivity]  # the steepest first

    def with_direction(self, word: str) -> list[HeadSensitivity]:
        """The heads of a direction: SHARPER, DIFFUSE or UNCLEAR."""
        return [head for head in self.heads if head.wants == word]


def derivatives(
    runner: Runner, examples: ExampleSet, progress: Progress = SILENT
) -> ExampleDerivatives:
    """The derivative of each example's log p by log beta of every head.

    `progress` advances after each batch, by its work.

    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: the model does not look attention up.
    """
    n = len(examples.examples)
    begin_passes(progress, "differentiating", examples, Passes(backward=[range(n)]))
    heads = runner.heads()
    scores, slope = Scores.empty(n), np.empty((n, len(heads)))
    batches = list(length_batches(examples, range(n)))

    def store(number: int, of_batch: tuple[Scores, np.ndarray]) -> None:
        places, batch = batches[number]
        scores.put(places, of_batch[0])
        slope[places] = of_batch[1]
        progress.advance(BACKWARD_WORK * n_tokens(batch))

    runner.run([partial(_differentiate, batch.examples) for batch in batches], store)
    is_text = np.array([examples.is_text(example) for example in examples.examples])
    n_answer = np.where(is_text, examples.n_answer(range(n)), 1)
    return ExampleDerivatives(heads, scores, slope / n_answer[:, None])


def _differentiate(batch: list[Example], loaded: Loaded) -> tuple[Scores, np.ndarray]:
    """Scores of a batch, and (examples, heads) its derivatives, in parts that fit into memory."""
    of_parts = [_differentiate_part(batch[part], loaded) for part in parts(loaded, batch)]
    scores, slopes = zip(*of_parts, strict=True)
    return Scores.joined(scores), np.concatenate(slopes)


def _differentiate_part(batch: list[Example], loaded: Loaded) -> tuple[Scores, np.ndarray]:
    """The same of a part: each example has a row of betas of its own."""
    model, heads = loaded.model, loaded.heads
    betas = torch.ones(len(batch), len(heads.heads), device=model.device, requires_grad=True)
    heads.betas = betas
    try:
        with bounded_memory(batch, loaded):
            log_p, scores = score_batch(model, batch)
            (gradient,) = torch.autograd.grad(log_p.sum(), betas)
    finally:
        heads.betas = None
    return scores, as_finite(gradient)


def sensitivity(derivatives: ExampleDerivatives, examples: ExampleSet) -> ModelSensitivity:
    """Means of the derivatives over examples, and the direction of each head."""
    evidence = plain_alone(examples, derivatives.scores)
    question = question_of(examples, range(len(examples.examples)))
    answer_share = shares_of(derivatives.scores.log_p, question)[:, None]
    derivatives = derivatives._replace(
        slope=per_question(np.add, answer_share * derivatives.slope, question)
    )
    is_text = np.array([stratum.protected for stratum in evidence.strata])[evidence.stratum]
    answers, text = (
        _mean(derivatives, evidence, kind) if kind.any() else None for kind in (~is_text, is_text)
    )

    def by(column: str) -> dict[Any, Slopes]:
        of_strata = np.array([getattr(stratum, column) for stratum in evidence.strata])
        names = of_strata[evidence.stratum]
        parts = {x: ~is_text & (names == x) for x in np.unique(names[~is_text]).tolist()}
        return {name: _mean(derivatives, evidence, part) for name, part in parts.items()}

    heads = _steepest_first(derivatives.heads, answers, text)
    return ModelSensitivity(answers, text, by("size"), by("template"), heads)


def _steepest_first(
    names: list[tuple[int, int]], answers: Slopes | None, text: Slopes | None
) -> list[HeadSensitivity]:
    """The heads by falling slope of the answers, or of text where there are none."""
    main = text if answers is None else answers
    assert main is not None  # there is an example
    wants = _directions(main)
    text_wants = [UNCLEAR] * len(names) if text is None else _directions(text)
    gain = np.log(STEP) * np.abs(main.slope.mean)
    heads = [
        HeadSensitivity(
            *name, _of(answers, i), _of(text, i), wants[i], text_wants[i], float(gain[i])
        )
        for i, name in enumerate(names)
    ]
    return sorted(heads, key=lambda head: -head.gain)


def _mean(derivatives: ExampleDerivatives, evidence: Evidence, chosen: np.ndarray) -> Slopes:
    part = evidence.where(chosen)
    slope = part.design.estimate(derivatives.slope[chosen].T)
    return Slopes(slope, float(part.mean(PLAIN, LOG_P).mean), part.n)


def _of(slopes: Slopes | None, i: int) -> tuple[float, float] | None:
    return slopes and (float(slopes.slope.mean[i]), float(slopes.slope.error[i]))


def _directions(slopes: Slopes) -> list[str]:
    """The direction of each head, where its slope is significant (false discovery rate 5 %)."""
    significant = significant_fdr(slopes.slope.p)
    words = np.where(slopes.slope.mean > 0, SHARPER, DIFFUSE)
    return np.where(significant, words, UNCLEAR).tolist()  # type: ignore[no-any-return]
