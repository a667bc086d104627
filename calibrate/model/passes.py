"""Passes through a frozen model: log p of right answers, and its gradient by rules on its heads.

Results are kept under a collection, in a hidden folder that is not a part of it: an interrupted
command asks for the same passes in the same order, and those made before are read.
"""

import hashlib
import inspect
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.files.atomic_io import write_atomically
from calibrate.files.coefficient_file import digest
from calibrate.files.coefficients import Coefficients
from calibrate.files.examples import (
    PASSES,
    Example,
    ExampleCollection,
    ExampleSet,
    Scores,
    parse_scores,
)
from calibrate.files.npz import pack_arrays, parse_arrays
from calibrate.files.resuming import read_if_sound
from calibrate.model.forms import Form
from calibrate.transformers.attention import temporary_attention
from calibrate.transformers.betas import HeadBetas, HeadRules, checkpointed
from calibrate.transformers.parts import applied
from calibrate.transformers.verification import verify

TOOLS = ("torch", "transformers")
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
TOKENS_AT_ONCE = 1024  # of a batch; an example alone may be longer
# What a layer keeps for the backward pass, in numbers for each token and channel (measured on a
# Llama); a batch that would keep more than this in all layers keeps each layer's input alone.
_KEPT = 20
MOST_KEPT_BYTES = 1 << 29
_MOST_BYTES = 1 << 26  # of one

Content = TypeVar("Content")
Report = Callable[[int, bool], None]  # tokens of a batch, and whether it was passed before


class Answers(NamedTuple):
    """Answers of a batch."""

    log_p: Tensor  # (examples,) nats: of the whole answer
    right: Tensor  # (examples,) int: tokens of the answer that have the highest logit


class Memo:
    """Results of passes, which depend on a context, under the folder of a collection or nowhere."""

    def __init__(self, folder: Path | None, *context: str):
        self._folder, self._context = folder and folder / PASSES, context

    def get(
        self, key: bytes, make: Callable[[], bytes], parse: Callable[[bytes, Path], Content],
        resumed: Callable[[], None] = lambda: None,
    ) -> Content:  # fmt: skip
        """A result, which is made unless a sound one is there: then it calls `resumed`."""
        name = hashlib.sha256(b"\0".join([*map(str.encode, self._context), key])).hexdigest()
        path = (self._folder or Path()) / f"{name[:32]}.npz"
        if self._folder and (found := read_if_sound(path, _MOST_BYTES, parse)):
            resumed()
            return found
        data = make()
        if self._folder:
            write_atomically(path, data)
        return parse(data, path)


NOWHERE = Memo(None)


def kept_passes(collection: ExampleCollection, device: torch.device | str) -> Memo:
    """Results that a collection keeps, of these versions and this processor."""
    rounds = processor(torch.device(device)), *map(version, TOOLS)
    return Memo(collection.folder, collection.digest, *rounds)


