"""Scores of examples under rules, in units of work whose results are cached.

The cache is a hidden folder of a collection that is not a part of it. An interrupted command needs
the same passes in the same order, and reads those made before.
"""

import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from calibrate.datasets.examples import (
    PASSES,
    UNIT_TOKENS,
    Example,
    ExampleCollection,
    ExampleSet,
    Scores,
    parse_scores,
)
from calibrate.datasets.resume import read_if_sound
from calibrate.model.answers import score_batch
from calibrate.model.batches import (
    TOKENS_AT_ONCE,
    TokenBatch,
    length_batches,
    n_tokens,
    resume_pass,
)
from calibrate.model.runner import MODEL_PACKAGES, Loaded, Runner, convert_out_of_memory
from calibrate.parallel import SILENT, Progress
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.coefficient_file import digest
from calibrate.store.fit import Fit
from calibrate.transformers.answer_logits import answer_logits
from calibrate.transformers.applying import applied_fit

_CACHE_VERSION = "4"  # changes where a pass computes something else: cached ones are made again
_MAX_BYTES = 1 << 28  # of one

Content = TypeVar("Content")


class ResultCache:
    """Results of passes, which depend on a context, in the folder of a collection or nowhere."""

    def __init__(self, folder: Path | None, *context: str):
        self._folder, self._context = folder and folder / PASSES, context

    def find(self, key: bytes, parse: Callable[[bytes, Path], Content]) -> Content | None:
        """A result, if a sound one is there."""
        return read_if_sound(self._path(key), _MAX_BYTES, parse) if self._folder else None

    def keep(self, key: bytes, data: bytes) -> None:
        """Keeps a result."""
        if self._folder:
            write_atomically(self._path(key), data)

    def _path(self, key: bytes) -> Path:
        name = hashlib.sha256(b"\0".join([*map(str.encode, self._context), key])).hexdigest()
        return (self._folder or Path()) / f"{name[:32]}.npz"


NO_CACHE = ResultCache(None)


def result_cache(collection: ExampleCollection, device: torch.device | str) -> ResultCache:
    """The cache of a collection, of these versions and this processor."""
    rounds = (
        _CACHE_VERSION,
        processor(torch.device(device)),
        *map(importlib.metadata.version, MODEL_PACKAGES),
    )
    return ResultCache(collection.folder, collection.digest, *rounds)


def processor(device: torch.device) -> str:
    """The processor, whose rounding results depend on; the number of threads matters as little."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


RuleContext = Callable[[Loaded], AbstractContextManager[None]]


def score(
    runner: Runner,
    examples: ExampleSet,
    indices: Sequence[int],
    progress: Progress = SILENT,
) -> Scores:
    """The scores of some examples under the baseline; `progress` advances after each batch."""
    scores = list[Scores]()
    unit = [None], indices
    score_units(runner, examples, [unit], lambda *done: scores.append(done[-1]), progress)
    return scores[0]


class _Pass(NamedTuple):
    """A batch of a unit of work, under some of the unit's rules."""

    unit: int
    rules: range  # their numbers
    batch: TokenBatch
    is_text: bool


