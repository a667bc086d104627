"""Diagnosis of heads: which disperse, and which are worth calibrating, from a sample of rows."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.collection import Collection, refuse_bad_rows
from calibrate.files.shard import Heads, Shard
from calibrate.fitting import solved_rows
from calibrate.fitting.rule_fitting import MIN_ROWS
from calibrate.fitting.solved_rows import Rows, head_label, known_index
from calibrate.fitting.weighting import row_weights
from calibrate.maths import solver
from calibrate.maths.bounds import dispersal_size
from calibrate.maths.row_blocks import in_blocks
from calibrate.maths.shannon_entropy import susceptibility

# Thresholds of verdicts, which only rank heads: `calibrate fit` decides on held-out rows.
LEAST_HEADROOM = 0.01  # nats: the target's probability rises by 1 %
LEAST_ERRORS = 2.0  # standard errors of the headroom: about what `calibrate fit` requires
# Entropy is constant if commitment grows as log n. At a slope of 0.9 it grows by 0.7 nats from 16
# to 16,384 items.
ROBUST_SLOPE = 0.9
SELDOM_ON_TOP = 0.5  # share of rows: below it, a larger beta mostly raises another item
ENOUGH_OF_SIZE = 20  # rows of a set size, for medians and shares
PERCENTILES = (10, 50, 90)
N_BETAS = 257  # evenly spaced in log beta: a maximum between two is missed by about 1e-4 nats

WORTH, ROBUST, NOT_WORTH, FEW = "worth calibrating", "robust", "not worth it", "too few rows"


class AtSize(NamedTuple):
    """The rows of one set size."""

    size: int
    rows: int
    items: float  # geometric mean of the unmasked items
    entropy: float  # mean, nats
    entropy_spread: float  # standard deviation over rows
    commitment: float  # mean, nats
    susceptibility: float  # mean, logits squared
    on_top: float  # share of the rows whose target has the top logit


class Slope(NamedTuple):
    """Growth of commitment with log n: 1 if the entropy is constant, 0 if it grows as log n."""

    value: float
    error: float  # standard error


class Headroom(NamedTuple):
    """Possible gains in the mean log-probability of the target, nats, equal weight per size."""

    plain: float  # mean log p_t under plain softmax
    constant: float  # gain of the best constant in [1, 64] on the rows that choose it
    error: float  # its standard error
    beta: float  # that constant
    ceiling: float  # gain if each row has its own best beta in [1, 64]: cannot be deployed

    @property
    def evident(self) -> bool:
        """Whether the constant's gain is large enough for a rule, and beyond chance."""
        return self.constant >= max(LEAST_HEADROOM, LEAST_ERRORS * self.error)


class Verdict(NamedTuple):
    """One of WORTH, ROBUST, NOT_WORTH and FEW, and the reason in a sentence."""

    word: str
    reason: str


class Contexts(NamedTuple):
    """Commitment and susceptibility of each row; arrays (rows,)."""

    size: np.ndarray
    commitment: np.ndarray  # nats
    susceptibility: np.ndarray  # logits squared


class HeadDiagnosis(NamedTuple):
    """Measurements and verdict of one head."""

    name: str
    layer: int | None  # None if unknown
    head: int | None
    rows: int
    sizes: list[AtSize]
    slope: Slope | None  # None if all rows have the same number of items
    largest: int  # the largest set size of 20 rows or more
    dispersal: float | None  # items: median over its rows; None if the target is never lost
    on_top: float  # share of all rows
    on_top_at_largest: float
    beta: tuple[float, float, float] | None  # percentiles of interior rows; None without them
    shares: dict[str, float]  # of the rows by class
    headroom: Headroom
    verdict: Verdict
    contexts: Contexts


class Diagnosis(NamedTuple):
    """Every head of a collection, by falling headroom; heads with too few rows are last."""

    collection: Collection
    eps: float
    heads: list[HeadDiagnosis]
    without_rows: list[tuple[int, int]]  # (layer, head) without a kept row


