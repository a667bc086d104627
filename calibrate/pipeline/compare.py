"""Compare: rules side by side over many heads, with tests and intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrate.pipeline.evaluate import Score

N_RESAMPLES = 10_000
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
    p_paper: np.ndarray  # and against the paper's numbers
    headroom: np.ndarray  # share of what hindsight gains over plain softmax
    headroom_low: np.ndarray
    headroom_high: np.ndarray
    hindsight_beta: np.ndarray  # (heads, sizes)


def compare(heads: Sequence[str], scores: Sequence[Sequence[Score]]) -> Comparison:
    """Scores of several heads at the same sizes and under the same rules, side by side.

    The ceiling's own accuracy counts the sets that did not choose it, and so does every rule's
    where headroom is concerned: all accuracies in one ratio are over the same sets.

    Args:
      heads: names.
      scores: per head, one Score per size. Rules that some head lacks are left out.
    """
    first = scores[0]
    rules = [rule for rule in first[0].correct if all(rule in h[0].correct for h in scores)]
    per_head = np.array([[[_accuracy(s, rule) for s in head] for head in scores] for rule in rules])
    tests = np.array([[_against(scores, rule, i) for i in range(len(first))] for rule in rules])
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
        headroom=rooms[..., 0],
        headroom_low=rooms[..., 1],
        headroom_high=rooms[..., 2],
        hindsight_beta=np.array([[score.hindsight_beta for score in head] for head in scores]),
    )


def _scored(score: Score, rule: str) -> np.ndarray:
    """The sets that a rule may be scored on."""
    return score.correct[rule][score.chosen_on if rule == "hindsight" else 0 :]


def _accuracy(score: Score, rule: str) -> float:
    return float(_scored(score, rule).mean())


def _errors(
    scores: Sequence[Sequence[Score]], per_head: np.ndarray, rules: list[str]
) -> np.ndarray:
    n_heads = per_head.shape[1]
    if n_heads > 1:
        return per_head.std(axis=1, ddof=1) / np.sqrt(n_heads)
    return np.array(
        [[_scored(s, rule).std() / np.sqrt(len(_scored(s, rule))) for s in scores[0]]
         for rule in rules]
    )  # fmt: skip


def _against(scores: Sequence[Sequence[Score]], rule: str, i: int) -> tuple[float, ...]:
    """p of a rule against plain softmax and against the paper's numbers, at the i-th size."""
    return tuple(
        _paired_p(*(_samples(scores, name, i, rule) for name in (rule, other)))
        if other in scores[0][i].correct and other != rule
        else np.nan
        for other in ("plain", "paper")
    )


def _samples(scores: Sequence[Sequence[Score]], rule: str, i: int, like: str) -> np.ndarray:
    """What a paired test compares: accuracies of heads, or the sets of the only one."""
    start = scores[0][i].chosen_on if like == "hindsight" else 0
    if len(scores) == 1:
        return scores[0][i].correct[rule][start:].astype(float)
    return np.array([head[i].correct[rule][start:].mean() for head in scores])


def _paired_p(a: np.ndarray, b: np.ndarray) -> float:
    from scipy.stats import ttest_rel

    # With one pair, or differences that do not vary but by rounding, there is no test.
    return float(ttest_rel(a, b).pvalue) if len(a) > 1 and np.ptp(a - b) > 1e-12 else np.nan


def _headroom(scores: Sequence[Sequence[Score]], rule: str, i: int) -> tuple[float, float, float]:
    """(share of the ceiling's gain, its 95 % interval), NaN where the ceiling gains nothing."""
    if not {"plain", "hindsight"} <= set(scores[0][i].correct):
        return (np.nan,) * 3
    gains = [_gains(head[i], rule) for head in scores]
    estimate = np.sum([gain.mean(axis=0) for gain in gains], axis=0)
    resampled = _resample(gains)
    low, high = np.percentile(resampled[:, 1], INTERVAL)
    if not low > 0 or rule == "plain":
        return (np.nan,) * 3
    share = resampled[:, 0] / np.where(resampled[:, 1] > 0, resampled[:, 1], np.nan)
    low, high = np.nanpercentile(share, INTERVAL)
    return float(estimate[0] / estimate[1]), float(low), float(high)


def _gains(score: Score, rule: str) -> np.ndarray:
    """(sets, 2): what a rule, and what the ceiling, adds to plain softmax on each set."""
    plain, *others = (
        score.correct[name][score.chosen_on :].astype(float)
        for name in ("plain", rule, "hindsight")
    )
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
