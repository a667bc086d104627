"""Verdict on one head: what rules gain on rows that did not fit them, and attention sinks."""

from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.baselines import kind_label
from calibrate.evidence.prior import LEAST_GAIN, Gain
from calibrate.rows.choose_rule import least_beta_sentence, unbeaten, wants_less_beta
from calibrate.rows.groups import MIN_ROWS, require_groups
from calibrate.rows.row_problem import RowProblem
from calibrate.rows.rule_fitting import CONSTANT, KINDS, Options
from calibrate.rows.solved_rows import Rows

# Entropy is constant if commitment grows as log n. At a slope of 0.9 it grows by 0.7 nats from 16
# to 16,384 items.
ROBUST_SLOPE = 0.9
SELDOM_ON_TOP = 0.5  # share of rows
LEAST_SINK = 0.5  # share of the attention
LEAST_SAMPLE = 20  # rows, for medians and shares
N_BETAS = 257  # evenly spaced in log beta: a maximum between two is missed by about 1e-4 nats

WORTH, SINK, ROBUST, NOT_WORTH, FEW = (
    "worth calibrating", "sink", "robust", "not worth it", "too few rows",
)  # fmt: skip


class RuleGain(NamedTuple):
    """What the best rule of a kind adds to the mean log-probability of held-out targets."""

    kind: str
    gain: Gain  # over plain softmax


class Headroom(NamedTuple):
    """What sharpening can add to the mean log p_t of plain softmax, nats, equal weight per size."""

    plain: float  # mean log p_t under plain softmax
    gains: list[RuleGain]  # what a fit would choose first, then the largest
    no_rule: str | None  # why there are none
    beta: float  # the best constant of all rows in [1, 64]
    ceiling: float  # gain if each row had its own best beta in [1, 64]: cannot be deployed
    wants_less: bool = False  # whether rows evidently want beta below 1

    @property
    def gain(self) -> float:
        """The best rule's, nats; 0 without any."""
        return self.gains[0].gain.mean if self.gains else 0.0


class Sink(NamedTuple):
    """A position that gets most of the attention, whatever the target is."""

    position: int  # 0 is the first item, -1 the last
    attention: float  # mean over the rows whose target is elsewhere, or of all if those are few
    rows: int  # how many have their target elsewhere

    @property
    def certain(self) -> bool:
        """Whether enough rows have their target elsewhere; else it may be the target's doing."""
        return self.rows >= LEAST_SAMPLE


class Verdict(NamedTuple):
    """One of WORTH, SINK, ROBUST, NOT_WORTH and FEW, and the reason in a sentence."""

    word: str
    reason: str


def measure_headroom(rows: Rows) -> Headroom:
    """Gains of rules as `calibrate fit` finds them, and of each row's own best beta."""
    weight = rows.shares()
    betas = np.geomspace(rows.profile.low, rows.profile.high, N_BETAS)  # the first is plain softmax
    log_p = rows.profile.log_p_at_each(betas)
    mean = weight @ log_p
    problem = RowProblem(rows, Options())
    candidates, left_out = problem.solve_kinds(KINDS)
    best = unbeaten(problem, candidates)
    ranked = sorted(candidates, key=lambda one: (one is not best, -one.gain.mean))
    return Headroom(
        plain=float(mean[0]),
        gains=[RuleGain(candidate.kind, candidate.gain) for candidate in ranked],
        no_rule=None if ranked else left_out[CONSTANT],
        beta=float(betas[int(np.argmax(mean))]),
        ceiling=float(weight @ log_p.max(axis=1) - mean[0]),
        wants_less=wants_less_beta(problem),
    )


