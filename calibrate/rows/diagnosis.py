"""Diagnosis of heads: mean commitment by n, its slope against log n, and susceptibility."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from calibrate.core.commitment import commitment, susceptibility
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.estimate import Estimate, estimate, index_groups
from calibrate.parallel import SILENT, Progress
from calibrate.rows.collection import RowCollection
from calibrate.rows.rows import (
    OPTIONAL_COLUMNS,
    Rows,
    head_label,
    known_index,
    target_logit,
)

VARIANCE_ERROR = 1e-10  # rounding error of the variance of log n, over its mean square


class Inputs(NamedTuple):
    """Measurements of inputs; every array is (inputs,)."""

    size: np.ndarray  # set size of the collection, which may stand for a range of n
    n: np.ndarray  # unmasked items
    commitment: np.ndarray  # nats
    susceptibility: np.ndarray  # nats
    misranked: np.ndarray  # bool
    layer: np.ndarray  # -1 if unknown
    head: np.ndarray
    weight: np.ndarray
    group: np.ndarray  # inputs of one group are dependent; -1 if unknown

    def take(self, chosen: np.ndarray) -> "Inputs":
        """Some of the inputs, by (inputs,) bool or positions."""
        return Inputs._make(column[chosen] for column in self)


class AtSize(NamedTuple):
    """Means over the inputs of a head of one set size."""

    size: int
    least_n: int  # unmasked items of an input
    most_n: int
    inputs: int
    commitment: Estimate  # nats
    susceptibility: float  # mean, nats
    misranked: float  # share


class HeadDiagnosis(NamedTuple):
    """Means and slope of one head."""

    name: str
    layer: int | None  # None if unknown
    head: int | None
    inputs: int
    slope: Estimate | None  # of commitment against log n; None if n is the same in all inputs
    misranked: float  # share
    sizes: list[AtSize]


class Diagnosis(NamedTuple):
    """The heads of a collection by increasing slope; heads without a slope are last."""

    collection: RowCollection
    heads: list[HeadDiagnosis]
    inputs: list[Inputs]  # of each head


def require_all_rows(collection: RowCollection) -> None:
    """Raises CalibrateError if a collection keeps misranked inputs only."""
    if collection.misranked_only:
        raise CalibrateError(
            f"{collection.folder} keeps misranked inputs only, and a diagnosis needs a sample of "
            "all inputs; collect into another folder and keep all"
        )


def diagnose(collection: RowCollection, progress: Progress = SILENT) -> Diagnosis:
    """Measures every head of a collection, one shard in memory at a time.

    Means and slopes are weighted by the weights of the inputs; inputs of weight 0 are left out.

    Args:
      collection: complete, of a sample of all inputs.
      progress: advances after each shard.
    Raises:
      CalibrateError: the collection keeps misranked inputs only, or is damaged.
      QualityError: it has no inputs of any weight, or too many bad ones.
    """
    require_all_rows(collection)
    readers = collection.readers()
    progress.begin(f"measuring the inputs of {collection.folder}", len(readers))
    parts = []
    for read in readers:
        parts.append(measure_inputs(*read()))
        progress.advance()
    if not any(len(part.n) for part in parts):
        raise QualityError(f"{collection.folder} has no inputs of any weight; collect more sets")
    unnamed = str(collection.configuration.get("head", "head"))
    heads = [
        (diagnose_head(inputs, unnamed), inputs)
        for inputs in _split_by_head(Inputs._make(map(np.concatenate, zip(*parts, strict=True))))
    ]
    heads.sort(key=lambda pair: np.inf if pair[0].slope is None else pair[0].slope.mean)
    return Diagnosis(collection, [head for head, _ in heads], [inputs for _, inputs in heads])


def measure_inputs(size: int, rows: Rows) -> Inputs:
    """Measures the inputs of a shard that have any weight."""
    logits = rows.logits
    inputs = Inputs(
        size=np.full(len(logits), size),
        n=np.count_nonzero(logits > -np.inf, axis=1),
        commitment=commitment(logits),
        susceptibility=susceptibility(logits),
        misranked=logits.max(axis=1) > target_logit(logits, rows.target),
        layer=_column(rows, "layer"),
        head=_column(rows, "head"),
        weight=_column(rows, "weight").astype(float),
        group=_column(rows, "group"),
    )
    return inputs.take(inputs.weight > 0)


def _column(rows: Rows, name: str) -> np.ndarray:
    """(rows,) an optional column, filled with its value for unknown if rows lack it."""
    column, known = getattr(rows, name), OPTIONAL_COLUMNS[name]
    return np.full(len(rows.target), known.absent, known.dtype) if column is None else column


def _split_by_head(inputs: Inputs) -> Iterator[Inputs]:
    """Divides inputs by head, in order of layer and head."""
    order = np.lexsort((inputs.head, inputs.layer))
    layer, head = inputs.layer[order], inputs.head[order]
    is_next = (layer[1:] != layer[:-1]) | (head[1:] != head[:-1])
    return map(inputs.take, np.split(order, np.flatnonzero(is_next) + 1))


def diagnose_head(inputs: Inputs, unnamed: str = "head") -> HeadDiagnosis:
    """Computes means and slope of one head; `unnamed` is its name if layer and head are unknown."""
    layer, head = known_index(inputs.layer[0]), known_index(inputs.head[0])
    return HeadDiagnosis(
        name=head_label(layer, head) or unnamed,
        layer=layer,
        head=head,
        inputs=len(inputs.n),
        slope=estimate_slope(np.log(inputs.n), inputs.commitment, inputs.weight, inputs.group),
        misranked=float(np.average(inputs.misranked, weights=inputs.weight)),
        sizes=[_at_size(inputs.take(inputs.size == size)) for size in np.unique(inputs.size)],
    )


def _at_size(inputs: Inputs) -> AtSize:
    return AtSize(
        size=int(inputs.size[0]),
        least_n=int(inputs.n.min()),
        most_n=int(inputs.n.max()),
        inputs=len(inputs.n),
        commitment=estimate(inputs.commitment, inputs.weight, inputs.group),
        susceptibility=float(np.average(inputs.susceptibility, weights=inputs.weight)),
        misranked=float(np.average(inputs.misranked, weights=inputs.weight)),
    )


def estimate_slope(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, group: np.ndarray
) -> Estimate | None:
    """Slope of y against x by weighted least squares, with its jackknife error over groups.

    The jackknife leaves out each of G groups: its variance is (G - 1) / G times the sum of squared
    deviations of the G slopes from their mean. The slope is None if all x are equal, and the error
    is NaN if they are equal when some group is left out.

    Args:
      x, y: (inputs,).
      weight: (inputs,) > 0.
      group: (inputs,) int, -1 for an input that is its own group.
    Reference: Efron and Stein 1981.
    """
    share, index = weight / weight.sum(dtype=float), index_groups(group)
    x, y = x - share @ x, y - share @ y
    terms = share * np.stack([np.ones_like(x), x, y, x * x, x * y])
    of_group = np.stack([np.bincount(index, term) for term in terms])
    total, n_groups = of_group.sum(axis=1, keepdims=True), of_group.shape[1]
    slope = float(_slope(total)[0])
    if np.isnan(slope):
        return None
    error = np.sqrt((n_groups - 1) * _slope(total - of_group).var()) if n_groups > 1 else np.nan
    return Estimate(slope, float(error), n_groups)


def _slope(sums: np.ndarray) -> np.ndarray:
    """(slopes,) from sums of w, w x, w y, w x^2 and w x y, (5, slopes); NaN if x is constant."""
    w, wx, wy, wxx, wxy = sums
    spread = w * wxx - wx**2
    varies = spread > VARIANCE_ERROR * w * wxx
    return np.where(varies, w * wxy - wx * wy, np.nan) / np.where(varies, spread, 1)
