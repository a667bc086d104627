"""Attention scales that an engine may apply to a model instead of those of its config.json.

A scale is an array of factors of the queries, relative to the model as its configuration states it:
(heads, n) or a shape that broadcasts to it, for n = 1, 2, ... tokens so far. It has a name that
says what an engine does with a key of the configuration, or parameters to be estimated.

An ignored soft-cap or sliding window is no such factor: the model itself is changed for a while.
YaRN and LongRoPE multiply queries and keys by their attention factor a, and so logits by a^2. In a
model that rotates only a part of each head, a is no factor of the logits, and has no name here.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from calibrate.evidence.estimate import t_quantile
from calibrate.export.engine_predictions import LogP, Predictions, root_mean_square
from calibrate.transformers.betas import HeadBetas
from calibrate.transformers.verification import layer_number

PROBE_FACTOR = 1.25
_ROTARY_NAMES = {"yarn": "YaRN", "longrope": "LongRoPE"}
MAX_ERRORS = 3  # standard errors that count as no difference
_MIN_FACTOR = 0.01
_MAX_NEWTON_STEPS = 8
# Starting points of a search, beside factor 1 and slope 0.
_START_FACTORS = (1 / 8, 1 / 3, 3.0, 8.0)
_START_SLOPES = (-0.1, 0.3, 1.0)
# Keys that set the scale of the logits, instead of 1 / sqrt(head_dim).
_SCALING_KEYS = (
    "query_pre_attn_scalar",
    "attention_multiplier",
    "mscale_all_dim",
    "scale_attn_by_inverse_layer_idx",
)
_UNSCALED_KEY = "scale_attn_weights"  # of GPT-2; if false, logits are not scaled
_SOFT_CAP_KEY = "attn_logit_softcapping"
_WINDOW_KEY = "sliding_window"
_NO_WINDOW = 1 << 30


def named_scales(config: Any, heads: HeadBetas, n: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the scales by which an engine can misread a model's configuration, by name."""
    config = config.get_text_config()
    layers = [layer for layer, _ in heads.heads]
    return (
        _rotary_scales(config, layers)
        | _constant_scales(config, heads, layers)
        | _position_scales(config, n)
    )


def _rotary_parameters(config: PreTrainedConfig) -> dict[str | None, dict[str, Any]]:
    """Returns the parameters of rotary positions by layer type; None stands for all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {key: x for key, x in parameters.items() if isinstance(x, dict)}
    return {**nested} if nested else {None: parameters}


def _rotary_scales(config: PreTrainedConfig, layers: list[int]) -> dict[str, np.ndarray]:
    """Returns the scales of engines that misread the attention factor of YaRN or LongRoPE."""
    scales = dict[str, np.ndarray]()
    for layer_type, parameters in _rotary_parameters(config).items():
        kind = parameters.get("rope_type")
        is_partial = parameters.get("partial_rotary_factor", 1.0) != 1.0
        if kind not in _ROTARY_NAMES or is_partial or hasattr(config, "qk_rope_head_dim"):
            continue
        _, a = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        name = f"{_ROTARY_NAMES[kind]}'s attention factor"
        factors = {
            f"without {name}": a**-2,
            f"{name} applied twice": a**2,
            f"{name} on queries alone": 1 / a,
            f"{name} logged twice": ((0.1 * math.log(a) + 1) / a) ** 2,
        }
        if kind == "yarn":
            default = 0.1 * math.log(max(parameters["factor"], 1)) + 1
            factors[f"{name} as 0.1 log(factor) + 1"] = (default / a) ** 2
        in_type = [layer_type in (None, _layer_type(config, layer)) for layer in layers]
        for scale_name, factor in factors.items():
            if not math.isclose(factor, 1, rel_tol=1e-6):
                scales[scale_name] = np.where(in_type, factor, 1.0)[:, None]
    return scales


def _layer_type(config: PreTrainedConfig, layer: int) -> str | None:
    types = getattr(config, "layer_types", None) or ()
    return types[layer] if layer < len(types) else None


def _constant_scales(
    config: PreTrainedConfig, heads: HeadBetas, layers: list[int]
) -> dict[str, np.ndarray]:
    """Returns the scale 1 / sqrt(head_dim) instead of a constant that the configuration sets."""
    (rotary, *_) = _rotary_parameters(config).values()
    key = next((x for x in _SCALING_KEYS if getattr(config, x, None) or rotary.get(x)), None)
    if getattr(config, _UNSCALED_KEY, True) is False:
        key = _UNSCALED_KEY
    factors = {
        layer: width**-0.5 / scaling for layer, (width, scaling) in _layer_scaling(heads).items()
    }
    if key is None or all(math.isclose(x, 1, rel_tol=1e-6) for x in factors.values()):
        return {}
    return {f"{key} ignored, 1 / sqrt(head_dim)": _scale_of_layers(factors, layers)}


def _position_scales(config: PreTrainedConfig, n: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the scale without Llama 4's factor, which grows with the position of a query."""
    (rotary, *_) = _rotary_parameters(config).values()
    beta, start = rotary.get("llama_4_scaling_beta"), rotary.get("original_max_position_embeddings")
    if not (beta and start):
        return {}
    factors = 1 / (1 + beta * np.log1p(np.floor((n - 1) / start)))
    return {"llama_4_scaling_beta unread": factors[None]}