def attended(logits: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where rows look.

    Args:
      logits: (rows, n), -inf where masked.
      target: (rows,) int, or (rows, n) bool.
    Returns:
      (rows,) position of the highest logit; its share of the attention at beta = 1; position of
      the target, of several the highest.
    """
    highest = logits.max(axis=1, keepdims=True)
    if target.ndim > 1:
        target = np.where(target, logits, -np.inf).argmax(axis=1)
    return logits.argmax(axis=1), 1 / np.exp(logits - highest).sum(axis=1), target


def find_sink(
    top: np.ndarray, share: np.ndarray, target: np.ndarray, items: np.ndarray
) -> Sink | None:
    """The position with at least half of the attention, whatever the target; None without one.

    Positions count from the first or the last item of each row. Only attention to positions with
    the top logit is counted, all but a little.

    Args:
      top, share, target: of `attended`.
      items: (rows,) number of unmasked items.
    """
    sinks = []
    for end in (0, items):
        places, which = np.unique(top - end, return_inverse=True)
        place = int(places[np.bincount(which, share).argmax()])
        elsewhere = target - end != place
        counted = elsewhere if elsewhere.sum() >= LEAST_SAMPLE else np.full(len(top), True)
        attention = float(np.where(top - end == place, share, 0)[counted].mean())
        if attention >= LEAST_SINK:
            sinks.append(Sink(place, attention, int(elsewhere.sum())))
    return max(sinks, key=lambda sink: (sink.attention, -abs(sink.position)), default=None)


def refuse_few_groups(rows: Rows) -> Verdict | None:
    """The verdict on rows of too few prompts; None if there are enough."""
    try:
        require_groups(rows)
    except QualityError as failure:
        return Verdict(FEW, f"{FEW}: {failure}")
    return None


def judge_head(
    rows: int, slope: float | None, on_top: float, room: Headroom, sink: Sink | None
) -> Verdict:
    """The verdict on a head: a word, and everything that decides on it.

    Args:
      slope: growth of commitment with log n: 1 if the entropy is constant; None if unknown.
      on_top: share of the rows whose target has the top logit.
    """
    if rows < MIN_ROWS:
        return Verdict(FEW, f"{FEW} ({rows}): at least {MIN_ROWS} are needed")
    if room.gains and room.gains[0].gain.evident:
        word = WORTH
    elif sink and sink.certain:
        word = SINK
    elif on_top >= SELDOM_ON_TOP and slope is not None and slope >= ROBUST_SLOPE:
        word = ROBUST
    else:
        word = NOT_WORTH
    facts = [_gain_phrase(room), f"its target has the top logit in {on_top:.0%} of rows"]
    if room.wants_less and word != WORTH:
        facts[-1] = least_beta_sentence(1)
    if sink:
        facts.insert(0, _sink_phrase(sink))
    if slope is not None:
        verb = "falls" if slope < 0 else "grows"
        facts.append(f"commitment {verb} {abs(slope):.2f} per unit of log n")
    return Verdict(word, f"{word}: {'; '.join(facts)}")


def _gain_phrase(room: Headroom) -> str:
    if not room.gains:
        return f"no rule can be fitted: {room.no_rule}"
    (kind, (mean, low, high, _)), evident = room.gains[0], room.gains[0].gain.evident
    gain = f"{mean:z.3f} ({low:z.3f} to {high:z.3f})"
    if not evident:
        least = f"{LEAST_GAIN:g} nats on average and beyond chance"
        return f"no rule gains {least} (best: {kind_label(kind)}, {gain})"
    phrase = f"{kind_label(kind)} gains {gain} nats"
    constant = "".join(f"{g.mean:z.3f}" for other, g in room.gains if other == CONSTANT)
    return f"{phrase}, one constant {constant}" if kind != CONSTANT and constant else phrase


def _sink_phrase(sink: Sink) -> str:
    ends = {0: "the first item", -1: "the last item"}
    n = sink.position + 1 if sink.position > 0 else -sink.position
    place = ends.get(sink.position, f"item {n}{' from the end' if sink.position < 0 else ''}")
    of_target = "whatever the target" if sink.certain else "which is the target of nearly all rows"
    return f"{sink.attention:.0%} of its attention is on {place}, {of_target}"