class Measured(NamedTuple):
    """Solved rows, and measurements of their logits; arrays (rows,)."""

    rows: Rows
    susceptibility: np.ndarray
    dispersal: np.ndarray

    def take(self, chosen: np.ndarray) -> "Measured":
        """Some of the rows."""
        return Measured(self.rows.take(chosen), self.susceptibility[chosen], self.dispersal[chosen])


def require_all_rows(collection: Collection) -> None:
    """Raises CalibrateError if a collection keeps no sample of all rows."""
    refuse_bad_rows(collection.manifest)
    if collection.manifest["configuration"].get("keep", "misranked") != "all":
        raise CalibrateError(
            f"{collection.folder} keeps misranked rows only, and a diagnosis needs a sample of "
            "all rows; collect with --keep all into another folder"
        )


def diagnose(
    collection: Collection, eps: float = 0.5, report: Callable[[], None] = lambda: None
) -> Diagnosis:
    """Measures every head of a collection; a few heads' rows are in memory at a time.

    Args:
      collection: complete, of a sample of all rows.
      eps: the coefficient below which a target counts as lost, between 0 and 1.
      report: called after each shard of each group of `group_heads`.
    Raises:
      CalibrateError: the collection keeps misranked rows only, or is damaged.
      QualityError: it has no rows, or too many bad ones.
    """
    require_all_rows(collection)
    heads: list[HeadDiagnosis] = []
    for group in solved_rows.group_heads(collection):
        heads += _diagnose_group(collection, group, eps, report)
    if not heads:
        raise QualityError(f"{collection.folder} has no rows; collect more sets")
    diagnosed = {(head.layer, head.head) for head in heads}
    names = {name: tuple(map(known_index, name)) for name in collection.heads}
    without_rows = [name for name, indices in names.items() if indices not in diagnosed]
    heads.sort(key=lambda head: (head.verdict.word == FEW, -head.headroom.constant))
    return Diagnosis(collection, eps, heads, sorted(without_rows))


def _diagnose_group(
    collection: Collection, heads: Heads | None, eps: float, report: Callable[[], None]
) -> list[HeadDiagnosis]:
    parts = []
    for part in starmap(partial(_measure, eps), collection.shards(heads)):  # one shard at a time
        parts.append(part)
        report()
    if not parts:
        return []
    rows, *columns = zip(*parts, strict=True)
    measured = Measured(solved_rows.concatenate_rows(list(rows)), *map(np.concatenate, columns))
    unnamed = collection.manifest["configuration"].get("head", "head")
    return [
        _diagnose_head(
            measured.take(measured.rows.is_of(layer, head)),
            head_label(known_index(layer), known_index(head)) or str(unnamed),
        )
        for layer, head in measured.rows.heads()
    ]


def _measure(eps: float, size: int, shard: Shard) -> Measured:
    rows = solved_rows.solve_shard(shard, size)
    variance, n_star = np.empty(len(rows.size)), np.empty(len(rows.size))
    for part, (logits,) in in_blocks(shard.logits):
        n_rows = part.stop - part.start
        variance[part] = np.asarray(susceptibility(logits))[:n_rows]
        n_star[part] = dispersal_size(logits[:n_rows], shard.target[part], eps)
    return Measured(rows, variance, n_star)


def _diagnose_head(measured: Measured, name: str) -> HeadDiagnosis:
    rows = measured.rows
    contexts = Contexts(rows.size, np.log(rows.items) - rows.entropy, measured.susceptibility)
    sizes = [_at_size(measured, contexts, n) for n in np.unique(rows.size)]
    last = max(sizes, key=lambda at: (at.rows >= ENOUGH_OF_SIZE, at.size))
    dispersal = float(np.median(measured.dispersal[rows.size == last.size]))
    interior = rows.beta[rows.status == solver.INTERIOR]
    slope, gains = commitment_slope(rows.items, contexts.commitment), headroom(rows)
    on_top = 1 - float(rows.misranked.mean())
    layer, head = known_index(rows.layer[0]), known_index(rows.head[0])
    return HeadDiagnosis(
        name, layer, head, len(rows.size), sizes, slope,
        largest=last.size,
        dispersal=dispersal if np.isfinite(dispersal) else None,
        on_top=on_top,
        on_top_at_largest=last.on_top,
        beta=_percentiles(interior),
        shares={status: n / len(rows.size) for status, n in rows.count_by_status().items()},
        headroom=gains,
        verdict=judge(len(rows.size), slope, on_top, gains),
        contexts=contexts,
    )  # fmt: skip


