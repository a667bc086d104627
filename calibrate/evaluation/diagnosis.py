"""Diagnose: which heads disperse, and which are worth calibrating, from a sample of all rows."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.collection import Collection, refuse_bad_rows
from calibrate.files.shard import Heads, Shard
from calibrate.fitting import solved_rows
from calibrate.fitting.rule_fitting import MIN_ROWS, row_weights
from calibrate.fitting.solved_rows import Rows, head_label, known_index
from calibrate.maths import solver
from calibrate.maths.bounds import dispersal_size
from calibrate.maths.row_blocks import in_blocks
from calibrate.maths.shannon_entropy import susceptibility

# What verdicts go by. They sort heads; `calibrate fit` decides, on rows that a rule has not seen.
LEAST_HEADROOM = 0.01  # nats: the target gets a hundredth more; less is hardly worth a file
LEAST_ERRORS = 2.0  # standard errors of the headroom: about what `calibrate fit` asks for
# Commitment that grows as log n leaves the entropy as it is. Short of that by a tenth, the entropy
# still grows by 0.7 nats only from 16 to 16,384 items.
ROBUST_SLOPE = 0.9
SELDOM_ON_TOP = 0.5  # of rows: in most of them what a larger beta raises is another item
ENOUGH_OF_SIZE = 20  # rows: medians and shares of fewer say little of a set size
PERCENTILES = (10, 50, 90)
N_BETAS = 257  # alike in log beta: a peak between two of them is short by some 1e-4 nats

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
    """Growth of commitment with log n: 1 where the entropy stays, 0 where it grows as log n."""

    value: float
    error: float  # standard error


class Headroom(NamedTuple):
    """What sharpening could add to the mean log-probability of the target, nats, sizes alike."""

    plain: float  # mean log p_t under plain softmax
    constant: float  # what the best constant in [1, 64] adds to these very rows
    error: float  # its standard error
    beta: float  # that constant
    ceiling: float  # what each row's own best beta in [1, 64] adds: nobody can deploy that

    @property
    def evident(self) -> bool:
        """Whether it is worth a rule, and beyond chance."""
        return self.constant >= max(LEAST_HEADROOM, LEAST_ERRORS * self.error)


class Verdict(NamedTuple):
    """One of four words, and a sentence that says why."""

    word: str
    reason: str


class Contexts(NamedTuple):
    """Where each row lies in the plane of commitment and susceptibility; arrays (rows,)."""

    size: np.ndarray
    commitment: np.ndarray  # nats
    susceptibility: np.ndarray  # logits squared


class HeadDiagnosis(NamedTuple):
    """One head."""

    name: str
    layer: int | None  # None where nobody says
    head: int | None
    rows: int
    sizes: list[AtSize]
    slope: Slope | None  # None if all rows have as many items
    largest: int  # the largest set size of 20 rows or more
    dispersal: float | None  # items: median over its rows; None if the target never lets go
    on_top: float  # share of all rows
    on_top_at_largest: float
    beta: tuple[float, float, float] | None  # percentiles of interior rows; None if there are none
    shares: dict[str, float]  # of the rows by class
    headroom: Headroom
    verdict: Verdict
    contexts: Contexts


class Diagnosis(NamedTuple):
    """Every head of a collection, the largest headroom first, those of too few rows last."""

    collection: Collection
    eps: float
    heads: list[HeadDiagnosis]
    without_rows: list[tuple[int, int]]  # (layer, head) of which no row was kept


class Measured(NamedTuple):
    """Solved rows, and what takes their logits; arrays (rows,)."""

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
      eps: the coefficient below which a target is said to be lost, between 0 and 1.
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
    found = {(head.layer, head.head) for head in heads}
    without_rows = [name for name in collection.heads if tuple(map(known_index, name)) not in found]
    heads.sort(key=lambda head: (head.verdict.word == FEW, -head.headroom.constant))
    return Diagnosis(collection, eps, heads, sorted(without_rows))


def _diagnose_group(
    collection: Collection, heads: Heads | None, eps: float, report: Callable[[], None]
) -> list[HeadDiagnosis]:
    parts = []
    for part in starmap(partial(_measure, eps), collection.shards(heads)):  # lets go of each shard
        parts.append(part)
        report()
    if not parts:
        return []
    rows, *columns = zip(*parts, strict=True)
    every = Measured(solved_rows.concatenate_rows(list(rows)), *map(np.concatenate, columns))
    unnamed = collection.manifest["configuration"].get("head", "head")
    return [
        _diagnose_head(
            every.take(every.rows.is_of(layer, head)),
            head_label(known_index(layer), known_index(head)) or str(unnamed),
        )
        for layer, head in every.rows.heads()
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
    slope, room = commitment_slope(rows.items, contexts.commitment), headroom(rows)
    on_top = 1 - float(rows.misranked.mean())
    layer, head = known_index(rows.layer[0]), known_index(rows.head[0])
    return HeadDiagnosis(
        name, layer, head, len(rows.size), sizes, slope,
        largest=last.size,
        dispersal=dispersal if np.isfinite(dispersal) else None,
        on_top=on_top,
        on_top_at_largest=last.on_top,
        beta=_percentiles(interior),
        shares={word: n / len(rows.size) for word, n in rows.count_by_status().items()},
        headroom=room,
        verdict=judge(len(rows.size), slope, on_top, room),
        contexts=contexts,
    )  # fmt: skip


def _at_size(measured: Measured, contexts: Contexts, size: int) -> AtSize:
    rows, mine = measured.rows, measured.rows.size == size
    H = rows.entropy[mine]
    return AtSize(
        int(size), len(H),
        items=float(np.exp(np.log(rows.items[mine]).mean())),
        entropy=float(H.mean()),
        entropy_spread=float(H.std()),
        commitment=float(contexts.commitment[mine].mean()),
        susceptibility=float(contexts.susceptibility[mine].mean()),
        on_top=1 - float(rows.misranked[mine].mean()),
    )  # fmt: skip


def _percentiles(beta: np.ndarray) -> tuple[float, float, float] | None:
    if not len(beta):
        return None
    low, middle, high = map(float, np.percentile(beta, PERCENTILES))
    return low, middle, high


def commitment_slope(items: np.ndarray, commitment: np.ndarray) -> Slope | None:
    """Least squares of commitment on log n over rows; None if that determines no line.

    The standard error allows for rows that vary more at some sizes than at others (White 1980).
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
    """What the best constant, and each row's own best beta, add to these very rows.

    Both are chosen by the rows that they are scored on, and so upper estimates.
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


def judge(rows: int, slope: Slope | None, on_top: float, room: Headroom) -> Verdict:
    """Whether a head is worth calibrating, as far as its own rows can say."""
    if rows < MIN_ROWS:
        return Verdict(FEW, f"{FEW} ({rows}): at least {MIN_ROWS} are needed")
    robust = slope is not None and slope.value >= ROBUST_SLOPE
    way = "falls" if slope and slope.value < 0 else "grows"
    grows = f"commitment {way} {abs(slope.value):.2f} per unit of log n" if slope else ""
    adds = f"one constant would add {room.constant:.3f} nats"
    seldom = on_top < SELDOM_ON_TOP
    if room.evident:
        said = [f"{'hardly disperses' if robust else 'disperses'} ({grows})"] if slope else []
        said += [f"its target has the top logit in {'only ' * seldom}{on_top:.0%} of rows", adds]
        return Verdict(WORTH, f"{WORTH}: {', '.join(said)}")
    if seldom:
        return Verdict(
            NOT_WORTH,
            f"{NOT_WORTH}: its targets seldom have the top logit ({on_top:.0%}), sharpening would "
            f"help the wrong items ({adds})",
        )
    if robust:
        return Verdict(ROBUST, f"{ROBUST}: its entropy hardly grows ({grows}), {adds}")
    small = room.constant < LEAST_HEADROOM
    within = f"less than {LEAST_HEADROOM:g}" if small else f"within chance (± {room.error:.3f})"
    return Verdict(NOT_WORTH, f"{NOT_WORTH}: {adds}, {within}")
