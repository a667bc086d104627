"""Scores and gradients of a causal language model under rules of its heads.

The weights are frozen; gradients are by the numbers of the rules. Batches are shared among the
workers of the runner, and results are cached.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.model.parameters import HeadId, Parameters, RuleFamily
from calibrate.model.runner import (
    Loaded,
    Runner,
    bounded_memory,
    divide_batch,
)
from calibrate.model.scoring import (
    ResultCache,
    length_batches,
    score_batch,
    score_fits,
)
from calibrate.parallel import SILENT, Progress
from calibrate.prompts.examples import Example, ExampleSet, Scores
from calibrate.storage.npz import pack_arrays, parse_arrays
from calibrate.store.fit import Fit
from calibrate.transformers.betas import HeadBetas, HeadRules, answer_logits

BatchMeasure = Callable[[slice, PreTrainedModel], Tensor]  # of a part of a batch: a scalar


@dataclass(frozen=True, eq=False)
class TransformersScorer:
    """A `ModelScorer` for a model of Transformers and its examples."""

    runner: Runner
    heads: list[HeadId]  # of the model
    examples: ExampleSet
    cache: ResultCache
    progress: Progress = SILENT  # advances after each pass, by its tokens

    def score(self, rules: Sequence[Fit], indices: Sequence[int]) -> list[Scores]:
        """See `ModelScorer`."""
        fits = {str(i): fit for i, fit in enumerate(rules)}
        scores = score_fits(self.runner, self.examples, indices, fits, self.cache, self.progress)
        return list(scores.values())

    def gradient(
        self, parameters: Parameters, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """See `ModelScorer`."""

        def compute() -> np.ndarray:
            batches = [
                (batch, partial(_weighted_log_p, batch, weights[places]))
                for places, batch in length_batches(self.examples, indices)
            ]
            return np.array(np.add.reduce(self._gradients(parameters, batches)))

        return self._cached("gradient", parameters, indices, weights, compute)

    def fisher_scores(self, parameters: Parameters, indices: Sequence[int]) -> np.ndarray:
        """See `ModelScorer`."""

        def compute() -> np.ndarray:
            windows = [([self.examples.examples[i]], i) for i in indices]
            batches = [(window, partial(_draw_log_p, window, seed)) for window, seed in windows]
            return np.array(self._gradients(parameters, batches))

        scores = self._cached("drawn", parameters, indices, np.empty(0), compute)
        return np.array(scores / np.sqrt(self.examples.n_answer(indices).sum()))

    def _cached(
        self,
        name: str,
        parameters: Parameters,
        indices: Sequence[int],
        weights: np.ndarray,
        compute: Callable[[], np.ndarray],
    ) -> np.ndarray:
        """The cached result of a pass, or a new one, which is cached."""
        arrays = [x.tobytes() for x in (parameters.numbers, np.array(indices), weights)]
        key = b"\0".join([name.encode(), repr(parameters.family).encode(), *arrays])
        if cached := self.cache.find(key, parse_arrays):
            self.progress.advance(self.examples.n_tokens(indices), resumed=True)
            return cached[name]
        array = compute()
        self.cache.keep(key, pack_arrays({name: array}))
        self.progress.advance(self.examples.n_tokens(indices))
        return array

    def _gradients(
        self, parameters: Parameters, batches: Sequence[tuple[list[Example], BatchMeasure]]
    ) -> list[np.ndarray]:
        """The gradient of the measure of each batch, (rows, columns)."""
        return self.runner.run([partial(_batch_gradient, parameters, *x) for x in batches])


def _batch_gradient(
    parameters: Parameters, batch: list[Example], measure: BatchMeasure, loaded: Loaded
) -> np.ndarray:
    """The gradient of a measure of a batch, (rows, columns)."""
    gradients = []
    for part in divide_batch(loaded, batch):
        with bounded_memory(batch[part], loaded):
            gradient = gradient_of_measure(loaded, parameters, partial(measure, part, loaded.model))
            assert gradient is not None
            gradients.append(gradient)
    return np.array(np.add.reduce(gradients))


def gradient_of_measure(
    loaded: Loaded, parameters: Parameters, measure: Callable[[], Tensor]
) -> np.ndarray | None:
    """The gradient of a measure of a model by the numbers of its rules.

    Args:
      measure: calls the model and returns a scalar.
    Returns:
      (rows, columns); None if the measure has no gradient.
    Raises:
      CalibrateError: the gradient is not finite.
    """
    numbers = torch.from_numpy(parameters.numbers).to(loaded.model.device).requires_grad_()
    with given_rules(loaded.heads, parameters.family, numbers):
        value, gradient = measure(), None
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, numbers, allow_unused=True)
    if gradient is None:
        return None
    array: np.ndarray = gradient.double().cpu().numpy()
    if not np.isfinite(array).all():
        raise CalibrateError(
            "a derivative by a head's beta is not finite; load the model in float32"
        )
    return array


@contextmanager
def given_rules(heads: HeadBetas, family: RuleFamily, numbers: Tensor) -> Iterator[None]:
    """Gives the heads of a model the rules of `numbers`, with gradients, until the block ends."""
    columns = family.sharing.columns(heads.heads)
    coefficients = torch.stack([x[columns] for x in family.coefficients(list(numbers))])
    is_baseline = not bool(numbers.detach().any())
    heads.rules = HeadRules(family.rule, coefficients, family.domain, is_baseline)
    try:
        yield
    finally:
        heads.rules = None


# Measures of a batch


def _weighted_log_p(
    batch: list[Example], weights: np.ndarray, part: slice, model: PreTrainedModel
) -> Tensor:
    log_p, _ = score_batch(model, batch[part])
    return (torch.from_numpy(weights[part]).to(model.device) * log_p).sum()


def _draw_log_p(batch: list[Example], seed: int, _: slice, model: PreTrainedModel) -> Tensor:
    return log_p_of_draws(answer_logits(model, batch)[0], seed)


def log_p_of_draws(logits: Tensor, seed: int) -> Tensor:
    """The summed log p of a class drawn from each prediction.

    The expected square of its gradient is the Fisher information.

    Args:
      logits: (predictions, classes).
    """
    log_p = logits.float().log_softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator)
    return log_p.gather(-1, drawn.to(log_p.device)).sum()
