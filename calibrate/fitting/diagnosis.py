"""Diagnosis of heads, from a sample of rows: what rules gain held out, and attention sinks."""

from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule_kinds import KINDS, kind_label
from calibrate.datasets.row_collection import Heads, RowCollection
from calibrate.datasets.row_quality import check_bad_rows
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.selection_criterion import Gain
from calibrate.fitting.cross_validate import cross_validate
from calibrate.fitting.groups import require_groups, require_rows
from calibrate.fitting.options import Options
from calibrate.fitting.select import select_simplest
from calibrate.parallel import SILENT, Progress
from calibrate.solver import solved_rows

MIN_SINK = 0.5  # share of the attention
MIN_SAMPLE = 20  # rows whose target is elsewhere, for a sink

WORTH = "worth calibrating"
SINK = "sink"
NOT_WORTH = "not worth it"
FEW = "too few rows"


class AtSize(NamedTuple):
    """The rows of one set size."""

    size: int
    rows: int
    entropy: float  # mean, nats


class Sink(NamedTuple):
    """A position that gets most of the attention, whatever the target is."""

    position: int  # 0 is the first item, -1 the last
    attention: float  # mean over the rows whose target is elsewhere


class HeadDiagnosis(NamedTuple):
    """Measurements and verdict of one head."""

    name: str
    layer: int | None  # None if unknown
    head: int | None
    rows: int
    sizes: list[AtSize]
    on_top: float  # share of the rows whose target has the top logit
    gains: dict[str, Gain]  # by kind of rule, what a fit would select first, then the largest
    sink: Sink | None
    word: str  # WORTH, SINK, NOT_WORTH or FEW
    reason: str  # the same in a sentence

    @property
    def gain(self) -> float:
        """The best rule's, nats; 0 without any."""
        return next((gain.mean for gain in self.gains.values()), 0.0)


class Diagnosis(NamedTuple):
    """Every head of a collection, the largest gain first; heads with too few rows are last."""

    collection: RowCollection
    heads: list[HeadDiagnosis]


def require_all_rows(collection: RowCollection) -> None:
    """Raises CalibrateError if a collection keeps no sample of all rows."""
    check_bad_rows(collection.manifest)
    if collection.misranked_only:
        raise CalibrateError(
            f"{collection.folder} keeps misranked rows only, and a diagnosis needs a sample of "
            "all rows; collect into another folder and keep all rows"
        )


def diagnose(collection: RowCollection, progress: Progress = SILENT) -> Diagnosis:
    """Measures every head of a collection; a few heads' rows are in memory at a time.

    Rows of weight 0 are left out.

    Args:
      collection: complete, of a sample of all rows.
      progress: advances after each shard of each group of `group_heads`.
    Raises:
      CalibrateError: the collection keeps misranked rows only, or is damaged.
      QualityError: it has no rows of any weight, or too many bad ones.
    """
    require_all_rows(collection)
    heads: list[HeadDiagnosis] = []
    groups = solved_rows.group_heads(collection)
    n_steps = len(groups) * len(collection.manifest["shards"])
    progress.begin(f"measuring the rows of {collection.folder}", n_steps)
    for group in groups:
        heads += _diagnose_group(collection, group, progress)
    if not heads:
        raise QualityError(f"{collection.folder} has no rows of any weight; collect more sets")
    heads.sort(key=lambda head: (head.word == FEW, -head.gain))
    return Diagnosis(collection, heads)


def _diagnose_group(
    collection: RowCollection, heads: Heads | None, progress: Progress
) -> list[HeadDiagnosis]:
    parts, attention = [], []
    for size, shard in collection.shards(heads):  # one is in memory at a time
        parts.append(solved_rows.solve_shard(shard, size))
        attention.append(np.stack(attended(shard.logits, shard.target)))
        del shard
        progress.advance()
    if not parts:
        return []
    rows = solved_rows.concatenate_rows(parts)
    top_attention_target = np.concatenate(attention, axis=1)
    unnamed = str(collection.manifest["configuration"].get("head", "head"))
    diagnosed = []
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        for name in rows.heads():
            of_head = rows.is_of(*name) & (rows.weight > 0)
            if of_head.any():
                attended_by_head = top_attention_target[:, of_head]
                diagnosed.append(_diagnose_head(rows.take(of_head), attended_by_head, unnamed))
    return diagnosed