def processor(device: torch.device) -> str:
    """What rounds the results of passes: another processor has others; threads round as little."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def placed(examples: ExampleSet, which: Iterable[int]) -> Iterator[tuple[list[int], list[Example]]]:
    """Some examples in batches of equal length, without padding, with the place of each in `which`.

    Their order is kept within a length.
    """
    by_length: dict[int, list[tuple[int, Example]]] = {}
    for at, example in enumerate(examples.examples[i] for i in which):
        by_length.setdefault(len(example.tokens), []).append((at, example))
    for length, members in by_length.items():
        size = max(1, TOKENS_AT_ONCE // length)
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            yield [at for at, _ in batch], [example for _, example in batch]


def batch_tokens(examples: ExampleSet, which: Iterable[int]) -> list[int]:
    """The tokens of each of the batches of some examples."""
    return [n_tokens(batch) for _, batch in placed(examples, which)]


def report_resumed(examples: ExampleSet, which: Iterable[int], report: Report) -> None:
    """Reports the batches of some examples that were passed before."""
    for tokens in batch_tokens(examples, which):
        report(tokens, True)


def answer(model: PreTrainedModel, examples: Sequence[Example]) -> Answers:
    """One forward pass over examples of equal length.

    Only logits from the first answer on are computed, where the model can leave out the others.
    """
    tokens = torch.from_numpy(np.stack([example.tokens for example in examples])).long()
    largest, known = int(tokens.max()), model.config.get_text_config().vocab_size
    if largest >= known:
        raise CalibrateError(
            f"an example has token {largest}, and this model knows 0 to {known - 1}; give the "
            "model that the examples were made for"
        )
    tokens = tokens.to(model.device)
    start = torch.tensor([example.start for example in examples], device=model.device)
    n_kept, inputs = tokens.shape[1] - int(start.min()), tokens[:, :-1]
    fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
    output = model(
        input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=False,
        **({"logits_to_keep": n_kept} if fewer else {}),
    )  # fmt: skip
    logits, target = output.logits[:, -n_kept:].float(), tokens[:, -n_kept:]
    at = torch.arange(tokens.shape[1] - n_kept, tokens.shape[1], device=model.device)
    of_answer = at >= start[:, None]
    # By rows of logits: by columns, PyTorch would make a copy of them all.
    lost = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    ).view_as(target)
    log_p = -torch.where(of_answer, lost, 0).sum(1, dtype=torch.float64)
    return Answers(log_p, ((logits.argmax(-1) == target) & of_answer).sum(1))


def checked(answers: Answers, examples: Sequence[Example]) -> Scores:
    """The answers of a batch as arrays; raises CalibrateError unless each log p is finite."""
    log_p = answers.log_p.detach().cpu().numpy()
    if not np.isfinite(log_p).all():
        raise CalibrateError(
            f"log p of an answer of {len(examples[0].tokens):,} tokens is {log_p.min()}: the "
            "model's logits are not finite; load it with --dtype float32, or restore its weights"
        )
    return Scores(np.minimum(log_p, 0.0), answers.right.cpu().numpy().astype(np.int32))


def as_finite(gradient: Tensor) -> np.ndarray:
    """A gradient by betas as an array; raises CalibrateError unless it is finite."""
    found: np.ndarray = gradient.double().cpu().numpy()
    if not np.isfinite(found).all():
        raise CalibrateError(
            "a derivative by a head's beta is not finite; load the model with --dtype float32"
        )
    return found


def n_tokens(examples: Sequence[Example]) -> int:
    """The tokens of some examples."""
    return sum(len(example.tokens) for example in examples)


def score(
    model: PreTrainedModel,
    examples: ExampleSet,
    which: Sequence[int],
    report: Report = lambda tokens, resumed: None,
) -> Scores:
    """The scores of some examples; `report` is called after each batch."""
    log_p, right = np.empty(len(which)), np.empty(len(which), np.int32)
    for at, chosen in placed(examples, which):
        with torch.no_grad(), room_for(chosen):
            log_p[at], right[at] = checked(answer(model, chosen), chosen)
        report(n_tokens(chosen), False)
    return Scores(log_p, right)


@contextmanager
def room_for(
    examples: Sequence[Example], backward: PreTrainedModel | None = None
) -> Iterator[None]:
    """Raises CalibrateError where PyTorch runs out of memory on a batch.

    If gradients are taken of `backward`, its layers keep no more than a bounded memory.
    """
    try:
        with ExitStack() as stack:
            if backward is not None and _keeps_much(backward, examples):
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


def _keeps_much(model: PreTrainedModel, examples: Sequence[Example]) -> bool:
    config = model.config.get_text_config()
    size = config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return int(_KEPT * n_tokens(examples) * size) > MOST_KEPT_BYTES


@dataclass(frozen=True, eq=False)
class Passes:
    """What the model says under rules whose numbers are the caller's."""

    model: PreTrainedModel
    heads: HeadBetas  # of the model, inside `head_betas`
    examples: ExampleSet
    memo: Memo  # of results
    report: Report = lambda tokens, resumed: None  # called after each batch

    def scores(self, form: Form, numbers: np.ndarray, which: Sequence[int]) -> Scores:
        """Scores of some examples."""

        def make() -> bytes:
            given = torch.from_numpy(numbers).to(self.model.device)
            with torch.no_grad(), self._rules(form, given):
                return score(self.model, self.examples, which, self.report).pack()

        parse = partial(parse_scores, self.examples.n_answer(which))
        return self._get(("scores", form, numbers, which), make, parse)

    def gradient(
        self, form: Form, numbers: np.ndarray, which: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers."""

        def make() -> bytes:
            return pack_arrays({"gradient": self._gradient(form, numbers, which, weights)})

        key = "gradient", form, numbers, which, weights
        return self._get(key, make, parse_arrays)["gradient"]

    def _get(
        self, key: tuple[Any, ...], make: Callable[[], bytes],
        parse: Callable[[bytes, Path], Content],
    ) -> Content:  # fmt: skip
        what, form, numbers, which, *weights = key
        arrays = [x.tobytes() for x in (numbers, np.array(which), *weights)]
        parts = [what.encode(), repr(form).encode(), *arrays]
        resumed = partial(report_resumed, self.examples, which, self.report)
        return self.memo.get(b"\0".join(parts), make, parse, resumed)

    def _gradient(
        self, form: Form, numbers: np.ndarray, which: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        given = torch.from_numpy(numbers).to(self.model.device).requires_grad_()
        for at, chosen in placed(self.examples, which):
            with room_for(chosen, self.model), self._rules(form, given):
                answers = answer(self.model, chosen)
                checked(answers, chosen)
                weight = torch.from_numpy(weights[at]).to(answers.log_p.device)
                (weight * answers.log_p).sum().backward()
            self.report(n_tokens(chosen), False)
        assert given.grad is not None
        return as_finite(given.grad)

    @contextmanager
    def _rules(self, form: Form, numbers: Tensor) -> Iterator[None]:
        columns = form.columns(self.heads.heads)
        coefficients = torch.stack([x[columns] for x in form.coefficients(list(numbers))])
        self.heads.rules = HeadRules(form.rule, coefficients, form.domain)
        try:
            yield
        finally:
            self.heads.rules = None


def score_fits(
    model: Callable[[], PreTrainedModel],
    examples: ExampleSet,
    which: Sequence[int],
    fits: Mapping[str, Coefficients],
    memo: Memo = NOWHERE,
    report: Report = lambda tokens, resumed: None,
) -> dict[str, Scores]:
    """The scores of some examples under each fit, as `calibrate.transformers.register` applies it.

    All fits are verified before the first is scored. Each unit of work is kept when it is done.

    Args:
      model: gives the model; called once, and only if something is not kept.
    Raises:
      CalibrateError: a log p is not finite, memory runs out, or scores cannot be written.
      CoefficientsError: a fit names layers or heads that the model lacks, or the model does not
        look attention up.
    """

    @cache
    def verified() -> PreTrainedModel:
        loaded = model()
        for fit in fits.values():
            with _given(loaded, fit):
                verify(loaded)
        return loaded

    def scored(fit: Coefficients, unit: Sequence[int]) -> Scores:
        def make() -> bytes:
            with _given(verified(), fit):
                return score(verified(), examples, unit, report).pack()

        key = f"{digest(replace(fit, source={}))} {','.join(map(str, unit))}".encode()
        resumed = partial(report_resumed, examples, unit, report)
        return memo.get(key, make, partial(parse_scores, examples.n_answer(unit)), resumed)

    units = examples.units(which)
    return {
        label: Scores.joined([scored(fit, unit) for unit in units]) for label, fit in fits.items()
    }


def _given(model: PreTrainedModel, fit: Coefficients) -> AbstractContextManager[None]:
    """Gives a model a fit, until the block ends."""
    return temporary_attention(model, "calibrate-score", applied(fit))