def usual_scales(heads: HeadBetas) -> dict[str, np.ndarray]:
    """Returns the scales that an engine can get wrong for any configuration, by name."""
    layers, scaling = [layer for layer, _ in heads.heads], _layer_scaling(heads)
    factors = {
        "1 / sqrt(head_dim) applied once more": {i: w**-0.5 for i, (w, _) in scaling.items()},
        "no attention scale": {i: 1 / scale for i, (_, scale) in scaling.items()},
    }
    return {
        name: _scale_of_layers(by_layer, layers)
        for name, by_layer in factors.items()
        if {*by_layer.values()} - {1.0}
    }


def _layer_scaling(heads: HeadBetas) -> dict[int, tuple[int, float]]:
    """Returns head_dim and the scale of the logits of each layer whose module names them."""
    scaling_of_layer = dict[int, tuple[int, float]]()
    for module in heads.columns:
        width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        scaling = getattr(module, "scaling", None)
        if isinstance(width, int) and isinstance(scaling, float) and scaling > 0:
            scaling_of_layer[layer_number(module)] = (width, scaling)
    return scaling_of_layer


def _scale_of_layers(factors: dict[int, float], layers: list[int]) -> np.ndarray:
    """Returns (heads, 1): the factor of each head's layer, 1 for layers that have none."""
    return np.array([factors.get(layer, 1.0) for layer in layers])[:, None]


def ignored_keys(model: Any, heads: HeadBetas) -> dict[str, AbstractContextManager[None]]:
    """Returns contexts in which a model ignores its soft-cap or sliding window, by name."""
    config, contexts = model.config.get_text_config(), dict[str, AbstractContextManager[None]]()
    if getattr(config, _SOFT_CAP_KEY, None):
        capped = [x for x in heads.columns if hasattr(x, _SOFT_CAP_KEY)]
        contexts[f"{_SOFT_CAP_KEY} ignored"] = _with_attribute(capped, _SOFT_CAP_KEY, None)
    if getattr(config, _WINDOW_KEY, None):
        windowed = [x for x in heads.columns if getattr(x, _WINDOW_KEY, None)]
        changed = _with_attribute([config, *windowed], _WINDOW_KEY, _NO_WINDOW)
        contexts[f"{_WINDOW_KEY} ignored"] = changed
    return contexts


