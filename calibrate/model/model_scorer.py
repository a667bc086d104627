"""Passes through a frozen model: log p of right answers, and its gradient by rules on its heads.

A pass is shared by batches among whatever runs the model; results are cached, see `cache.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.datasets.examples import Example, ExampleSet, Scores, parse_scores
from calibrate.errors import CalibrateError
from calibrate.model.answers import (
    answer,
    answer_logits,
    as_finite,
    checked,
    log_p_of_draws,
    n_tokens,
)
from calibrate.model.cache import NO_CACHE, ResultCache
from calibrate.model.parameters import Head, Parameters, RuleFamily
from calibrate.model.questions import question_of, shares_of
from calibrate.model.runner import Loaded, Runner
from calibrate.storage.npz import pack_arrays, parse_arrays
from calibrate.store.coefficient_file import digest
from calibrate.store.coefficients import Coefficients
from calibrate.transformers.attention import temporary_attention
from calibrate.transformers.betas import HeadBetas, HeadRules, checkpointed
from calibrate.transformers.parts import applied
from calibrate.transformers.verification import verify

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
TOKENS_AT_ONCE = 1024  # of a batch; an example alone may be longer
# What a layer keeps for the backward pass, in numbers for each token and channel (measured on a
# Llama). On a CPU as many examples go together as keep no more than this in all layers. Where that
# is none, and on a GPU, a batch that would keep more keeps each layer's input, and computes again.
_KEPT = 20
MAX_KEPT_BYTES = 1 << 29
RuleContext = Callable[[Loaded], AbstractContextManager[None]]
BatchValue = Callable[[slice, PreTrainedModel], Tensor]  # of some examples of a batch
Batch = tuple[list[Example], BatchValue]  # and what is differentiated
Report = Callable[[int, bool], None]  # tokens of a batch, and whether it was passed before


def length_batches(
    examples: ExampleSet, indices: Iterable[int]
) -> Iterator[tuple[list[int], list[Example]]]:
    """Some examples in batches of equal length, without padding, with their places in `indices`.

    A window of text is a batch of its own. Order is kept within a length.
    """
    alike: dict[tuple[int, bool], list[tuple[int, Example]]] = {}
    for place, example in enumerate(examples.examples[i] for i in indices):
        key = len(example.tokens), examples.cells[example.cell].text
        alike.setdefault(key, []).append((place, example))
    for (length, is_text), members in alike.items():
        size = 1 if is_text else max(1, TOKENS_AT_ONCE // length)
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            yield [place for place, _ in batch], [example for _, example in batch]


def batch_tokens(examples: ExampleSet, indices: Iterable[int]) -> list[int]:
    """The tokens of each of the batches of some examples."""
    return [n_tokens(batch) for _, batch in length_batches(examples, indices)]


def report_passed(
    examples: ExampleSet, indices: Iterable[int], report: Report, resumed: bool = True
) -> None:
    """Reports the batches of some examples, which may have been passed before."""
    for tokens in batch_tokens(examples, indices):
        report(tokens, resumed)


def score(
    runner: Runner,
    examples: ExampleSet,
    indices: Sequence[int],
    report: Report = lambda tokens, resumed: None,
) -> Scores:
    """The scores of some examples under the baseline; `report` is called after each batch."""
    scores = list[Scores]()
    unit = [None], indices
    score_units(runner, examples, [unit], lambda *done: scores.append(done[-1]), report)
    return scores[0]


def score_units(
    runner: Runner,
    examples: ExampleSet,
    units: Sequence[tuple[Sequence[RuleContext | None], Sequence[int]]],
    done: Callable[[int, int, Scores], None],
    report: Report = lambda tokens, resumed: None,
) -> None:
    """Scores units of work, examples under each of some rules; `done` is called with each's scores.

    Text is passed once under the baseline for as many rules as a task has room for.
    """
    of_units = [
        [Scores.of_plain(np.empty(len(x)), np.empty(len(x), np.int32)) for _ in contexts]
        for contexts, x in units
    ]
    todo = [
        (i, rules, places, batch, is_text)
        for i, (contexts, indices) in enumerate(units)
        for places, batch in length_batches(examples, indices)
        for is_text in [examples.cells[batch[0].cell].text]
        for rules in _together(range(len(contexts)), n_tokens(batch), is_text)
    ]
    left = Counter((i, rule) for i, rules, *_ in todo for rule in rules)

    def store(number: int, of_batch: list[Scores]) -> None:
        i, rules, places, batch, _ = todo[number]
        for rule, scores in zip(rules, of_batch, strict=True):
            for column, values in zip(of_units[i][rule], scores, strict=True):
                column[places] = values
            left[i, rule] -= 1
            if not left[i, rule]:
                done(i, rule, of_units[i][rule])
        for _ in rules:
            report(n_tokens(batch), False)

    tasks = [
        partial(_score_batch, batch, is_text, [units[i][0][rule] for rule in rules])
        for i, rules, _, batch, is_text in todo
    ]
    runner.run(tasks, store)


def _together(rules: range, tokens: int, is_text: bool) -> list[range]:
    """The rules of each task: of text, beside the baseline, as many as two whole batches take."""
    size = max(1, 2 * TOKENS_AT_ONCE // tokens - 1) if is_text else 1
    return [rules[first : first + size] for first in range(0, len(rules), size)]


def _score_batch(
    batch: list[Example], is_text: bool, contexts: Sequence[RuleContext | None], loaded: Loaded
) -> list[Scores]:
    scores = []
    with torch.no_grad(), convert_out_of_memory(batch):
        plain = answer_logits(loaded.model, batch) if is_text and any(contexts) else None
        for context in contexts:
            with context(loaded) if context else nullcontext():
                scores.append(checked(answer(loaded.model, batch, plain), batch))
    return scores


@contextmanager
def convert_out_of_memory(
    examples: Sequence[Example], backward: PreTrainedModel | None = None
) -> Iterator[None]:
    """Raises CalibrateError where PyTorch runs out of memory on a batch.

    If gradients are taken of `backward`, its layers keep no more than a bounded memory.
    """
    try:
        with ExitStack() as stack:
            if backward is not None and not _n_kept(backward, examples):
                stack.enter_context(checkpointed(backward))
            yield
    except (MemoryError, RuntimeError) as failure:  # PyTorch has a class of its own on GPUs only
        words = str(failure).lower()
        if not isinstance(failure, MemoryError) and not any(w in words for w in _NO_MEMORY):
            raise
        raise CalibrateError(
            f"out of memory at {len(examples)} x {len(examples[0].tokens):,} tokens; give shorter "
            "--lengths, or --dtype bfloat16"
        ) from failure


def parts(model: PreTrainedModel, examples: Sequence[Example]) -> list[slice]:
    """A batch in parts that may be kept for the backward pass; whole where there are none."""
    on_cpu = model.device.type == "cpu"
    size = (on_cpu and _n_kept(model, examples[:1])) or len(examples)
    return [slice(first, first + size) for first in range(0, len(examples), size)]


def _n_kept(model: PreTrainedModel, examples: Sequence[Example]) -> int:
    """The number of times that these examples' memory for the backward pass fits into the limit."""
    config = model.config.get_text_config()
    size = config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return MAX_KEPT_BYTES // int(_KEPT * n_tokens(examples) * size)


