"""Scores of examples under several fits: the model as users run it, with each fit registered."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial

from transformers import PreTrainedModel

from calibrate.files.coefficient_file import digest
from calibrate.files.coefficients import Coefficients
from calibrate.files.examples import ExampleSet, Scores, parse_scores
from calibrate.model.passes import (
    NOWHERE,
    Memo,
    Report,
    check_vocabulary,
    report_resumed,
    score,
)
from calibrate.transformers.attention import temporary_attention
from calibrate.transformers.parts import applied
from calibrate.transformers.verification import verify

_NAME = "calibrate-score"


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
      which: numbers of examples, each once.
      fits: by label.
      memo: keeps the scores.
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

    def scored(fit: Coefficients) -> Scores:
        unit_scores = partial(_score_unit, verified, examples, fit, memo, report)
        return Scores.joined([unit_scores(unit) for unit in examples.units(which)])

    return {label: scored(fit) for label, fit in fits.items()}


def _given(model: PreTrainedModel, fit: Coefficients) -> AbstractContextManager[None]:
    """Gives a model a fit, until the block ends."""
    return temporary_attention(model, _NAME, applied(fit))


def _score_unit(
    model: Callable[[], PreTrainedModel], examples: ExampleSet, fit: Coefficients, memo: Memo,
    report: Report, unit: Sequence[int],
) -> Scores:  # fmt: skip
    def make() -> bytes:
        with _given(model(), fit):
            return score(model(), examples, unit, report).pack()

    key = f"{digest(replace(fit, source={}))} {','.join(map(str, unit))}".encode()
    scores, resumed = memo.get(key, make, partial(parse_scores, examples.n_answer(unit)))
    if resumed:
        report_resumed(examples, unit, report)
    return scores
