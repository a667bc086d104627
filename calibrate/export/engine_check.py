"""A check of a server: which of several models it runs, by its log p of the next tokens.

The server is asked for log p after prompts of growing length. Let e be these numbers, f those of
the model as stated, and p those of an alternative, which the server might run instead. For an
export, f is under the fit, and the alternative is plain softmax. For a stock model, f is under its
configuration, and the alternatives are attention scales (`attention_scales.py`) and a probe, one
factor of 1.25 for all layers. The share of the way from the alternative to the stated model is

    s = sum (e - p)(f - p) / sum (f - p)^2,

1 if the server runs the stated model, 0 if the alternative. Its error comes from the spread among
prompts. At prompts of one token no scale of attention acts; the noise v of the server is the most
that e differs there from the nearest prediction, and for a stock model at least 0.004 nats, what
bfloat16 rounds. Let r be three errors of s, widened by Student's t, or 1/4 if that is more, and d
the difference of f and p.

- Cannot tell: d is at most v.
- Something else: e differs from f and from p by more than 5 v and a tenth of d (half, if no prompt
  has one token and v is not known); or by more than 3 v, and s from 1 and from 0 by more than r.
- The stated model, or the alternative: s is within r of 1, or of 0. Cannot tell: of both, or of
  neither.

Of several alternatives, those that cannot be told from f are left out, unless that is true of all.
The one nearest to e decides, if it is nearer than f. Otherwise the server runs something else if
that is so for one of them, and else the stated model. Differences are root mean squares, in nats.

For a stock model, a second round follows if nothing explains the server, with alternatives that
engines get wrong for any configuration. One of them must leave no more than 3 v. Otherwise the
server differs in something else than a scale, or still cannot be told. It cannot be told either if
all named scales are among those that cannot be told from f.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.evidence.estimate import t_quantile
from calibrate.export.attention_scales import ignored_keys, named_scales, usual_scales
from calibrate.export.configuration import require_original_folder
from calibrate.export.engine_predictions import (
    Answers,
    LogP,
    Predictions,
    PromptDesign,
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
_MAX_ERRORS = 3  # standard errors that count as no difference
_MIN_STOCK_NOISE = 0.004  # nats
_NEAR_SHARE = 1 / 4
_OFF_SHARE = 1 / 10
_OFF_SHARE_WITHOUT_NOISE = 1 / 2
_ROPE_SCALING = ".rope.scaling.type"  # end of a key of .gguf files

_EXPORT_DESIGN = PromptDesign(("numbers", "towns"), (128, 512, 1024), 4, 2)
_STOCK_DESIGN = PromptDesign(("numbers",), (80, 128, 192, 320, 512), 8, 4)


class EngineCheck(NamedTuple):
    """The model that a server runs, among the stated one and alternatives; see the module."""

    engine: str  # its address
    applies: str  # name of the stated model or an alternative, APPLIES_OTHER or CANNOT_TELL
    share: float
    error: float
    noise: float  # nats; 0 if it is not known
    effect: float  # nats: difference of the stated model and the alternative that decides
    off: dict[str, float]  # nats: difference of the server from each prediction
    off_from: int | None  # tokens of the shortest prompt at which it differs from the stated model
    prompts: list[tuple[int, dict[str, float]]]  # tokens of each prompt, and `off` at it
    untold: tuple[str, ...] = ()  # alternatives that cannot be told from the stated model
    named: tuple[str, ...] = ()  # scales of a stock model that have names

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt."""
        return self.prompts[-1][0]


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
    with ask_engine(folder, question, _EXPORT_DESIGN, folder.dtype()) as predictions:
        if not {*predictions.heads.heads} <= plan.factors.keys():
            raise CalibrateError(f"{model} has other heads than {exported.path}; give its original")
        betas = _betas_of_plan(plan, predictions)
        stated = betas[APPLIES_FIT] if model is None else 1.0
        log_p = {name: predictions.under_betas(beta / stated) for name, beta in betas.items()}
        return judge_engine(predictions.answers, log_p, [APPLIES_BASELINE])


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
    with ask_engine(ModelFolder(model), question, _STOCK_DESIGN, "float32") as predictions:
        return _compare_scales(predictions)


def _compare_scales(predictions: Predictions) -> EngineCheck:
    """Compares a server with named scales, then with usual faults."""
    config, heads, n = predictions.model.config, predictions.heads, predictions.n
    answers = predictions.answers
    stated = predictions.under_scale(np.ones(1))
    scales = named_scales(config, heads, n)
    named, log_p = list(scales), {AS_STATED: stated}
    for name, scale in scales.items():
        log_p[name] = predictions.under_scale(scale) if np.any(scale != 1) else stated
    log_p[_APPLIES_PROBE] = predictions.under_scale(np.full(1, _PROBE_FACTOR))
    check = judge_engine(answers, log_p, [*named, _APPLIES_PROBE], _MIN_STOCK_NOISE)
    if _is_unexplained(check):
        faults = _predict_usual_faults(predictions)
        log_p, named = log_p | faults, [*named, *faults]
        unsure = CANNOT_TELL if check.applies == CANNOT_TELL else APPLIES_OTHER
        check = judge_engine(answers, log_p, [*named, _APPLIES_PROBE], _MIN_STOCK_NOISE)
        if check.applies not in faults or check.off[check.applies] > _MAX_NOISES * check.noise:
            check = check._replace(applies=unsure)
    if check.applies == AS_STATED and named and {*named} <= {*check.untold}:
        check = check._replace(applies=CANNOT_TELL)
    return check._replace(named=tuple(named))


