"""Scores of examples under several fits: the model as users run it, with each fit registered."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from calibrate.files.atomic_io import write_atomically
from calibrate.files.coefficient_file import digest
from calibrate.files.coefficients import Coefficients
from calibrate.files.collection import read_if_sound
from calibrate.files.examples import UNIT_TOKENS, ExampleSet, Scores, most_bytes, parse_scores
from calibrate.model.answering import batch_tokens, check_vocabulary, score
from calibrate.transformers.attention import attention_function, temporary_attention
from calibrate.transformers.parts import applied
from calibrate.transformers.verification import verify

SCORES = ".scores"  # hidden, in a collection's folder: scores under fits, a file for each unit
_NAME = "calibrate-score"
Report = Callable[[int, bool], None]  # tokens of a batch, and whether it was scored before


class Kept(NamedTuple):
    """Where scores are kept: under a collection, whose digest is theirs."""

    folder: Path  # the collection's
    collection: str  # its digest

    def path(self, fit: Coefficients, unit: Sequence[int]) -> Path:
        """The file of some examples' scores under a fit, named by what determines them."""
        of_fit = digest(replace(fit, source={"collection": self.collection}))
        of_unit = hashlib.sha256(",".join(map(str, unit)).encode()).hexdigest()
        return self.folder / SCORES / of_fit.removeprefix("sha256:")[:32] / f"{of_unit[:32]}.npz"


def score_fits(
    model: Callable[[], PreTrainedModel],
    examples: ExampleSet,
    which: Sequence[int],
    fits: Mapping[str, Coefficients],
    kept: Kept | None = None,
    report: Report = lambda tokens, resumed: None,
) -> dict[str, Scores]:
    """The scores of some examples under each fit, as `calibrate.transformers.register` applies it.

    All fits are verified before the first is scored. Where scores are kept, each unit of work is
    written when it is done, and read when it is there.

    Args:
      model: gives the model; called once, and only if something is not kept.
      which: numbers of examples, each once.
      fits: by label.
      report: called after each batch.
    Returns:
      By label, Scores of (len(which),) entries.
    Raises:
      CalibrateError: a log p is not finite, memory runs out, or scores cannot be written.
      CoefficientsError: a fit names layers or heads that the model lacks, or the model does not
        look attention up.
    Warns:
      UserWarning: kept scores are damaged; they are made again.
    """

    @cache
    def verified() -> PreTrainedModel:
        loaded = model()
        check_vocabulary(examples, loaded.config.get_text_config().vocab_size)
        for fit in fits.values():
            with _given(loaded, fit):
                verify(loaded)
        return loaded

    units = units_of(examples, which)
    return {
        label: _joined([_score_unit(verified, examples, u, fit, kept, report) for u in units])
        for label, fit in fits.items()
    }


def units_of(examples: ExampleSet, which: Sequence[int]) -> list[list[int]]:
    """Some examples in units of work, in their order: of about as many tokens as a file's."""
    units: list[list[int]] = []
    room = 0
    for i in which:
        if room <= 0:
            units.append([])
            room = UNIT_TOKENS
        units[-1].append(i)
        room -= len(examples.examples[i].tokens)
    return units


def _given(model: PreTrainedModel, fit: Coefficients) -> AbstractContextManager[None]:
    """Gives a model a fit, until the block ends."""
    return temporary_attention(model, _NAME, attention_function(fit), applied(fit))


def _score_unit(
    model: Callable[[], PreTrainedModel], examples: ExampleSet, unit: Sequence[int],
    fit: Coefficients, kept: Kept | None, report: Report,
) -> Scores:  # fmt: skip
    parse = partial(parse_scores, examples.n_answer(unit))
    path = kept and kept.path(fit, unit)
    found = path and read_if_sound(path, most_bytes(len(unit)), parse)
    if found:
        for tokens in batch_tokens(examples.examples, unit):
            report(tokens, True)
        return found
    with _given(model(), fit):
        scores = score(model(), examples, unit, lambda tokens: report(tokens, False))
    if path:
        write_atomically(path, scores.pack())
    return scores


def _joined(parts: Sequence[Scores]) -> Scores:
    return Scores(*map(np.hstack, zip(*parts, strict=True)))
