"""Derivatives of log p of right answers by rules on the heads of a frozen model.

Batches are shared among whatever runs the model; results are cached, see `cache.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.datasets.examples import Example, ExampleSet, Scores
from calibrate.model.answers import as_finite, log_p_of_draws, score_batch
from calibrate.model.batches import Report, length_batches, n_tokens, report_passed
from calibrate.model.cache import ResultCache
from calibrate.model.memory import bounded_memory, convert_out_of_memory, parts
from calibrate.model.parameters import Form, Head
from calibrate.model.questions import question_of, shares_of
from calibrate.model.runner import Loaded, Runner
from calibrate.model.scoring import score_fits
from calibrate.storage.npz import pack_arrays, parse_arrays
from calibrate.store.coefficients import Coefficients
from calibrate.transformers.answer_logits import answer_logits
from calibrate.transformers.betas import HeadBetas, HeadRules

Value = Callable[[slice, PreTrainedModel], Tensor]  # of some examples of a batch
Batch = tuple[list[Example], Value]  # and what is differentiated


@dataclass(frozen=True, eq=False)
class ModelScorer:
    """Scores of a model under rules with given numbers, their gradients and Fisher scores."""

    runner: Runner
    heads: list[Head]  # of the model
    examples: ExampleSet
    memo: ResultCache  # of results
    report: Report = lambda tokens, resumed: None  # called after each batch

    def score_fits(
        self, fits: Mapping[str, Coefficients], indices: Sequence[int]
    ) -> dict[str, Scores]:
        """Scores of some examples under fits; see the function of that name."""
        return score_fits(self.runner, self.examples, indices, fits, self.memo, self.report)

    def gradient(
        self, form: Form, numbers: np.ndarray, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers.

        Log p of a question with several right answers is that of any of them; all have its weight.
        """

        def todo() -> list[Batch]:
            shares = weights * self._shares(form, numbers, indices)
            batches = length_batches(self.examples, indices)
            return [(x, partial(_weighted_log_p, x, shares[places])) for places, x in batches]

        return self._derivatives(todo, np.add.reduce, "gradient", form, numbers, indices, weights)

    def _shares(self, form: Form, numbers: np.ndarray, indices: Sequence[int]) -> np.ndarray:
        """(len(indices),) the share of each answer in the probability of its question, under rules.

        1 where a question has one answer: only the others are passed.
        """
        question = question_of(self.examples, indices)
        several = np.flatnonzero(np.bincount(question)[question] > 1).tolist()
        log_p, shares = np.empty(len(several)), np.ones(len(indices))
        batches = list(length_batches(self.examples, [indices[i] for i in several]))
        tasks = [partial(_log_p, form, numbers, batch) for _, batch in batches]
        results = self.runner.run(tasks) if tasks else []
        for (places, _), of_batch in zip(batches, results, strict=True):
            log_p[places] = of_batch
        number = np.unique(question[several], return_inverse=True)[1]
        shares[several] = shares_of(log_p, number)
        return shares

    def fisher_scores(self, form: Form, numbers: np.ndarray, indices: Sequence[int]) -> np.ndarray:
        """Derivatives of log p of tokens that are drawn from the predictions of windows of text.

        (windows, rows, columns), over the root of the number of tokens: their squares add up to the
        Fisher information, the second derivatives of the KL of text, nats a token.
        """
        windows = [([self.examples.examples[i]], i) for i in indices]

        def todo() -> list[Batch]:
            return [(x, partial(_log_p_of_draws, x, seed)) for x, seed in windows]

        scores = self._derivatives(todo, np.array, "drawn", form, numbers, indices)
        return np.array(scores / np.sqrt(self.examples.n_answer(indices).sum()))

    def _derivatives(
        self, todo: Callable[[], list[Batch]], joined: Callable[[Any], Any], what: str,
        form: Form, numbers: np.ndarray, indices: Sequence[int], *others: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """The derivatives of a value of each batch by the numbers, joined."""
        arrays = [x.tobytes() for x in (numbers, np.array(indices), *others)]
        key = b"\0".join([what.encode(), repr(form).encode(), *arrays])
        if cached := self.memo.find(key, parse_arrays):
            report_passed(self.examples, indices, self.report)
            return cached[what]
        batches = todo()
        tasks = [partial(_derivative, form, numbers, *batch) for batch in batches]
        done = self.runner.run(tasks, lambda i, _: self.report(n_tokens(batches[i][0]), False))
        derivatives: np.ndarray = joined(done)
        self.memo.keep(key, pack_arrays({what: derivatives}))
        return derivatives


def _derivative(
    form: Form, numbers: np.ndarray, batch: list[Example], value: Value, loaded: Loaded
) -> np.ndarray:
    """The gradient of a value of a batch by the numbers."""
    gradients = []
    for part in parts(loaded, batch):
        with bounded_memory(batch[part], loaded):
            of_part = partial(value, part, loaded.model)
            gradient = derivative(loaded, form, numbers, of_part)
            assert gradient is not None
            gradients.append(gradient)
    return np.array(np.add.reduce(gradients))


def derivative(
    loaded: Loaded, form: Form, numbers: np.ndarray, value: Callable[[], Tensor]
) -> np.ndarray | None:
    """The gradient of a value of the model by the numbers; None if it has none."""
    given = torch.from_numpy(numbers).to(loaded.model.device).requires_grad_()
    with given_rules(loaded.heads, form, given):
        result, gradient = value(), None
        if result.requires_grad:
            (gradient,) = torch.autograd.grad(result, given, allow_unused=True)
    return None if gradient is None else as_finite(gradient)


def _weighted_log_p(
    batch: list[Example], weights: np.ndarray, part: slice, model: PreTrainedModel
) -> Tensor:
    log_p, _ = score_batch(model, batch[part])
    return (torch.from_numpy(weights[part]).to(model.device) * log_p).sum()


def _log_p(form: Form, numbers: np.ndarray, batch: list[Example], loaded: Loaded) -> np.ndarray:
    """(examples,) nats of the answers of a batch, under rules of these numbers."""
    given = torch.from_numpy(numbers).to(loaded.model.device)
    with torch.no_grad(), convert_out_of_memory(batch), given_rules(loaded.heads, form, given):
        return score_batch(loaded.model, batch)[1].log_p


def _log_p_of_draws(batch: list[Example], seed: int, _: slice, model: PreTrainedModel) -> Tensor:
    return log_p_of_draws(answer_logits(model, batch)[0], seed)


@contextmanager
def given_rules(heads: HeadBetas, form: Form, numbers: Tensor) -> Iterator[None]:
    """Gives the heads of a model the rules of numbers, which gradients flow to, in a block."""
    columns = form.columns(heads.heads)
    coefficients = torch.stack([x[columns] for x in form.coefficients(list(numbers))])
    heads.rules = HeadRules(form.rule, coefficients, form.domain)
    try:
        yield
    finally:
        heads.rules = None
