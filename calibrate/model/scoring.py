"""Scores of examples under rules: log p of answers, and the KL of retention text.

The KL divergence of text is KL(baseline || rule) of the next token's distribution: 0 for the
baseline, and, unlike a difference of losses, without noise of mean zero.

Examples are scored in units of work, whose results are cached in a hidden folder of the collection.
An interrupted command that runs again needs the same passes in the same order, and reads those that
are cached.
"""

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError, DamagedError
from calibrate.model.runner import (
    MODEL_PACKAGES,
    Loaded,
    Runner,
    convert_out_of_memory,
)
from calibrate.parallel import SILENT, Progress
from calibrate.prompts.examples import (
    PASSES_FOLDER,
    UNIT_TOKENS,
    Example,
    ExampleCollection,
    ExampleSet,
    Scores,
    parse_scores,
)
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit, digest
from calibrate.transformers.applying import applied_fit
from calibrate.transformers.betas import answer_logits

TOKENS_AT_ONCE = 1024  # of a batch; a longer example is a batch of its own
_CACHE_VERSION = "4"  # increased when passes compute something else, so that caches are not read
# Rows of logits that are held in float32 at once. On a CPU, small blocks reuse the same memory, and
# take a third of the time.
_ROWS_ON_GPU = 256
_ROWS_ON_CPU = 16

CachedResult = TypeVar("CachedResult")

# Batches


class TokenBatch(NamedTuple):
    """Examples of equal length, which go through the model together without padding."""

    places: list[int]  # of the examples among the indices that were given
    examples: list[Example]


def length_batches(examples: ExampleSet, indices: Iterable[int]) -> Iterator[TokenBatch]:
    """Divides examples into batches of equal length, in their order for each length.

    A window of text is a batch of its own.
    """
    members: dict[tuple[int, bool], list[tuple[int, Example]]] = {}
    for place, example in enumerate(examples.examples[i] for i in indices):
        key = len(example.tokens), examples.is_text(example)
        members.setdefault(key, []).append((place, example))
    for (length, is_text), alike in members.items():
        size = 1 if is_text else max(1, TOKENS_AT_ONCE // length)
        for first in range(0, len(alike), size):
            places, batch = zip(*alike[first : first + size], strict=True)
            yield TokenBatch([*places], [*batch])


def begin_passes(
    progress: Progress, stage: str, examples: ExampleSet, passes: Iterable[Sequence[int]]
) -> None:
    """Begins a stage of progress with a step for each pass, by its tokens.

    Args:
      passes: the indices of the examples of each pass.
    """
    steps = [examples.n_tokens(indices) for indices in passes]
    progress.begin(stage, len(steps), sum(steps))


# Scores of a batch


def score_batch(
    model: PreTrainedModel, examples: Sequence[Example], baseline: Tensor | None = None
) -> tuple[Tensor, Scores]:
    """Scores examples of equal length by one forward pass.

    Args:
      baseline: (examples, tokens, vocabulary) logits of the baseline, for comparisons of text.
    Returns:
      (examples,) log p of the answers in nats, a tensor that gradients flow through; and the scores
      as arrays, with comparisons of 0 unless `baseline` is given.
    Raises:
      CalibrateError: a log p is not finite.
    """
    logits = answer_logits(model, examples)
    n_kept, device = logits.shape[1], logits.device
    target = torch.from_numpy(np.stack([x.tokens[-n_kept:] for x in examples])).long().to(device)
    start = torch.tensor([x.start - len(x.tokens) + n_kept for x in examples], device=device)
    is_answer = torch.arange(n_kept, device=device) >= start[:, None]
    # Flattened to rows: with the classes in another dimension, PyTorch would copy all logits.
    nll = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), target.flatten(), reduction="none"
    ).view_as(target)
    log_p = -torch.where(is_answer, nll, 0).sum(1, dtype=torch.float64)
    n_right = ((logits.argmax(-1) == target) & is_answer).sum(1)
    scores = Scores.baseline(_finite_log_p(log_p, examples), n_right.cpu().numpy().astype(np.int32))
    if baseline is not None:
        token_kl = kl_divergence(baseline.flatten(0, 1), logits.flatten(0, 1)).view_as(target)
        kl = torch.where(is_answer, token_kl, 0)
        scores.kl[:] = kl.sum(1).cpu().numpy()
    return log_p, scores


def _finite_log_p(log_p: Tensor, examples: Sequence[Example]) -> np.ndarray:
    """log p as an array; raises CalibrateError unless it is finite."""
    array: np.ndarray = log_p.detach().cpu().numpy()
    if not np.isfinite(array).all():
        raise CalibrateError(
            f"log p of an answer of {len(examples[0].tokens):,} tokens is {array.min()}: the "
            "model's logits are not finite; load it in float32, or restore its weights"
        )
    return np.asarray(np.minimum(array, 0.0))


def kl_divergence(baseline: Tensor, logits: Tensor) -> Tensor:
    """(rows,) KL(softmax(baseline) || softmax(logits)) in nats, of two (rows, classes)."""
    divergences = []
    size = _ROWS_ON_CPU if logits.device.type == "cpu" else _ROWS_ON_GPU
    for block in zip(baseline.split(size), logits.split(size), strict=True):
        log_p, log_q = (x.float().log_softmax(-1) for x in block)
        terms = torch.where(log_p == -torch.inf, 0, log_p.exp() * (log_p - log_q))
        divergences.append(terms.sum(-1, dtype=torch.float64))
    return torch.cat(divergences).clamp(min=0)  # rounding may give less than 0


