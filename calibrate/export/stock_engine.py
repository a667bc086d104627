"""A check that an engine applies the attention scale that a stock model's configuration states.

f of `engine_check` is the model in float32 by Transformers. Alternatives are the scales that have
names for its configuration (see `attention_scales`), and a probe, one factor of 1.25 for all
layers; the noise v is at least 0.004 nats, what bfloat16 rounds. Where neither f nor an alternative
with a name runs, or that cannot be told and e is off from f by more than 3 v, what engines get
wrong for any configuration comes next. If that does not run either, scales are estimated: with
g(x), log p under parameters x, and g(0) = f, by Gauss-Newton steps

    x <- x + (J'J)^-1 J' (e - g(x)),

from the best x of a coarse grid, as g is flat far from the optimum. J, the Jacobian of g, is by one
finite difference for each parameter, then by Broyden's updates; a step that is no gain is not
taken. Errors are from prompt to prompt, with residuals u of k prompts:
(J'J)^-1 (sum over prompts of J'u u'J) (J'J)^-1 k / (k - 1), or the next step if that is more.

- The engine applies an estimated scale if that leaves at most half of what e is off from f, and a
  parameter is off from 0 by more than three of its errors, widened by Student's t. A scale with
  more parameters, or by position, must leave at most half of what one factor leaves.
- If none is applied, it differs in something else than a scale, or still cannot be told.
- It cannot be told either if there are names, and none of them can be told from f.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrate.errors import CalibrateError
from calibrate.export.attention_scales import (
    PROBE_FACTOR,
    Scale,
    ScaleFamily,
    ignored_keys,
    named_scales,
    scale_families,
    usual_scales,
)
from calibrate.export.engine_check import (
    ERRORS,
    NOISES,
    OTHER,
    UNKNOWN,
    EngineCheck,
    Listing,
    Question,
    few_groups,
    judged,
)
from calibrate.prompts.prompts_file import read_prompts
from calibrate.transformers.betas import HeadBetas, head_betas
from calibrate.transformers.folders import ModelFolder

AS_STATED = "as the configuration states"
PROBE = f"one factor of {PROBE_FACTOR:g}"
MIN_NOISE = 0.004  # nats: bfloat16
TEMPLATES = ("numbers",)
LENGTHS = (80, 128, 192, 320, 512)
N_SINGLE = 8
N_POSITIONS = 4
_STEPS = 8
_HALF = 1 / 2

Rows = list[np.ndarray]  # log p of the listed tokens of each prompt


class ScaleEstimate(NamedTuple):
    """A scale with estimated parameters."""

    name: str
    values: dict[str, tuple[float, float]]  # by parameter, with standard errors
    significant: bool
    rows: Rows


class StockCheck(NamedTuple):
    """The scale that an engine applies to a stock model."""

    check: EngineCheck
    alternatives: tuple[str, ...]  # the scales with names
    alike: tuple[str, ...]  # those that differ from what applies by no more than three noises
    estimates: dict[str, dict[str, tuple[float, float]]]  # values and errors, by scale
    longest: int  # tokens


def _ones(layer: int, n: np.ndarray) -> float:
    """The scale of the model as stated."""
    return 1.0


class Predictions:
    """log p of listed tokens under a scale of a model in memory, one forward pass a prompt."""

    def __init__(self, model: Any, heads: HeadBetas, listings: Sequence[Listing]):
        self.model, self.heads, self.listings = model, heads, listings
        self.measured: Rows = [np.array(x.measured()) for x in listings]

    def under(self, scale: Scale) -> Rows:
        """The rows of all prompts."""
        rows = list[np.ndarray]()
        layers = [layer for layer, _ in self.heads.heads]
        for listing in self.listings:
            n = np.arange(1, listing.n_queries + 1)
            factors = np.stack([np.broadcast_to(scale(layer, n), n.shape) for layer in layers])
            self.heads.query_factors = torch.from_numpy(factors).float()[None]
            rows.append(np.array(listing.predicted(self.model)))
        return rows

    def under_usual_faults(self) -> dict[str, Rows]:
        """The rows under what engines get wrong for any configuration, by name."""
        rows = {name: self.under(scale) for name, scale in usual_scales(self.heads).items()}
        for name, change in ignored_keys(self.model, self.heads).items():
            with change:
                rows[name] = self.under(_ones)
        return rows

    def have_effect(self, scale: Scale) -> bool:
        """False if all factors are 1: no pass is needed."""
        n = np.arange(1, max(x.n_queries for x in self.listings) + 1)
        return any(np.any(scale(layer, n) != 1) for layer, _ in self.heads.heads)

    def answers(self, *predicted: Rows) -> list[tuple[int, np.ndarray]]:
        """The rows for `judged`."""
        columns = zip(self.listings, self.measured, *predicted, strict=True)
        return [(len(x.ids), np.stack(rows)) for x, *rows in columns]


def check_stock_engine(path: Path, question: Question) -> StockCheck:
    """Asks an engine that should serve the model of a folder, and compares the two."""
    if path.suffix == ".gguf":
        raise CalibrateError(
            f"{path} is a .gguf file, of which Transformers does not read all scales; give "
            "model= the folder that it was made of",
            parameter="model",
        )
    if question.prompts:
        read_prompts(question.prompts)  # before a model is read
    folder = ModelFolder(path)
    model = folder.load("float32")
    with torch.no_grad(), head_betas(model) as heads:  # refuses models before a server is asked
        url, listings = question.ask(folder)
        named = named_scales(model.config, heads)
        predictions = Predictions(model, heads, listings)
        return compared(url, predictions, named, scale_families(model.config))


def compared(
    url: str, predictions: Predictions, scales: dict[str, Scale], families: list[ScaleFamily]
) -> StockCheck:
    """The check by predictions under scales with names, and under estimated ones if need be."""
    stated = predictions.under(_ones)
    rows = {AS_STATED: stated}
    for name, scale in scales.items():
        rows[name] = predictions.under(scale) if predictions.have_effect(scale) else stated
    rows[PROBE] = predictions.under(lambda layer, n: PROBE_FACTOR)
    named, check = tuple(scales), _judged(url, predictions, rows, [*scales, PROBE])
    unsure = check.applies == UNKNOWN and check.off[AS_STATED] > NOISES * check.noise
    if check.applies in (OTHER, PROBE) or unsure:
        usual = predictions.under_usual_faults()
        of_usual = _judged(url, predictions, rows | usual, [*scales, PROBE, *usual])
        left = of_usual.off[of_usual.applies] if of_usual.applies in usual else np.inf
        if left > NOISES * check.noise:
            return _by_estimates(predictions, rows, named, families, check)
        rows, named, check = rows | usual, (*named, *usual), of_usual
    if check.applies == AS_STATED and named and set(named) <= set(check.untold):
        check = check._replace(applies=UNKNOWN)
    applied = rows.get(check.applies, stated)
    alike = tuple(
        name
        for name in named
        if name != check.applies
        and _rms_of_prompts(predictions, applied, rows[name]) <= NOISES * check.noise
    )
    return StockCheck(check, named, alike, {}, _longest(predictions))


def _by_estimates(
    predictions: Predictions,
    rows: dict[str, Rows],
    named: tuple[str, ...],
    families: list[ScaleFamily],
    check: EngineCheck,
) -> StockCheck:
    """The check of an engine that no scale with a name explains."""
    estimates = _estimated(predictions, rows[AS_STATED], families, check)
    rows = rows | {x.name: x.rows for x in estimates}
    estimated = _judged(check.engine, predictions, rows, [*named, PROBE])
    neither = UNKNOWN if check.applies == UNKNOWN else OTHER
    best = _best(estimated, estimates) or neither
    values = {x.name: x.values for x in estimates}
    return StockCheck(estimated._replace(applies=best), named, (), values, _longest(predictions))


def _longest(predictions: Predictions) -> int:
    return max(len(x.ids) for x in predictions.listings)


def _judged(
    url: str, predictions: Predictions, rows: dict[str, Rows], alternatives: list[str]
) -> EngineCheck:
    return judged(url, predictions.answers(*rows.values()), list(rows), alternatives, MIN_NOISE)


def _estimated(
    predictions: Predictions, stated: Rows, families: list[ScaleFamily], check: EngineCheck
) -> list[ScaleEstimate]:
    """One factor, and the other scales unless that one leaves no more than noise."""
    estimates = list[ScaleEstimate]()
    for family in families:
        estimates.append(estimate(predictions, stated, family))
        left = _rms_of_prompts(predictions, predictions.measured, estimates[0].rows)
        if left <= NOISES * check.noise:
            break
    return estimates


def _rms_of_prompts(predictions: Predictions, some: Rows, others: Rows) -> float:
    """The root mean square difference of two predictions after prompts of several tokens."""
    off = [x - y for x, y in zip(some, others, strict=True)]
    of_longer = [x for x, y in zip(off, predictions.listings, strict=True) if len(y.ids) > 1]
    return float(np.sqrt(np.mean(np.concatenate(of_longer) ** 2)))


def _best(check: EngineCheck, estimates: list[ScaleEstimate]) -> str | None:
    """The estimated scale that explains the engine, if one does."""
    off, best = check.off, estimates[0]
    for other in estimates[1:]:
        if off[other.name] <= min(_HALF * off[estimates[0].name], off[best.name]):
            best = other
    explained = off[best.name] <= _HALF * off[AS_STATED]
    return best.name if explained and best.significant else None


def estimate(predictions: Predictions, stated: Rows, family: ScaleFamily) -> ScaleEstimate:
    """The least squares of a family of scales."""
    longer = [i for i, x in enumerate(predictions.listings) if len(x.ids) > 1]
    measured = np.concatenate([predictions.measured[i] for i in longer])

    def flat(rows: Rows) -> np.ndarray:
        return np.concatenate([rows[i] for i in longer])

    def squares(rows: Rows) -> float:
        return float(np.sum((measured - flat(rows)) ** 2))

    def predict(x: np.ndarray) -> Rows:
        return predictions.under(family.scale(x))

    starts = [np.array(start) for start in family.starts]
    known = [(np.zeros(len(family.parameters)), stated), *((x, predict(x)) for x in starts)]
    x, rows = min(known, key=lambda start: squares(start[1]))
    moved_by = [flat(predict(x + family.step * unit)) - flat(rows) for unit in np.eye(len(x))]
    jacobian = np.stack(moved_by, 1) / family.step
    for _ in range(_STEPS):
        step = np.linalg.lstsq(jacobian, measured - flat(rows), rcond=None)[0]
        step = np.clip(step, -family.limit, family.limit)
        if np.abs(step).max() < family.step / 1000:
            break
        moved = predict(x + step)
        missed = flat(moved) - flat(rows) - jacobian @ step
        jacobian = jacobian + np.outer(missed, step) / (step @ step)
        if squares(moved) < squares(rows):
            x, rows = x + step, moved
    ends = np.cumsum([len(stated[i]) for i in longer])[:-1]
    errors = np.maximum(_errors(jacobian, measured - flat(rows), ends), np.abs(step))
    return _estimate(family, x, errors, few_groups(len(longer)), rows)


def _errors(jacobian: np.ndarray, residuals: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """(parameters,) the standard errors from prompt to prompt, which end before `ends`."""
    inverse = np.linalg.pinv(jacobian.T @ jacobian)
    parts = zip(np.split(jacobian, ends), np.split(residuals, ends), strict=True)
    pulls = np.array([J.T @ u for J, u in parts])
    k = len(pulls)
    if k < 2:
        return np.full(jacobian.shape[1], np.inf)
    covariance = inverse @ (pulls.T @ pulls) @ inverse * k / (k - 1)
    errors: np.ndarray = np.sqrt(np.diag(covariance))
    return errors


def _estimate(
    family: ScaleFamily, x: np.ndarray, errors: np.ndarray, widened: float, rows: Rows
) -> ScaleEstimate:
    values = {
        name: (family.value(at), family.slope(at) * float(error))
        for name, at, error in zip(family.parameters, map(float, x), errors, strict=True)
    }
    significant = bool(np.any(np.abs(x) > ERRORS * widened * errors))
    return ScaleEstimate(family.name, values, significant, rows)
