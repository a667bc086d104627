"""The expected calibration error (ECE) and the reliability diagram."""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import CONFIDENCE, RANKED

MAX_BINS = 10
MIN_IN_BIN = 10  # items, on average
DECIMALS = 6  # confidences that agree to so many are equal
SHARE_ROUNDING = 1e-9  # of a sum of shares of the weight


class Reliability(NamedTuple):
    """A reliability diagram: items in bins of equal weight, by rising confidence."""

    n: np.ndarray  # (bins,) items
    confidence: np.ndarray  # (bins,) mean probability of the item with the highest logit
    ranked: np.ndarray  # (bins,) share of items whose target is ranked first
    share: np.ndarray  # (bins,) of the weight; the sum is 1
    chance: float  # the expected ECE of as many items if every confidence were right


def ranked_first(logits: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(rows,) probability that argmax, which breaks ties at random, picks a target.

    It is 1 where the target has the highest logit, and 1 / k in a tie of k items.

    Args:
      logits: (rows, n), -inf where masked.
      target: (rows,) int, or (rows, n) bool where several items are right.
    """
    top = logits == logits.max(axis=1, keepdims=True)
    if target.ndim == 1:
        target = np.arange(logits.shape[1]) == target[:, None]
    return np.asarray((top & target).sum(axis=1) / np.maximum(top.sum(axis=1), 1))


def expected_calibration_error(diagram: Reliability) -> float:
    """ECE: the mean distance between confidence and the share ranked first, from 0 to 1."""
    return float(diagram.share @ np.abs(diagram.confidence - diagram.ranked))


def reliability(confidence: np.ndarray, ranked: np.ndarray, weight: np.ndarray) -> Reliability:
    """The reliability diagram of items, in at most 10 bins of about equal weight.

    Items of equal confidence share a bin, so that the order of the items does not matter.

    Args:
      confidence: (items,) probability of the item with the highest logit.
      ranked: (items,) see `ranked_first`.
      weight: (items,) >= 0.
    """
    used = weight > 0
    p = np.minimum(confidence[used].astype(float), 1)  # may exceed 1 by rounding
    ranked, share = ranked[used], weight[used] / weight[used].sum()
    place = np.unique(np.round(p, DECIMALS), return_inverse=True)[1]
    of_value = np.bincount(place, share)
    before = np.cumsum(of_value) - of_value  # the share of smaller confidences
    n_bins = min(MAX_BINS, max(1, len(p) // MIN_IN_BIN))
    bins = np.floor(n_bins * before + SHARE_ROUNDING).astype(int)
    of_item = np.unique(bins, return_inverse=True)[1][place]
    total, count = np.bincount(of_item, share), np.bincount(of_item)
    mean, top = (np.bincount(of_item, share * values) / total for values in (p, ranked))
    variance = np.bincount(of_item, share**2 * p * (1 - p))
    return Reliability(count, mean, top, total, float(np.sqrt(2 / np.pi * variance).sum()))


def reliability_of(evidence: Evidence, rule: str) -> Reliability:
    """The reliability diagram of a rule on the items of some evidence."""
    confidence, ranked = (evidence.scores(rule, metric) for metric in (CONFIDENCE, RANKED))
    return reliability(confidence, ranked, evidence.weight)