def score_units(
    runner: Runner,
    examples: ExampleSet,
    units: Sequence[tuple[Sequence[RuleContext | None], Sequence[int]]],
    done: Callable[[int, int, Scores], None],
    progress: Progress = SILENT,
    max_tokens: int = TOKENS_AT_ONCE,
) -> None:
    """Scores units of work, examples under each of some rules; `done` is called with each's scores.

    Text is passed once under the baseline for as many rules as a task has room for: those that,
    beside the baseline, make up two batches of `max_tokens`. `progress` advances after each batch
    under each rule, by its tokens.
    """
    scores = [[Scores.empty(len(indices)) for _ in contexts] for contexts, indices in units]
    passes = list[_Pass]()
    for unit, (contexts, indices) in enumerate(units):
        for batch in length_batches(examples, indices, max_tokens):
            is_text = examples.is_text(batch.examples[0])
            n_at_once = max(1, 2 * max_tokens // n_tokens(batch.examples) - 1) if is_text else 1
            rules_at_once = _in_runs(range(len(contexts)), n_at_once)
            passes += [_Pass(unit, rules, batch, is_text) for rules in rules_at_once]
    left = Counter((x.unit, rule) for x in passes for rule in x.rules)

    def store(number: int, of_rules: list[Scores]) -> None:
        unit, rules, batch, _ = passes[number]
        for rule, of_batch in zip(rules, of_rules, strict=True):
            scores[unit][rule].put(batch.places, of_batch)
            left[unit, rule] -= 1
            if not left[unit, rule]:
                done(unit, rule, scores[unit][rule])
        for _ in rules:
            progress.advance(n_tokens(batch.examples))

    tasks = [
        partial(_score_under, x.batch.examples, x.is_text, [units[x.unit][0][i] for i in x.rules])
        for x in passes
    ]
    runner.run(tasks, store)


def _in_runs(rules: range, size: int) -> list[range]:
    """The rules in runs of at most so many."""
    return [rules[first : first + size] for first in range(0, len(rules), size)]


def _score_under(
    batch: list[Example], is_text: bool, contexts: Sequence[RuleContext | None], loaded: Loaded
) -> list[Scores]:
    """Scores of a batch in contexts, which give the model rules; None is the baseline."""
    scores = []
    with torch.no_grad(), convert_out_of_memory(batch):
        plain = answer_logits(loaded.model, batch) if is_text and any(contexts) else None
        for context in contexts:
            with context(loaded) if context else nullcontext():
                scores.append(score_batch(loaded.model, batch, plain)[1])
    return scores


def score_fits(
    runner: Runner,
    examples: ExampleSet,
    indices: Sequence[int],
    fits: Mapping[str, Fit],
    cache: ResultCache = NO_CACHE,
    progress: Progress = SILENT,
    unit_tokens: int = UNIT_TOKENS,
    max_tokens: int = TOKENS_AT_ONCE,
) -> dict[str, Scores]:
    """The scores of some examples under each fit, as `calibrate.transformers.apply` applies it.

    All fits are verified before the first is scored. Each unit of work is cached when it is done;
    the model is loaded only if something is not cached. `progress` is as in `score_units`.

    Raises:
      CalibrateError: a log p is not finite, memory runs out, or scores cannot be written.
      CoefficientsError: a fit names layers or heads that the model lacks, or the model does not
        look attention up.
    """
    units = examples.units(indices, unit_tokens)
    digests = {label: digest(replace(fit, source={})) for label, fit in fits.items()}
    scores_of = dict[tuple[str, int], Scores]()
    for i, unit in enumerate(units):
        parse = partial(parse_scores, examples.n_answer(unit))
        for label in fits:
            if scores := cache.find(_key(digests[label], unit), parse):
                scores_of[label, i] = scores
                resume_pass(progress, examples, unit)
    absent = [[label for label in fits if (label, i) not in scores_of] for i in range(len(units))]

    def keep(i: int, rule: int, scores: Scores) -> None:
        label = absent[i][rule]
        cache.keep(_key(digests[label], units[i]), scores.pack())
        scores_of[label, i] = scores

    if any(absent):
        runner.run([partial(_verify, fit) for fit in fits.values()])
        contexts = [[partial(under_fit, fits[label]) for label in labels] for labels in absent]
        of_units = [*zip(contexts, units, strict=True)]
        score_units(runner, examples, of_units, keep, progress, max_tokens)
    return {
        label: Scores.joined([scores_of[label, i] for i in range(len(units))]) for label in fits
    }


def _key(digest_of_fit: str, unit: Sequence[int]) -> bytes:
    return f"{digest_of_fit} {','.join(map(str, unit))}".encode()


def _verify(fit: Fit, loaded: Loaded) -> None:
    with under_fit(fit, loaded):
        pass


def under_fit(fit: Fit, loaded: Loaded) -> AbstractContextManager[None]:
    """Gives a model a fit, until the block ends."""
    return applied_fit(loaded.model, fit, loaded.heads.modules)