@contextmanager
def _with_attribute(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of objects until the block ends."""
    before = [(x, getattr(x, name)) for x in objects]
    for x, _ in before:
        setattr(x, name, value)
    try:
        yield
    finally:
        for x, old in before:
            setattr(x, name, old)


@dataclass(frozen=True)
class ScaleFamily:
    """Scales with parameters x to be estimated; x = 0 is the model as stated.

    exp(design @ x), with design (heads, parameters)          if `is_log`
    1 + x design, at least 0.01, with design (1, n)           otherwise
    """

    name: str
    parameters: tuple[str, ...]
    design: np.ndarray
    is_log: bool
    starts: tuple[tuple[float, ...], ...]  # of a search, beside 0

    @property
    def step(self) -> float:
        """The step of a finite difference."""
        return math.log(PROBE_FACTOR) if self.is_log else 0.02

    @property
    def max_step(self) -> float:
        """The largest step of a search."""
        return 1.0 if self.is_log else 0.1

    def scale(self, x: np.ndarray) -> np.ndarray:
        """Returns the scale of parameters."""
        scale: np.ndarray
        if self.is_log:
            scale = np.exp(self.design @ x)[:, None]
        else:
            scale = np.maximum(1 + x[0] * self.design, _MIN_FACTOR)
        return scale

    def values(self, x: np.ndarray, errors: np.ndarray) -> dict[str, tuple[float, float]]:
        """Returns parameters as people read them, factors instead of logs, with their errors."""
        if self.is_log:
            x, errors = np.exp(x), np.exp(x) * errors
        pairs = zip(map(float, x), map(float, errors), strict=True)
        return dict(zip(self.parameters, pairs, strict=True))


def scale_families(config: Any, heads: HeadBetas, n: np.ndarray) -> list[ScaleFamily]:
    """Returns scales of one factor, of one slope by log n, and of a factor for each layer type."""
    config = config.get_text_config()
    layers = [layer for layer, _ in heads.heads]
    logs = [math.log(factor) for factor in _START_FACTORS]
    ones, starts = np.ones((len(layers), 1)), tuple((log,) for log in logs)
    slopes = tuple((r,) for r in _START_SLOPES)
    families = [
        ScaleFamily("one factor for all layers", ("factor",), ones, True, starts),
        ScaleFamily("a factor 1 + r log n", ("r",), np.log(n)[None], False, slopes),
    ]
    types = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if len(types) > 1:
        in_type = [[_layer_type(config, layer) == name for name in types] for layer in layers]
        corners = [x for x in np.ndindex(*[2] * len(types)) if any(x)]
        starts = tuple(tuple(log * i for i in x) for x in corners for log in (logs[1], logs[-2]))
        name = "a factor for each type of layers"
        families.append(ScaleFamily(name, types, np.array(in_type, float), True, starts))
    return families


class ScaleEstimate(NamedTuple):
    """A scale of a family, estimated by least squares."""

    name: str
    values: dict[str, tuple[float, float]]  # by parameter, with standard errors
    is_significant: bool
    log_p: LogP


def estimate_scale(predictions: Predictions, stated: LogP, family: ScaleFamily) -> ScaleEstimate:
    """Estimates the parameters of a family by least squares over prompts of several tokens.

    With g(x) the log p under parameters x, g(0) = f that of the model as stated, and e that of the
    server, the steps are those of Gauss and Newton,

        x <- x + (J'J)^-1 J' (e - g(x)),

    from the best of the family's starting points, since g is flat far from the optimum. The
    Jacobian J of g comes from one finite difference for each parameter, then from Broyden's
    updates. A step without a gain is not taken, and the next step is the least standard error.
    """
    answers, longer = predictions.answers, predictions.answers.longer_prompts
    measured, n_parameters = longer(answers.log_p), len(family.parameters)
    points = [(np.zeros(n_parameters), stated)]
    for start in map(np.array, family.starts):
        points.append((start, predictions.under_scale(family.scale(start))))
    x, log_p = min(points, key=lambda point: root_mean_square(measured - longer(point[1])))
    columns = [
        longer(predictions.under_scale(family.scale(x + family.step * unit))) - longer(log_p)
        for unit in np.eye(n_parameters)
    ]
    jacobian = np.stack(columns, 1) / family.step
    for _ in range(_MAX_NEWTON_STEPS):
        step = np.linalg.lstsq(jacobian, measured - longer(log_p), rcond=None)[0]
        step = np.clip(step, -family.max_step, family.max_step)
        if np.abs(step).max() < family.step / 1000:
            break
        moved = predictions.under_scale(family.scale(x + step))
        missed = longer(moved) - longer(log_p) - jacobian @ step
        jacobian = jacobian + np.outer(missed, step) / (step @ step)
        if root_mean_square(measured - longer(moved)) < root_mean_square(measured - longer(log_p)):
            x, log_p = x + step, moved
    ends = np.cumsum([len(e) for e, n in zip(stated, answers.lengths, strict=True) if n > 1])
    residuals = measured - longer(log_p)
    errors = np.maximum(_standard_errors(jacobian, residuals, ends[:-1]), np.abs(step))
    is_significant = bool(np.any(np.abs(x) > MAX_ERRORS * widen_error(len(ends)) * errors))
    return ScaleEstimate(family.name, family.values(x, errors), is_significant, log_p)


def _standard_errors(jacobian: np.ndarray, residuals: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the standard errors of the parameters, by the spread among prompts.

    They are roots of the diagonal of (J'J)^-1 (sum over k prompts of J'u u'J) (J'J)^-1 k / (k - 1),
    with residuals u.

    Args:
      jacobian: (tokens, parameters).
      residuals: (tokens,).
      ends: of all prompts but the last, among the tokens.
    """
    inverse = np.linalg.pinv(jacobian.T @ jacobian)
    prompts = zip(np.split(jacobian, ends), np.split(residuals, ends), strict=True)
    scores = np.array([J.T @ u for J, u in prompts])
    k = len(scores)
    if k < 2:
        return np.full(jacobian.shape[1], np.inf)
    covariance = inverse @ (scores.T @ scores) @ inverse * k / (k - 1)
    errors: np.ndarray = np.sqrt(np.diag(covariance))
    return errors


def widen_error(n: int) -> float:
    """Returns the ratio of Student's t to the normal quantile, for the error of a mean of n."""
    return float(np.nan_to_num(t_quantile(n - 1) / t_quantile(np.inf), nan=1.0))
