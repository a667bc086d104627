"""The expected calibration error (ECE), and the reliability diagram that it is read from."""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import CONFIDENCE, RANKED

MAX_BINS = 10
MIN_IN_BIN = 10  # items


class Reliability(NamedTuple):
    """A reliability diagram: items in bins of equal count, by rising confidence."""

    n: np.ndarray  # (bins,) items
    confidence: np.ndarray  # (bins,) mean p of the top item
    ranked: np.ndarray  # (bins,) share of items whose target is on top
    share: np.ndarray  # (bins,) of the weight, adding up to 1
    chance: float  # the mean calibration error, were each confidence the true share


def expected_calibration_error(diagram: Reliability) -> float:
    """The mean distance of confidence and share ranked first, from 0 to 1."""
    return float(diagram.share @ np.abs(diagram.confidence - diagram.ranked))


def reliability(evidence: Evidence, rule: str) -> Reliability:
    """The share of items with the target on top, by confidence; weighted as in `Evidence.mean`."""
    p = np.minimum(evidence.scores(rule, CONFIDENCE).astype(float), 1)  # rounding
    columns = p, evidence.scores(rule, RANKED), evidence.design.item_weight
    p, ranked, weight = (x[np.argsort(p, kind="stable")] for x in columns)
    n = evidence.n
    of_bin = np.arange(n) * min(MAX_BINS, max(1, n // MIN_IN_BIN)) // n
    share, count = np.bincount(of_bin, weight), np.bincount(of_bin)
    mean, top = (np.bincount(of_bin, weight * x) / share for x in (p, ranked))
    variance = np.bincount(of_bin, weight**2 * p * (1 - p))
    return Reliability(count, mean, top, share, float(np.sqrt(2 / np.pi * variance).sum()))