def _is_unexplained(check: EngineCheck) -> bool:
    """Returns True if neither the stated model nor a named scale explains a server."""
    is_unsure = check.applies == CANNOT_TELL and check.off[AS_STATED] > _MAX_NOISES * check.noise
    return check.applies in (APPLIES_OTHER, _APPLIES_PROBE) or is_unsure


def _predict_usual_faults(predictions: Predictions) -> dict[str, LogP]:
    """Returns log p under what engines get wrong for any configuration, by name."""
    scales = usual_scales(predictions.heads)
    log_p = {name: predictions.under_scale(scale) for name, scale in scales.items()}
    for name, context in ignored_keys(predictions.model, predictions.heads).items():
        with context:
            log_p[name] = predictions.under_scale(np.ones(1))
    return log_p


def judge_engine(
    answers: Answers,
    predicted: Mapping[str, LogP],
    alternatives: Sequence[str],
    min_noise: float = 0.0,
) -> EngineCheck:
    """Returns the check of a server by its answers.

    Args:
      answers: of the server; some prompts have more than one token.
      predicted: log p of models by name, the stated one first.
      alternatives: names of models that the server may run; others are only described.
      min_noise: nats; smallest noise of the server.
    """
    (_, lengths, measured), stated = answers, next(iter(predicted))
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    longer = [i for i in by_length if lengths[i] > 1]
    off_of_prompt = [
        {name: root_mean_square(e - log_p[i]) for name, log_p in predicted.items()}
        for i, e in enumerate(measured)
    ]
    single = [min(off_of_prompt[i].values()) for i in by_length if lengths[i] == 1]
    noise = max([min_noise, *single])
    off_share = _OFF_SHARE if single else _OFF_SHARE_WITHOUT_NOISE
    off = {
        name: root_mean_square(np.concatenate([measured[i] - log_p[i] for i in longer]))
        for name, log_p in predicted.items()
    }
    pairs = {
        name: _compare_pair(
            [np.stack([measured[i], predicted[stated][i], predicted[name][i]]) for i in longer],
            (stated, name),
            noise,
            off_share,
        )
        for name in sorted(alternatives, key=off.__getitem__)
    }
    pair = pairs[_deciding_alternative(pairs, off, stated)]
    max_off = max(_MAX_NOISES * noise, _OFF_SHARE * pair.effect)
    return EngineCheck(
        engine=answers.url,
        applies=pair.applies,
        share=pair.share,
        error=pair.error,
        noise=noise,
        effect=pair.effect,
        off=off,
        off_from=next((lengths[i] for i in longer if off_of_prompt[i][stated] > max_off), None),
        prompts=[(lengths[i], off_of_prompt[i]) for i in longer],
        untold=tuple(name for name, x in pairs.items() if x.applies == CANNOT_TELL),
    )


class _Pair(NamedTuple):
    """Comparison of a server with the stated model and one alternative."""

    applies: str  # one of the two names, APPLIES_OTHER or CANNOT_TELL
    share: float
    error: float
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
    prompts: Sequence[np.ndarray], names: tuple[str, str], noise: float, off_share: float
) -> _Pair:
    """Compares e with f and p.

    Args:
      prompts: (3, tokens) of each prompt: the rows e, f, p.
      names: of the models f and p.
      off_share: difference of e from both that counts, as a share of that of f and p.
    """
    e, f, p = np.hstack(prompts)
    effect = root_mean_square(f - p)
    products = np.array([[(e - p) @ (f - p), (f - p) @ (f - p)] for e, f, p in prompts])
    k, (pull, total) = len(prompts), products.sum(0)
    share = float(pull / total) if total else 0.0
    spread = k / max(k - 1, 1) * ((products @ (1, -share)) ** 2).sum()
    error = float(np.sqrt(spread) / total) if total and k > 1 else np.inf
    max_distance = max(_NEAR_SHARE, _MAX_ERRORS * error * _widen_error(k))
    near = [name for name, x in zip(names, (1, 0), strict=True) if abs(share - x) <= max_distance]
    nearest = min(root_mean_square(e - f), root_mean_square(e - p))
    applies = near[0] if len(near) == 1 else CANNOT_TELL
    if effect <= noise:
        applies = CANNOT_TELL
    elif nearest > max(_MANY_NOISES * noise, off_share * effect) or (
        nearest > _MAX_NOISES * noise and not near
    ):
        applies = APPLIES_OTHER
    return _Pair(applies, share, error, effect)


def _widen_error(n: int) -> float:
    """Returns the ratio of Student's t to the normal quantile, for the error of a mean of n."""
    return float(np.nan_to_num(t_quantile(n - 1) / t_quantile(np.inf), nan=1.0))