@dataclass(frozen=True, eq=False)
class TransformersScorer:
    """A `ModelScorer` of a model of Transformers, by its log p of answers; results are cached."""

    runner: Runner
    heads: list[Head]  # of the model
    examples: ExampleSet
    memo: ResultCache  # of results
    report: Report = lambda tokens, resumed: None  # called after each batch

    def score(self, rules: Sequence[Coefficients], indices: Sequence[int]) -> list[Scores]:
        """The scores of some examples under each rule."""
        fits = {str(i): fit for i, fit in enumerate(rules)}
        scores = score_fits(self.runner, self.examples, indices, fits, self.memo, self.report)
        return list(scores.values())

    def gradient(
        self, parameters: Parameters, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers."""

        def make() -> np.ndarray:
            shares = weights * self._shares(parameters, indices)
            batches = [
                (batch, partial(_weighted_log_p, batch, shares[places]))
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
        if cached := self.memo.find(key, parse_arrays):
            report_passed(self.examples, indices, self.report)
            return cached[what]
        array = make()
        self.memo.keep(key, pack_arrays({what: array}))
        return array

    def _derivatives(self, parameters: Parameters, batches: Sequence[Batch]) -> list[np.ndarray]:
        """The derivatives of the value of each batch by the numbers, (rows, columns)."""

        def report(i: int, _: np.ndarray) -> None:
            self.report(n_tokens(batches[i][0]), False)

        return self.runner.run([partial(_derivative, parameters, *x) for x in batches], report)


def _derivative(
    parameters: Parameters, batch: list[Example], value: BatchValue, loaded: Loaded
) -> np.ndarray:
    """The gradient of a value of a batch by the numbers."""
    gradients = []
    for part in parts(loaded.model, batch):
        with convert_out_of_memory(batch[part], loaded.model):
            of_part = partial(value, part, loaded.model)
            gradient = derivative(loaded, parameters, of_part)
            assert gradient is not None
            gradients.append(gradient)
    return np.array(np.add.reduce(gradients))


def derivative(
    loaded: Loaded, parameters: Parameters, value: Callable[[], Tensor]
) -> np.ndarray | None:
    """The gradient of a value of the model by the numbers; None if it has none."""
    numbers = torch.from_numpy(parameters.numbers).to(loaded.model.device).requires_grad_()
    with given_rules(loaded.heads, parameters.family, numbers):
        result, gradient = value(), None
        if result.requires_grad:
            (gradient,) = torch.autograd.grad(result, numbers, allow_unused=True)
    return None if gradient is None else as_finite(gradient)


def _weighted_log_p(
    batch: list[Example], weights: np.ndarray, part: slice, model: PreTrainedModel
) -> Tensor:
    answers = answer(model, batch[part])
    checked(answers, batch[part])
    return (torch.from_numpy(weights[part]).to(model.device) * answers.log_p).sum()


def _log_p(parameters: Parameters, batch: list[Example], loaded: Loaded) -> np.ndarray:
    """(examples,) nats of the answers of a batch, under rules."""
    numbers = torch.from_numpy(parameters.numbers).to(loaded.model.device)
    rules = given_rules(loaded.heads, parameters.family, numbers)
    with torch.no_grad(), convert_out_of_memory(batch), rules:
        return checked(answer(loaded.model, batch), batch).log_p


def _log_p_of_draws(batch: list[Example], seed: int, _: slice, model: PreTrainedModel) -> Tensor:
    return log_p_of_draws(answer_logits(model, batch)[0], seed)


@contextmanager
def given_rules(heads: HeadBetas, family: RuleFamily, numbers: Tensor) -> Iterator[None]:
    """Gives the heads of a model the rules of numbers, which gradients flow to, in a block."""
    columns, basis = family.sharing.columns(heads.heads), family.basis
    coefficients = torch.stack([x[columns] for x in basis.coefficients(list(numbers))])
    heads.rules = HeadRules(basis.rule, coefficients, basis.domain)
    try:
        yield
    finally:
        heads.rules = None


def score_fits(
    runner: Runner,
    examples: ExampleSet,
    indices: Sequence[int],
    fits: Mapping[str, Coefficients],
    memo: ResultCache = NO_CACHE,
    report: Report = lambda tokens, resumed: None,
) -> dict[str, Scores]:
    """The scores of some examples under each fit, as `calibrate.transformers.register` applies it.

    All fits are verified before the first is scored. Each unit of work is cached when it is done;
    the model is loaded only if something is not cached.

    Raises:
      CalibrateError: a log p is not finite, memory runs out, or scores cannot be written.
      CoefficientsError: a fit names layers or heads that the model lacks, or the model does not
        look attention up.
    """
    units = examples.units(indices)
    digests = {label: digest(replace(fit, source={})) for label, fit in fits.items()}
    scores_of, absent = dict[tuple[str, int], Scores](), [list[str]() for _ in units]
    for i, unit in enumerate(units):
        parse = partial(parse_scores, examples.n_answer(unit))
        for label in fits:
            if scores := memo.find(_key(digests[label], unit), parse):
                scores_of[label, i] = scores
                report_passed(examples, unit, report)
            else:
                absent[i].append(label)

    def keep(i: int, rule: int, scores: Scores) -> None:
        label = absent[i][rule]
        memo.keep(_key(digests[label], units[i]), scores.pack())
        scores_of[label, i] = scores

    if any(absent):
        runner.run([partial(_verify, fit) for fit in fits.values()])
        contexts = {label: partial(under_fit, fit) for label, fit in fits.items()}
        of_units = [[contexts[label] for label in labels] for labels in absent]
        score_units(runner, examples, [*zip(of_units, units, strict=True)], keep, report)
    each = range(len(units))
    return {label: Scores.joined([scores_of[label, i] for i in each]) for label in fits}


def _key(of_fit: str, unit: Sequence[int]) -> bytes:
    return f"{of_fit} {','.join(map(str, unit))}".encode()


def _verify(fit: Coefficients, loaded: Loaded) -> None:
    with under_fit(fit, loaded):
        verify(loaded.model)


def under_fit(fit: Coefficients, loaded: Loaded) -> AbstractContextManager[None]:
    """Gives a model a fit, until the block ends."""
    return temporary_attention(loaded.model, "calibrate-score", applied(fit))
