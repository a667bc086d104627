"""The expected calibration error (ECE), and the reliability diagram that it is read from."""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import CONFIDENCE, RANKED

MAX_BINS = 10
MIN_IN_BIN = 10  # items, on average
DECIMALS = 6  # to which confidences are equal
ROUNDING = 1e-9  # of a share of the weight


class Reliability(NamedTuple):
    """A reliability diagram: items in bins of equal weight, by rising confidence."""

    n: np.ndarray  # (bins,) items
    confidence: np.ndarray  # (bins,) mean p of the top item
    ranked: np.ndarray  # (bins,) share of items whose target is on top
    share: np.ndarray  # (bins,) of the weight, adding up to 1
    chance: float  # the mean calibration error, were each confidence the true share


def ranked_first(logits: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(rows,) 1 where the target has the highest logit; of a tie of k items 1 / k.

    This is the probability that arg max, which breaks ties at random, picks a target.

    Args:
      logits: (rows, n), -inf where masked.
      target: (rows,) int, or (rows, n) bool where several items are right.
    """
    top = logits == logits.max(axis=1, keepdims=True)
    if target.ndim == 1:
        target = np.arange(logits.shape[1]) == target[:, None]
    return np.asarray((top & target).sum(axis=1) / np.maximum(top.sum(axis=1), 1))


def expected_calibration_error(diagram: Reliability) -> float:
    """The mean distance of confidence and share ranked first, from 0 to 1."""
    return float(diagram.share @ np.abs(diagram.confidence - diagram.ranked))


def reliability(confidence: np.ndarray, ranked: np.ndarray, weight: np.ndarray) -> Reliability:
    """The share of items with the target on top, by confidence; all arrays are (items,).

    The items are in at most 10 bins of about equal weight. Items of equal confidence share a bin,
    so that the order of the items does not matter.
    """
    used = weight > 0
    p = np.minimum(confidence[used].astype(float), 1)  # rounding
    ranked, share = ranked[used], weight[used] / weight[used].sum()
    place = np.unique(np.round(p, DECIMALS), return_inverse=True)[1]
    of_value = np.bincount(place, share)
    before = np.cumsum(of_value) - of_value  # the weight of smaller confidences
    n_bins = min(MAX_BINS, max(1, len(p) // MIN_IN_BIN))
    bins = np.floor(n_bins * before + ROUNDING).astype(int)
    of_item = np.unique(bins, return_inverse=True)[1][place]
    total, count = np.bincount(of_item, share), np.bincount(of_item)
    mean, top = (np.bincount(of_item, share * x) / total for x in (p, ranked))
    variance = np.bincount(of_item, share**2 * p * (1 - p))
    return Reliability(count, mean, top, total, float(np.sqrt(2 / np.pi * variance).sum()))


def reliability_of(evidence: Evidence, rule: str) -> Reliability:
    """The reliability diagram of a rule on all items of some evidence."""
    confidence, ranked = (evidence.scores(rule, metric) for metric in (CONFIDENCE, RANKED))
    return reliability(confidence, ranked, evidence.weight)
