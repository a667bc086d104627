"""Derivatives of log p of right answers by rules on the heads of a frozen model.

Batches are shared among whatever runs the model; results are cached, see `scoring.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.datasets.examples import Example, ExampleSet, Scores
from calibrate.model.answers import as_finite, log_p_of_draws, score_batch
from calibrate.model.batches import length_batches, n_tokens, resume_pass
from calibrate.model.parameters import HeadId, Parameters, RuleFamily
from calibrate.model.questions import question_of, shares_of
from calibrate.model.runner import Loaded, Runner, bounded_memory, convert_out_of_memory, parts
from calibrate.model.scoring import ResultCache, score_fits
from calibrate.parallel import SILENT, Progress
from calibrate.storage.npz import pack_arrays, parse_arrays
from calibrate.store.fit import Fit
from calibrate.transformers.answer_logits import answer_logits
from calibrate.transformers.betas import HeadBetas, HeadRules

BatchMeasure = Callable[[slice, PreTrainedModel], Tensor]  # of some examples of a batch


@dataclass(frozen=True, eq=False)
class TransformersScorer:
    """A `ModelScorer` of a model of Transformers, by its log p of answers; results are cached."""

    runner: Runner
    heads: list[HeadId]  # of the model
    examples: ExampleSet
    cache: ResultCache
    progress: Progress = SILENT  # advances after each batch, by its tokens

    def score(self, rules: Sequence[Fit], indices: Sequence[int]) -> list[Scores]:
        """The scores of some examples under each rule."""
        fits = {str(i): fit for i, fit in enumerate(rules)}
        scores = score_fits(self.runner, self.examples, indices, fits, self.cache, self.progress)
        return list(scores.values())

    def gradient(
        self, parameters: Parameters, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers."""

        def make() -> np.ndarray:
            of_answers = weights * self._shares(parameters, indices)
            batches = [
                (batch, partial(_weighted_log_p, batch, of_answers[places]))
                for places, batch in length_batches(self.examples, indices)
            ]
            return np.array(np.add.reduce(self._derivatives(parameters, batches)))

        return self._cached("gradient", parameters, indices, weights, make)

    def fisher_scores(self, parameters: Parameters, indices: Sequence[int]) -> np.ndarray:
        """Derivatives of log p of tokens that are drawn from the predictions of windows of text."""

        def make() -> np.ndarray:
            windows = [([self.examples.examples[i]], i) for i in indices]
            batches = [(window, partial(_log_p_of_draws, window, seed)) for window, seed in windows]
            return np.array(self._derivatives(parameters, batches))

        scores = self._cached("drawn", parameters, indices, np.empty(0), make)
        return np.array(scores / np.sqrt(self.examples.n_answer(indices).sum()))

    def _shares(self, parameters: Parameters, indices: Sequence[int]) -> np.ndarray:
        """(len(indices),) the share of each answer in the probability of its question, under rules.

        1 where a question has one answer: only the others are passed.
        """
        question = question_of(self.examples, indices)
        several = np.flatnonzero(np.bincount(question)[question] > 1).tolist()
        log_p, shares = np.empty(len(several)), np.ones(len(indices))
        batches = list(length_batches(self.examples, [indices[i] for i in several]))
        tasks = [partial(_log_p, parameters, batch) for _, batch in batches]
        results = self.runner.run(tasks) if tasks else []
        for (places, _), of_batch in zip(batches, results, strict=True):
            log_p[places] = of_batch
        number = np.unique(question[several], return_inverse=True)[1]
        shares[several] = shares_of(log_p, number)
        return shares

    def _cached(
        self,
        what: str,
        parameters: Parameters,
        indices: Sequence[int],
        weights: np.ndarray,
        make: Callable[[], np.ndarray],
    ) -> np.ndarray:
        """An array that was made before, or is made and kept."""
        arrays = [x.tobytes() for x in (parameters.numbers, np.array(indices), weights)]
        key = b"\0".join([what.encode(), repr(parameters.family).encode(), *arrays])
        if cached := self.cache.find(key, parse_arrays):
            resume_pass(self.progress, self.examples, indices)
            return cached[what]
        array = make()
        self.cache.keep(key, pack_arrays({what: array}))
        return array

    def _derivatives(
        self, parameters: Parameters, batches: Sequence[tuple[list[Example], BatchMeasure]]
    ) -> list[np.ndarray]:
        """The derivatives of the measure of each batch by the numbers, (rows, columns)."""

        def advance(i: int, _: np.ndarray) -> None:
            self.progress.advance(n_tokens(batches[i][0]))

        return self.runner.run([partial(_derivative, parameters, *x) for x in batches], advance)


def _derivative(
    parameters: Parameters, batch: list[Example], measure: BatchMeasure, loaded: Loaded
) -> np.ndarray:
    """The gradient of a measure of a batch by the numbers, (rows, columns)."""
    gradients = []
    for part in parts(loaded, batch):
        with bounded_memory(batch[part], loaded):
            gradient = derivative(loaded, parameters, partial(measure, part, loaded.model))
            assert gradient is not None
            gradients.append(gradient)
    return np.array(np.add.reduce(gradients))


def derivative(
    loaded: Loaded, parameters: Parameters, measure: Callable[[], Tensor]
) -> np.ndarray | None:
    """The gradient of a measure of the model by the numbers; None if it has none."""
    numbers = torch.from_numpy(parameters.numbers).to(loaded.model.device).requires_grad_()
    with given_rules(loaded.heads, parameters.family, numbers):
        measured, gradient = measure(), None
        if measured.requires_grad:
            (gradient,) = torch.autograd.grad(measured, numbers, allow_unused=True)
    return None if gradient is None else as_finite(gradient)


def _weighted_log_p(
    batch: list[Example], weights: np.ndarray, part: slice, model: PreTrainedModel
) -> Tensor:
    log_p, _ = score_batch(model, batch[part])
    return (torch.from_numpy(weights[part]).to(model.device) * log_p).sum()


def _log_p(parameters: Parameters, batch: list[Example], loaded: Loaded) -> np.ndarray:
    """(examples,) nats of the answers of a batch, under rules."""
    numbers = torch.from_numpy(parameters.numbers).to(loaded.model.device)
    in_force = given_rules(loaded.heads, parameters.family, numbers)
    with torch.no_grad(), convert_out_of_memory(batch), in_force:
        return score_batch(loaded.model, batch)[1].log_p


def _log_p_of_draws(batch: list[Example], seed: int, _: slice, model: PreTrainedModel) -> Tensor:
    return log_p_of_draws(answer_logits(model, batch)[0], seed)


@contextmanager
def given_rules(heads: HeadBetas, family: RuleFamily, numbers: Tensor) -> Iterator[None]:
    """Gives the heads of a model the rules of numbers, which gradients flow to, in a block."""
    columns, basis = family.sharing.columns(heads.heads), family.basis
    coefficients = torch.stack([x[columns] for x in basis.coefficients(list(numbers))])
    is_baseline = not bool(numbers.detach().any())
    heads.rules = HeadRules(basis.rule, coefficients, basis.domain, is_baseline)
    try:
        yield
    finally:
        heads.rules = None