# The cache of results


class ResultCache:
    """Results of passes in the folder of a collection; without a folder nothing is kept.

    Args:
      folder: of the collection.
      context: everything that results depend on, beside their key.
    """

    def __init__(self, folder: Path | None, *context: str):
        self._folder, self._context = folder and folder / PASSES_FOLDER, context

    def find(self, key: bytes, parse: Callable[[bytes, Path], CachedResult]) -> CachedResult | None:
        """A result; None if it is absent or damaged."""
        path = self._path(key)
        if not self._folder or not path.exists():
            return None
        try:
            return parse(path.read_bytes(), path)
        except DamagedError:
            return None

    def keep(self, key: bytes, data: bytes) -> None:
        """Writes a result."""
        if self._folder:
            write_atomically(self._path(key), data)

    def _path(self, key: bytes) -> Path:
        name = hashlib.sha256(b"\0".join([*map(str.encode, self._context), key])).hexdigest()
        return (self._folder or Path()) / f"{name[:32]}.npz"


NO_CACHE = ResultCache(None)


def result_cache(collection: ExampleCollection, device: torch.device | str) -> ResultCache:
    """The cache of a collection, for the present versions and processor.

    Results depend on how these round; on the number of threads no more than on anything else.
    """
    context = (
        _CACHE_VERSION,
        _processor_name(torch.device(device)),
        *map(importlib.metadata.version, MODEL_PACKAGES),
    )
    return ResultCache(collection.folder, collection.digest, *context)


def _processor_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


# Scores of examples


def score_unit(examples: ExampleSet, rules: Sequence[Fit | None], loaded: Loaded) -> list[Scores]:
    """The scores of a unit of examples under each rule; None is the baseline."""
    scores = [Scores.empty(len(examples.examples)) for _ in rules]
    for places, batch in length_batches(examples, range(len(examples.examples))):
        of_batch = _score_batch_under_rules(batch, examples.is_text(batch[0]), rules, loaded)
        for of_rule, of_examples in zip(scores, of_batch, strict=True):
            of_rule.put(places, of_examples)
    return scores


def score_fits(
    runner: Runner,
    examples: ExampleSet,
    indices: Sequence[int],
    fits: Mapping[str, Fit],
    cache: ResultCache = NO_CACHE,
    progress: Progress = SILENT,
    unit_tokens: int = UNIT_TOKENS,
) -> dict[str, Scores]:
    """The scores of some examples under each fit, as `calibrate.transformers.apply` applies it.

    All fits are verified before any is scored. Each unit of work is cached when it is done, and the
    model is only loaded if a result is not cached.

    Args:
      fits: by label.
      progress: advances after each unit under each fit, by its tokens.
      unit_tokens: of a unit, about.
    Raises:
      CalibrateError: a log p is not finite, memory runs out, or a result cannot be written.
      CoefficientsError: a fit names layers or heads that the model lacks, or some attention of the
        model is not looked up by name.
    """
    units = examples.units(indices, unit_tokens)
    digests = {label: digest(replace(fit, source={})) for label, fit in fits.items()}
    known = dict[tuple[str, int], Scores]()
    for i, unit in enumerate(units):
        for label in fits:
            if scores := cache.find(_cache_key(digests[label], unit), parse_scores):
                known[label, i] = scores
                progress.advance(examples.n_tokens(unit), resumed=True)
    absent = {i: [x for x in fits if (x, i) not in known] for i in range(len(units))}
    unfinished = [i for i, labels in absent.items() if labels]

    def keep(task: int, scores: list[Scores]) -> None:
        i = unfinished[task]
        for label, of_fit in zip(absent[i], scores, strict=True):
            cache.keep(_cache_key(digests[label], units[i]), of_fit.pack())
            known[label, i] = of_fit
        for _ in scores:
            progress.advance(examples.n_tokens(units[i]))

    if unfinished:
        runner.run([partial(_verify_fit, fit) for fit in fits.values()])
    tasks = [
        partial(score_unit, examples.only(units[i]), [fits[label] for label in absent[i]])
        for i in unfinished
    ]
    runner.run(tasks, keep)
    return {label: Scores.joined([known[label, i] for i in range(len(units))]) for label in fits}


def _score_batch_under_rules(
    batch: list[Example], is_text: bool, rules: Sequence[Fit | None], loaded: Loaded
) -> list[Scores]:
    """The scores of a batch under each rule."""
    scores = []
    with torch.no_grad(), convert_out_of_memory(batch):
        baseline = answer_logits(loaded.model, batch) if is_text and any(rules) else None
        for fit in rules:
            with apply_fit(fit, loaded) if fit else nullcontext():
                scores.append(score_batch(loaded.model, batch, baseline)[1])
    return scores


def _cache_key(fit_digest: str, unit: Sequence[int]) -> bytes:
    return f"{fit_digest} {','.join(map(str, unit))}".encode()


def _verify_fit(fit: Fit, loaded: Loaded) -> None:
    with apply_fit(fit, loaded):
        pass


def apply_fit(fit: Fit, loaded: Loaded) -> AbstractContextManager[None]:
    """Applies a fit to a model until the block ends."""
    return applied_fit(loaded.model, fit, loaded.heads.modules)
