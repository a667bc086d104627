"""Passes through a frozen model: log p of right answers, and its gradient by rules on its heads.

Results are kept under a collection, in a hidden folder that is not a part of it: an interrupted
command asks for the same passes in the same order, and those made before are read.
"""

import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

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
from calibrate.model.answers import answer, answer_logits, as_finite, checked, n_tokens
from calibrate.model.forms import Form
from calibrate.transformers.attention import temporary_attention
from calibrate.transformers.betas import HeadBetas, HeadRules, checkpointed
from calibrate.transformers.parts import Applied, applied
from calibrate.transformers.verification import verify

TOOLS = ("torch", "transformers")
_RECKONING = "2"  # another number where a pass computes something else: kept ones are made again
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
TOKENS_AT_ONCE = 1024  # of a batch; an example alone may be longer
# What a layer keeps for the backward pass, in numbers for each token and channel (measured on a
# Llama); a batch that would keep more than this in all layers keeps each layer's input alone.
_KEPT = 20
MOST_KEPT_BYTES = 1 << 29
_MOST_BYTES = 1 << 26  # of one

Content = TypeVar("Content")
Report = Callable[[int, bool], None]  # tokens of a batch, and whether it was passed before


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
    rounds = _RECKONING, processor(torch.device(device)), *map(version, TOOLS)
    return Memo(collection.folder, collection.digest, *rounds)


def processor(device: torch.device) -> str:
    """What rounds the results of passes: another processor has others; threads round as little."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def placed(examples: ExampleSet, which: Iterable[int]) -> Iterator[tuple[list[int], list[Example]]]:
    """Some examples in batches of equal length, without padding, with the place of each in `which`.

    A batch is of text or of answers. Order is kept within a length.
    """
    alike: dict[tuple[int, bool], list[tuple[int, Example]]] = {}
    for at, example in enumerate(examples.examples[i] for i in which):
        key = len(example.tokens), examples.cells[example.cell].text
        alike.setdefault(key, []).append((at, example))
    for (length, _), members in alike.items():
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


def score(
    model: PreTrainedModel,
    examples: ExampleSet,
    which: Sequence[int],
    report: Report = lambda tokens, resumed: None,
    under: Callable[[], AbstractContextManager[None]] | None = None,
) -> Scores:
    """The scores of some examples; `report` is called after each batch.

    Args:
      under: gives the model a rule until the block ends; None scores plain softmax.
    """
    n = len(which)
    found = Scores(np.empty(n), np.empty(n, np.int32), np.empty(n))
    for at, chosen in placed(examples, which):
        is_text = examples.cells[chosen[0].cell].text
        with torch.no_grad(), room_for(chosen):
            plain = answer_logits(model, chosen) if is_text and under else None
            with (under or nullcontext)():
                scores = checked(answer(model, chosen, plain), chosen)
        for column, values in zip(found, scores, strict=True):
            column[at] = values
        report(n_tokens(chosen), False)
    return found


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
            rules = partial(under_rules, self.heads, form, given)
            return score(self.model, self.examples, which, self.report, rules).pack()

        parse = partial(parse_scores, self.examples.n_answer(which))
        return self._get(("scores", form, numbers, which), make, parse)

    def score_fits(
        self, fits: Mapping[str, Coefficients], which: Sequence[int]
    ) -> dict[str, Scores]:
        """Scores of some examples under fits; see the function of that name."""
        return score_fits(lambda: self.model, self.examples, which, fits, self.memo, self.report)

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
            with room_for(chosen, self.model):
                plain = None
                if self.examples.cells[chosen[0].cell].text:
                    with torch.no_grad():
                        plain = answer_logits(self.model, chosen)
                with under_rules(self.heads, form, given):
                    answers = answer(self.model, chosen, plain)
                    checked(answers, chosen)
                    values = answers.log_p if plain is None else -answers.kl
                    (torch.from_numpy(weights[at]).to(values.device) * values).sum().backward()
            self.report(n_tokens(chosen), False)
        assert given.grad is not None
        return as_finite(given.grad)


@contextmanager
def under_rules(heads: HeadBetas, form: Form, numbers: Tensor) -> Iterator[None]:
    """Gives the heads of a model the rules of some numbers, until the block ends."""
    columns = form.columns(heads.heads)
    coefficients = torch.stack([x[columns] for x in form.coefficients(list(numbers))])
    heads.rules = HeadRules(form.rule, coefficients, form.domain)
    try:
        yield
    finally:
        heads.rules = None


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
            with under_fit(loaded, applied(fit)):
                verify(loaded)
        return loaded

    def scored(fit: Coefficients, unit: Sequence[int]) -> Scores:
        def make() -> bytes:
            given = partial(under_fit, verified(), applied(fit))
            return score(verified(), examples, unit, report, given).pack()

        key = f"{digest(replace(fit, source={}))} {','.join(map(str, unit))}".encode()
        resumed = partial(report_resumed, examples, unit, report)
        return memo.get(key, make, partial(parse_scores, examples.n_answer(unit)), resumed)

    units = examples.units(which)
    return {
        label: Scores.joined([scored(fit, unit) for unit in units]) for label, fit in fits.items()
    }


def under_fit(model: PreTrainedModel, fit: Applied) -> AbstractContextManager[None]:
    """Gives a model a fit, until the block ends."""
    return temporary_attention(model, "calibrate-score", fit)