def _at_size(measured: Measured, contexts: Contexts, size: int) -> AtSize:
    rows, of_size = measured.rows, measured.rows.size == size
    H = rows.entropy[of_size]
    return AtSize(
        int(size), len(H),
        items=float(np.exp(np.log(rows.items[of_size]).mean())),
        entropy=float(H.mean()),
        entropy_spread=float(H.std()),
        commitment=float(contexts.commitment[of_size].mean()),
        susceptibility=float(contexts.susceptibility[of_size].mean()),
        on_top=1 - float(rows.misranked[of_size].mean()),
    )  # fmt: skip


def _percentiles(beta: np.ndarray) -> tuple[float, float, float] | None:
    if not len(beta):
        return None
    low, middle, high = map(float, np.percentile(beta, PERCENTILES))
    return low, middle, high


def commitment_slope(items: np.ndarray, commitment: np.ndarray) -> Slope | None:
    """Least-squares slope of commitment on log n over rows; None if the rows determine no line.

    The standard error is robust to a variance that depends on the size (White 1980).
    """
    x = np.log(items) - np.log(items).mean()
    total = float(x @ x)
    if len(x) < 3 or items.min() == items.max():
        return None
    slope = float(x @ commitment) / total
    residual = commitment - commitment.mean() - slope * x
    error = np.sqrt(len(x) / (len(x) - 2) * np.sum((x * residual) ** 2)) / total
    return Slope(slope, float(error))


def headroom(rows: Rows) -> Headroom:
    """Gains of the best constant, and of each row's own best beta, over plain softmax.

    Both are chosen on the rows that they are scored on: they are upper estimates.
    """
    weight = row_weights(rows)
    betas = np.geomspace(rows.profile.low, rows.profile.high, N_BETAS)  # the first is plain softmax
    log_p = rows.profile.log_p_at_each(betas)
    mean = weight @ log_p
    best = int(np.argmax(mean))
    added = log_p[:, best] - log_p[:, 0]
    constant = float(mean[best] - mean[0])
    return Headroom(
        plain=float(mean[0]),
        constant=constant,
        error=float(np.sqrt(np.sum((weight * (added - constant)) ** 2))),
        beta=float(betas[best]),
        ceiling=float(weight @ log_p.max(axis=1) - mean[0]),
    )


def judge(rows: int, slope: Slope | None, on_top: float, gains: Headroom) -> Verdict:
    """Whether a head is worth calibrating, judged by the rows that chose its best constant."""
    if rows < MIN_ROWS:
        return Verdict(FEW, f"{FEW} ({rows}): at least {MIN_ROWS} are needed")
    robust = slope is not None and slope.value >= ROBUST_SLOPE
    verb = "falls" if slope and slope.value < 0 else "grows"
    growth = f"commitment {verb} {abs(slope.value):.2f} per unit of log n" if slope else ""
    gain = f"one constant would add {gains.constant:.3f} nats"
    seldom = on_top < SELDOM_ON_TOP
    if gains.evident:
        facts = [f"{'hardly disperses' if robust else 'disperses'} ({growth})"] if slope else []
        facts += [f"its target has the top logit in {'only ' * seldom}{on_top:.0%} of rows", gain]
        return Verdict(WORTH, f"{WORTH}: {', '.join(facts)}")
    if seldom:
        return Verdict(
            NOT_WORTH,
            f"{NOT_WORTH}: its targets seldom have the top logit ({on_top:.0%}), sharpening would "
            f"help the wrong items ({gain})",
        )
    if robust:
        return Verdict(ROBUST, f"{ROBUST}: its entropy hardly grows ({growth}), {gain}")
    small = gains.constant < LEAST_HEADROOM
    within = f"less than {LEAST_HEADROOM:g}" if small else f"within chance (± {gains.error:.3f})"
    return Verdict(NOT_WORTH, f"{NOT_WORTH}: {gain}, {within}")