def attended(logits: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows,) position of the highest logit, its share of the attention, and the target's position.

    Takes logits and targets as of LogitRows; of several targets the highest is meant.
    """
    highest = logits.max(axis=1, keepdims=True)
    if target.ndim > 1:
        target = np.where(target, logits, -np.inf).argmax(axis=1)
    return logits.argmax(axis=1), 1 / np.exp(logits - highest).sum(axis=1), target


def _diagnose_head(
    rows: solved_rows.Rows, top_attention_target: np.ndarray, unnamed: str
) -> HeadDiagnosis:
    layer, head = solved_rows.known_index(rows.layer[0]), solved_rows.known_index(rows.head[0])
    H = {int(n): rows.entropy[rows.size == n] for n in np.unique(rows.size)}
    sizes = [AtSize(n, len(of_size), float(of_size.mean())) for n, of_size in H.items()]
    gains = gains_of_rules(rows)
    top, attention, target = top_attention_target
    sink = find_sink(top, attention, target, rows.items)
    on_top = 1 - float(rows.misranked.mean())
    word, reason = too_few(rows) or judge_head(on_top, gains, sink)
    return HeadDiagnosis(
        name=solved_rows.head_label(layer, head) or unnamed,
        layer=layer,
        head=head,
        rows=len(rows.size),
        sizes=sizes,
        on_top=on_top,
        gains=gains,
        sink=sink,
        word=word,
        reason=f"{word}: {reason}",
    )


def gains_of_rules(rows: solved_rows.Rows) -> dict[str, Gain]:
    """Held-out gains as `calibrate fit` finds them, by kind; none where rows determine no rule."""
    candidates = cross_validate(rows, tuple(KINDS.values()), Options()).candidates
    best = select_simplest(candidates)
    ranked = sorted(candidates, key=lambda c: (c is not best, -c.gain.mean))
    return {candidate.kind: candidate.gain for candidate in ranked}


def find_sink(
    top: np.ndarray, attention: np.ndarray, target: np.ndarray, items: np.ndarray
) -> Sink | None:
    """The position with at least half of the attention, whatever the target; None without one.

    Takes what `attended` gives, and (rows,) numbers of unmasked items. Positions count from the
    first or the last item of each row. Only attention to positions with the top logit is counted.
    """
    sinks = []
    for end in (0, items):
        positions, position_of_row = np.unique(top - end, return_inverse=True)
        position = int(positions[np.bincount(position_of_row, attention).argmax()])
        elsewhere = target - end != position
        if elsewhere.sum() >= MIN_SAMPLE:
            received = np.where(top - end == position, attention, 0)
            sinks.append(Sink(position, float(received[elsewhere].mean())))
    sinks = [sink for sink in sinks if sink.attention >= MIN_SINK]
    return max(sinks, key=lambda sink: (sink.attention, -abs(sink.position)), default=None)


def too_few(rows: solved_rows.Rows) -> tuple[str, str] | None:
    """The verdict on few rows, or rows of few prompts; None if there are enough."""
    try:
        require_rows(len(rows.size), "usable")
        require_groups(rows)
    except QualityError as failure:
        return FEW, str(failure)
    return None


def judge_head(on_top: float, gains: dict[str, Gain], sink: Sink | None) -> tuple[str, str]:
    """A word on a head, and everything that decides on it."""
    kind, best = next(iter(gains.items()), ("", None))
    gain_text = "the rows determine no rule"
    if best:
        gain_text = (
            f"{kind_label(kind)} gains most ({best.mean:z.3f}, 95 % interval {best.low:z.3f} to "
            f"{best.high:z.3f})"
        )
    facts = [gain_text, f"its target has the top logit in {on_top:.0%} of rows"]
    if sink:
        n = sink.position
        place = f"item {n + 1} from the first" if n >= 0 else f"item {-n} from the last"
        facts.insert(0, f"{sink.attention:.0%} of its attention is on {place}")
    word = WORTH if best and best.significant else SINK if sink else NOT_WORTH
    return word, "; ".join(facts)
