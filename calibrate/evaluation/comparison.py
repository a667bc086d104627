"""Compare: rules side by side over many heads, with tests and intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrate.evaluation.score_head import Score, standard_error

N_RESAMPLES = 10_000
FEWEST_HEADS = 5  # resampling fewer says nothing of their spread
ROUNDING = 1e-12
INTERVAL = (2.5, 97.5)  # per cent


class Comparison(NamedTuple):
    """Every rule at every set size; what is not defined is NaN.

    Arrays are (rules, sizes) unless they say otherwise. With one head, errors, tests and intervals
    are over its sets; with more, over heads.
    """

    heads: list[str]
    sizes: list[int]
    sets: list[int]  # of each size
    chosen_on: list[int]  # so many first sets of each size chose the best constant in hindsight
    rules: list[str]
    per_head: np.ndarray  # (rules, heads, sizes) accuracy
    accuracy: np.ndarray  # mean over heads
    error: np.ndarray  # its standard error
    p_plain: np.ndarray  # two-sided paired t-test against plain softmax
    p_paper: np.ndarray  # against the paper's numbers
    p_own: np.ndarray  # and against the head's own fit
    gain: np.ndarray  # mean accuracy less that of plain softmax on the same sets
    gain_error: np.ndarray  # its standard error
    headroom: np.ndarray  # share of what hindsight gains over plain softmax
    headroom_low: np.ndarray
    headroom_high: np.ndarray
    hindsight_beta: np.ndarray  # (heads, sizes)


def compare(heads: Sequence[str], scores: Sequence[Sequence[Score]]) -> Comparison:
    """Scores of several heads at the same sizes and under the same rules, side by side.

    What is chosen in hindsight gains what it gains on the sets that did not choose it; its accuracy
    is that of plain softmax on all sets, and this gain. Where headroom is concerned, every rule is
    scored on those sets alone: all accuracies in one ratio are over the same sets.

    Args:
      heads: names.
      scores: per head, one Score per size. Rules that some head lacks are left out.
    """
    first = scores[0]
    rules = [rule for rule in first[0].correct if all(rule in h[0].correct for h in scores)]
    per_head = np.array([[[s.accuracy(rule) for s in head] for head in scores] for rule in rules])
    tests = np.array([[_against(scores, rule, i) for i in range(len(first))] for rule in rules])
    gains = np.array([[_gain(scores, rule, i) for i in range(len(first))] for rule in rules])
    rooms = np.array([[_headroom(scores, rule, i) for i in range(len(first))] for rule in rules])
    return Comparison(
        heads=list(heads),
        sizes=[score.size for score in first],
        sets=[score.sets for score in first],
        chosen_on=[score.chosen_on for score in first],
        rules=rules,
        per_head=per_head,
        accuracy=per_head.mean(axis=1),
        error=_errors(scores, per_head, rules),
        p_plain=tests[..., 0],
        p_paper=tests[..., 1],
        p_own=tests[..., 2],
        gain=gains[..., 0],
        gain_error=gains[..., 1],
        headroom=rooms[..., 0],
        headroom_low=rooms[..., 1],
        headroom_high=rooms[..., 2],
        hindsight_beta=np.array([[score.hindsight_beta for score in head] for head in scores]),
    )


def _gain(scores: Sequence[Sequence[Score]], rule: str, i: int) -> tuple[float, float]:
    """(gain over plain softmax at the i-th size, its standard error), paired."""
    if "plain" not in scores[0][i].correct:
        return np.nan, np.nan
    own, plain = _samples(scores, rule, i, "plain"), _samples(scores, "plain", i, rule)
    return float((own - plain).mean()), standard_error(own - plain)


def _errors(
    scores: Sequence[Sequence[Score]], per_head: np.ndarray, rules: list[str]
) -> np.ndarray:
    if per_head.shape[1] > 1:
        return np.apply_along_axis(standard_error, 1, per_head)
    return np.array([[score.standard_error(rule) for score in scores[0]] for rule in rules])


def _against(scores: Sequence[Sequence[Score]], rule: str, i: int) -> tuple[float, ...]:
    """p of a rule against plain softmax, the paper's numbers and the own fit, at the i-th size."""
    return tuple(
        _paired_p(_samples(scores, rule, i, other), _samples(scores, other, i, rule))
        if other in scores[0][i].correct and other != rule
        else np.nan
        for other in ("plain", "paper", "own")
    )


def _samples(scores: Sequence[Sequence[Score]], rule: str, i: int, like: str) -> np.ndarray:
    """What a paired test compares: accuracies of heads, or the sets of the only one."""
    if len(scores) == 1:
        return scores[0][i].scored(rule, like)
    return np.array([head[i].scored(rule, like).mean() for head in scores])


def _paired_p(a: np.ndarray, b: np.ndarray) -> float:
    from scipy.stats import ttest_rel

    difference = a - b
    if len(a) < 2 or np.abs(difference).max() < ROUNDING:
        return np.nan  # one pair, or no difference, and so no test
    return float(ttest_rel(a, b).pvalue) if np.ptp(difference) > ROUNDING else 0.0


def _headroom(scores: Sequence[Sequence[Score]], rule: str, i: int) -> tuple[float, float, float]:
    """(share of hindsight's gain, its 95 % interval), NaN where hindsight gains nothing."""
    if rule == "plain" or not {"plain", "hindsight"} <= set(scores[0][i].correct):
        return (np.nan,) * 3
    gains = [_gains(head[i], rule) for head in scores]
    estimate = np.sum([gain.mean(axis=0) for gain in gains], axis=0)
    resampled = _resample(gains)
    low, high = np.percentile(resampled[:, 1], INTERVAL)
    if not low > 0:
        return (np.nan,) * 3
    share = float(estimate[0] / estimate[1])
    if 1 < len(scores) < FEWEST_HEADS:
        return share, np.nan, np.nan
    shares = resampled[:, 0] / np.where(resampled[:, 1] > 0, resampled[:, 1], np.nan)
    low, high = np.nanpercentile(shares, INTERVAL)
    return share, float(low), float(high)


def _gains(score: Score, rule: str) -> np.ndarray:
    """(sets, 2): what a rule, and what hindsight, adds to plain softmax on each set."""
    plain, *others = (score.scored(name, "hindsight") for name in ("plain", rule, "hindsight"))
    return np.stack([other - plain for other in others], axis=1)


def _resample(gains: list[np.ndarray]) -> np.ndarray:
    """(N_RESAMPLES, 2) sums of gains over heads drawn with replacement; of one head, over sets."""
    rng = np.random.default_rng(0)
    if len(gains) > 1:
        means = np.array([gain.mean(axis=0) for gain in gains])
        return means[rng.integers(0, len(means), (N_RESAMPLES, len(means)))].sum(axis=1)
    # Sets differ in nine ways only: how often each is drawn is multinomial.
    kinds, counts = np.unique(gains[0], axis=0, return_counts=True)
    return rng.multinomial(counts.sum(), counts / counts.sum(), N_RESAMPLES) @ kinds / counts.sum()
