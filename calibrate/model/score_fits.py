"""Scores of examples under several fits: the model as users run it, with each fit registered."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial

from transformers import PreTrainedModel

from calibrate.files.coefficient_file import digest
from calibrate.files.coefficients import Coefficients
from calibrate.files.examples import ExampleSet, Scores, parse_scores
from calibrate.model.passes import NOWHERE, Memo, Report, report_resumed, score
from calibrate.transformers.attention import attention_function, temporary_attention
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
    return temporary_attention(model, _NAME, attention_function(fit), applied(fit))
