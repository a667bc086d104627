"""A check of a server: which of several models it runs, by its log p of the next tokens.

The server is asked for log p after prompts of growing length. Let e be these numbers, f those of
the model as stated, and p those of an alternative, which the server might run instead. For an
export, f is under the fit, and the alternative is plain softmax. For a stock model, f is under its
configuration, and the alternatives are attention scales (`attention_scales.py`) and a probe, one
factor of 1.25 for all layers. The share of the way from the alternative to the stated model is

    s = sum (e - p)(f - p) / sum (f - p)^2,

1 if the server runs the stated model, 0 if the alternative. At prompts of one token no scale of
attention acts: the noise v of the server is the most that e differs there from the nearest
prediction, and at least 0.004 nats, what bfloat16 rounds. Let d be the difference of f and p.

- Cannot tell: d is at most v.
- Something else: e differs from f and from p by more than 5 v and a tenth of d (half, if no prompt
  has one token and v is not known); or by more than 3 v, and s from 1 and from 0 by more than 1/4.
- The stated model, or the alternative: s is within 1/4 of 1, or of 0. Cannot tell: of neither.

Of several alternatives, those that cannot be told from f are left out, unless that is true of all.
The one nearest to e decides, if it is nearer than f. Otherwise the server runs something else if
that is so for one of them, and else the stated model. Differences are root mean squares, in nats.

An alternative scale that explains a stock server leaves no more than 3 v; otherwise the server
differs in something else than a scale. It cannot be told if all scales that the configuration names
are among those that cannot be told from f.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.export.attention_scales import ignored_keys, named_scales, usual_scales
from calibrate.export.configuration import require_original_folder
from calibrate.export.engine_predictions import (
    LogP,
    Predictions,
    Question,
    ask_engine,
    root_mean_square,
)
from calibrate.export.plan import ExportContents, ExportPlan
from calibrate.transformers.folders import ModelFolder

# Names of what a server applies
APPLIES_FIT = "fit"
APPLIES_BASELINE = "plain"
LACKS_LOG_N = "constants"  # a log-size rule without its term of log n
AS_STATED = "as the configuration states"
_PROBE_FACTOR = 1.25
_APPLIES_PROBE = f"one factor of {_PROBE_FACTOR:g}"
APPLIES_OTHER = "something else"
CANNOT_TELL = "cannot tell"

_MAX_NOISES = 3  # multiples of the noise that a difference may have
_MANY_NOISES = 5
_MIN_NOISE = 0.004  # nats
_NEAR_SHARE = 1 / 4
_OFF_SHARE = 1 / 10
_OFF_SHARE_WITHOUT_NOISE = 1 / 2
_ROPE_SCALING = ".rope.scaling.type"  # end of a key of .gguf files


class EngineCheck(NamedTuple):
    """The model that a server runs, among the stated one and alternatives; see the module."""

    engine: str  # its address
    applies: str  # name of the stated model or an alternative, APPLIES_OTHER or CANNOT_TELL
    share: float
    noise: float  # nats
    effect: float  # nats: difference of the stated model and the alternative that decides
    off: dict[str, float]  # nats: difference of the server from each prediction
    lengths: tuple[int, ...]  # tokens of the prompts of more than one token
    untold: tuple[str, ...] = ()  # alternatives that cannot be told from the stated model
    named: tuple[str, ...] = ()  # alternatives by the configuration of a stock model


def check_exported_engine(
    exported: ExportContents, model: Path | None, question: Question
) -> EngineCheck:
    """Checks whether a server applies an exported fit.

    Args:
      exported: the export that it should serve.
      model: the original model, to be compared under the fit; None: the export itself, of which the
        fit is undone for the baseline.
    Raises:
      CalibrateError: Transformers does not run the model as llama.cpp does, or the server gives no
        usable answer.
    """
    if model is None and exported.model_type == "mistral3":  # .gguf; folders have ministral3
        raise CalibrateError(
            f"Transformers does not load {exported.path}; give model=, its original",
            parameter="model",
        )
    folder, plan = ModelFolder(model or exported.path), exported.plan
    assert plan is not None
    if model:
        require_original_folder(folder)
    _require_whole_gguf(folder)
    with ask_engine(folder, question, folder.dtype()) as predictions:
        if not {*predictions.heads.heads} <= plan.factors.keys():
            raise CalibrateError(f"{model} has other heads than {exported.path}; give its original")
        betas = _betas_of_plan(plan, predictions)
        stated = betas[APPLIES_FIT] if model is None else 1.0
        log_p = {name: predictions.under_betas(beta / stated) for name, beta in betas.items()}
        return _judge_predictions(predictions, log_p, [APPLIES_BASELINE])


def _require_whole_gguf(folder: ModelFolder) -> None:
    """Raises CalibrateError for a .gguf file with scaled positions, which Transformers ignores."""
    if not folder.is_gguf:
        return
    from calibrate.storage.gguf_header import read_gguf  # deferred: it needs the extra gguf

    path = folder.files[0]
    for name, key in read_gguf(path).keys.items():
        if name.endswith(_ROPE_SCALING) and key.value != b"none":
            raise CalibrateError(
                f"{path} has {name}, which Transformers does not read of such files; give the "
                "original's folder with model=",
                parameter="model",
            )


def _betas_of_plan(plan: ExportPlan, predictions: Predictions) -> dict[str, np.ndarray]:
    """Returns (heads, n) betas under the fit, the baseline, and the fit without its log n."""
    factors = np.array([[plan.factors[head]] for head in predictions.heads.heads])
    fit = factors * (1 + plan.ratio * np.log(predictions.n))
    betas = {APPLIES_FIT: fit, APPLIES_BASELINE: np.ones_like(fit)}
    return betas | ({LACKS_LOG_N: factors} if plan.ratio else {})


def check_stock_engine(model: Path, question: Question) -> EngineCheck:
    """Checks whether a server applies the attention scale that a model's configuration states.

    Args:
      model: folder of the model that it should serve.
    Raises:
      CalibrateError: the model is a .gguf file, or the server gives no usable answer.
    """
    if model.suffix == ".gguf":
        raise CalibrateError(
            f"{model} is a .gguf file, of which Transformers does not read all scales; give "
            "model= the folder that it was made of",
            parameter="model",
        )
    with ask_engine(ModelFolder(model), question, "float32") as predictions:
        return _compare_scales(predictions)


def _compare_scales(predictions: Predictions) -> EngineCheck:
    """Compares a server with scales that the configuration names, and with usual faults."""
    config, heads = predictions.model.config, predictions.heads
    scales = named_scales(config, heads, predictions.n)
    log_p = {AS_STATED: predictions.under_scale(np.ones(1))}
    log_p |= {name: predictions.under_scale(scale) for name, scale in scales.items()}
    faults = _predict_usual_faults(predictions)
    log_p |= faults | {_APPLIES_PROBE: predictions.under_scale(np.full(1, _PROBE_FACTOR))}
    check = _judge_predictions(predictions, log_p, [*scales, *faults, _APPLIES_PROBE])
    unexplained = check.applies in faults and check.off[check.applies] > _MAX_NOISES * check.noise
    if unexplained or check.applies == _APPLIES_PROBE:
        check = check._replace(applies=APPLIES_OTHER)
    by_configuration = set(scales) or {_APPLIES_PROBE}
    if check.applies == AS_STATED and by_configuration <= set(check.untold):
        check = check._replace(applies=CANNOT_TELL)
    return check._replace(named=tuple(scales))


def _predict_usual_faults(predictions: Predictions) -> dict[str, LogP]:
    """Returns log p under what engines get wrong for any configuration, by name."""
    scales = usual_scales(predictions.heads)
    log_p = {name: predictions.under_scale(scale) for name, scale in scales.items()}
    for name, context in ignored_keys(predictions.model, predictions.heads).items():
        with context:
            log_p[name] = predictions.under_scale(np.ones(1))
    return log_p


def _judge_predictions(
    predictions: Predictions, predicted: Mapping[str, LogP], alternatives: Sequence[str]
) -> EngineCheck:
    listings = predictions.listings
    lengths, measured = [len(x.ids) for x in listings], [x.measured() for x in listings]
    return judge_engine(predictions.url, lengths, measured, predicted, alternatives)


def judge_engine(
    url: str,
    lengths: Sequence[int],
    measured: LogP,
    predicted: Mapping[str, LogP],
    alternatives: Sequence[str],
) -> EngineCheck:
    """Returns the check of a server by its answers.

    Args:
      url: of the server.
      lengths: tokens of each prompt; some have more than one.
      measured: log p of the server.
      predicted: log p of models by name, the stated one first.
      alternatives: names of models that the server may run; others are only described.
    """
    stated, longer = next(iter(predicted)), [i for i, n in enumerate(lengths) if n > 1]
    single = [
        min(root_mean_square(measured[i] - log_p[i]) for log_p in predicted.values())
        for i, n in enumerate(lengths)
        if n == 1
    ]
    noise = max([_MIN_NOISE, *single])
    off_share = _OFF_SHARE if single else _OFF_SHARE_WITHOUT_NOISE
    e, joined = _join(measured, longer), {x: _join(predicted[x], longer) for x in predicted}
    off = {name: root_mean_square(e - log_p) for name, log_p in joined.items()}
    pairs = {
        name: _compare_pair(e, joined[stated], joined[name], (stated, name), noise, off_share)
        for name in sorted(alternatives, key=off.__getitem__)
    }
    pair = pairs[_deciding_alternative(pairs, off, stated)]
    return EngineCheck(
        engine=url,
        applies=pair.applies,
        share=pair.share,
        noise=noise,
        effect=pair.effect,
        off=off,
        lengths=tuple(sorted(lengths[i] for i in longer)),
        untold=tuple(name for name, x in pairs.items() if x.applies == CANNOT_TELL),
    )


def _join(log_p: LogP, prompts: Sequence[int]) -> np.ndarray:
    return np.concatenate([log_p[i] for i in prompts])


class _Pair(NamedTuple):
    """Comparison of a server with the stated model and one alternative."""

    applies: str  # one of the two names, APPLIES_OTHER or CANNOT_TELL
    share: float
    effect: float


def _deciding_alternative(pairs: Mapping[str, _Pair], off: Mapping[str, float], stated: str) -> str:
    """Returns the alternative that decides; they come in the order of their distance to e."""
    told = [name for name, pair in pairs.items() if pair.applies != CANNOT_TELL]
    if not told:
        return next(iter(pairs))
    if off[told[0]] >= off[stated]:
        for applies in (APPLIES_OTHER, stated):
            for name in told:
                if pairs[name].applies == applies:
                    return name
    return told[0]


def _compare_pair(
    e: np.ndarray,
    f: np.ndarray,
    p: np.ndarray,
    names: tuple[str, str],
    noise: float,
    off_share: float,
) -> _Pair:
    """Compares e with f and p.

    Args:
      names: of the models f and p.
      off_share: difference of e from both that counts, as a share of that of f and p.
    """
    effect, total = root_mean_square(f - p), float((f - p) @ (f - p))
    share = float((e - p) @ (f - p)) / total if total else 0.0
    nearest = min(root_mean_square(e - f), root_mean_square(e - p))
    if effect <= noise:
        applies = CANNOT_TELL
    elif nearest > max(_MANY_NOISES * noise, off_share * effect):
        applies = APPLIES_OTHER
    elif abs(share - 1) <= _NEAR_SHARE:
        applies = names[0]
    elif abs(share) <= _NEAR_SHARE:
        applies = names[1]
    else:
        applies = APPLIES_OTHER if nearest > _MAX_NOISES * noise else CANNOT_TELL
    return _Pair(applies, share, effect)
