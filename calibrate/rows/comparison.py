"""Comparison of rules on one head: gains, paired t-tests and headroom, all over its sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from calibrate.rows.score_head import Score, standard_error

N_RESAMPLES = 10_000
ROUNDING = 1e-12
INTERVAL = (2.5, 97.5)  # per cent
UNDEFINED = (np.nan,) * 3


@dataclass(frozen=True)
class Comparison:
    """Every rule at every set size: arrays of (rules, sizes); what is not defined is NaN."""

    head: str
    sizes: list[int]
    sets: list[int]  # of each size
    chosen_on: list[int]  # so many first sets of each size chose the best constant in hindsight
    rules: list[str]
    accuracy: np.ndarray
    error: np.ndarray  # its standard error
    p_plain: np.ndarray  # two-sided paired t-test against plain softmax
    p_paper: np.ndarray  # against the paper's numbers
    p_own: np.ndarray  # and against the head's own fit
    gain: np.ndarray  # accuracy less that of plain softmax on the same sets
    gain_error: np.ndarray  # its standard error
    headroom: np.ndarray  # gain as a share of that of the best constant in hindsight
    headroom_low: np.ndarray  # 95 % bootstrap interval
    headroom_high: np.ndarray
    hindsight_beta: np.ndarray  # (sizes,)


def compare(head: str, scores: Sequence[Score]) -> Comparison:
    """Compares the rules of one head's scores.

    The best constant in hindsight gains what it gains on the sets that did not choose it; its
    accuracy is that of plain softmax on all sets, and this gain. Headroom is over those sets alone,
    for every rule: both accuracies in its ratio are over the same sets.

    Args:
      head: its name.
      scores: one per size, under the same rules.
    """
    rules = list(scores[0].correct)

    def each(measure: Callable[[Score, str], object]) -> np.ndarray:
        return np.array([[measure(score, rule) for score in scores] for rule in rules], float)

    gains = each(lambda s, rule: s.gain(rule, "plain") if "plain" in rules else UNDEFINED[:2])
    headroom = each(score_headroom)
    return Comparison(
        head=head,
        sizes=[score.size for score in scores],
        sets=[score.sets for score in scores],
        chosen_on=[score.chosen_on for score in scores],
        rules=rules,
        accuracy=each(Score.accuracy),
        error=each(Score.standard_error),
        p_plain=each(lambda score, rule: _p_against(score, rule, "plain")),
        p_paper=each(lambda score, rule: _p_against(score, rule, "paper")),
        p_own=each(lambda score, rule: _p_against(score, rule, "own")),
        gain=gains[..., 0],
        gain_error=gains[..., 1],
        headroom=headroom[..., 0],
        headroom_low=headroom[..., 1],
        headroom_high=headroom[..., 2],
        hindsight_beta=np.array([score.hindsight_beta for score in scores]),
    )


def _p_against(score: Score, rule: str, other: str) -> float:
    if other == rule or other not in score.correct:
        return np.nan
    return paired_p(score.outcomes(rule, other), score.outcomes(other, rule))


def paired_p(a: np.ndarray, b: np.ndarray) -> float:
    """p of a two-sided paired t-test; NaN of one pair, or of two rules that do not differ.

    Where all pairs differ alike, which has no t, that of the sign test.
    """
    difference = a - b
    if len(a) < 2 or np.abs(difference).max() < ROUNDING:
        return np.nan
    if np.ptp(difference) <= ROUNDING:
        return float(2.0 ** (1 - len(a)))
    t = difference.mean() / standard_error(difference)
    return float(2 * stdtr(len(a) - 1, -abs(t)))  # importing scipy.stats takes longer than all else


def score_headroom(score: Score, rule: str) -> tuple[float, float, float]:
    """(share of hindsight's gain, its 95 % interval), NaN where hindsight gains nothing."""
    if rule == "plain" or not {"plain", "hindsight"} <= score.correct.keys():
        return UNDEFINED
    gains = gains_over_plain(score, rule)
    return headroom_share(gains.mean(axis=0), _resample_sets(gains))


def gains_over_plain(score: Score, rule: str) -> np.ndarray:
    """(sets, 2): what a rule, and what hindsight, adds to plain softmax on each set."""
    plain = score.outcomes("plain", "hindsight")
    return np.stack(
        [score.outcomes(name, "hindsight") - plain for name in (rule, "hindsight")], axis=1
    )


def _resample_sets(gains: np.ndarray) -> np.ndarray:
    """(N_RESAMPLES, 2) mean gains over sets drawn with replacement."""
    # Sets differ in nine ways only: how often each is drawn is multinomial.
    kinds, counts = np.unique(gains, axis=0, return_counts=True)
    n_sets = counts.sum()
    drawn = np.random.default_rng(0).multinomial(n_sets, counts / n_sets, N_RESAMPLES)
    means: np.ndarray = drawn @ kinds / n_sets
    return means


def headroom_share(gains: np.ndarray, resampled: np.ndarray) -> tuple[float, float, float]:
    """(share, its 95 % interval) of two gains, a rule's and hindsight's, and resamples of them."""
    low, _ = np.percentile(resampled[:, 1], INTERVAL)
    if not low > 0:
        return UNDEFINED
    shares = resampled[:, 0] / np.where(resampled[:, 1] > 0, resampled[:, 1], np.nan)
    low, high = np.nanpercentile(shares, INTERVAL)
    return float(gains[0] / gains[1]), float(low), float(high)
