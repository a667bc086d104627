"""The numbers that users of the heads read: accepted matches, and answers above a confidence.

What the packages of reaction heads answer is in deployed_reactions_package.py.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from deployed_rows import CALIBRATION, TEST
from deployed_rules import ETS, FittedRule, HeadRows, choose_threshold, score
from match_metrics import FILTER_THRESHOLD, mutual_matches, read_pairs

from calibrate.core.row_batches import row_entropy
from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.evidence.evidence import BASELINE

MATCH_RULES = (BASELINE, CONSTANT, POLYNOMIAL, ETS)
ACCEPTED_AT = 0.5  # confidence of a passage


class Matches(NamedTuple):
    """Mutual matches of image pairs: score, right or not, and the image; keypoints by image."""

    score: np.ndarray
    right: np.ndarray
    image: np.ndarray
    matchable: dict[int, int]  # by image, keypoints that have a partner

    def counts(self, threshold: float, image: int | None = None) -> dict[str, float]:
        """Precision and recall at a threshold, of all images or of one."""
        accepted = self.score > threshold
        total = sum(self.matchable.values()) if image is None else self.matchable[image]
        if image is not None:
            accepted &= self.image == image
        right = int(self.right[accepted].sum())
        n = int(accepted.sum())
        return {"accepted": n, "precision": right / max(n, 1), "recall": right / max(total, 1)}


def match_record(folder: Path, rules: Mapping[str, FittedRule], names: list[str]) -> dict[str, Any]:
    """Precision and recall of matches by rule: at the library's threshold, and at one chosen anew.

    The threshold is the lowest whose precision on the calibration images is at least that of
    softmax at the library's threshold.
    """
    pairs = list(read_pairs(folder / "pairs.npz"))
    splits = {
        split: [pair for pair in pairs if pair.split == split] for split in (CALIBRATION, TEST)
    }
    record: dict[str, Any] = {"pairs": {str(split): len(part) for split, part in splits.items()}}
    wanted = None
    for name in MATCH_RULES:
        if name != BASELINE and name not in rules:
            continue
        fitted, tested = (matches_of(part, rules.get(name)) for part in splits.values())
        if wanted is None:
            wanted = fitted.counts(FILTER_THRESHOLD)["precision"]
        threshold = np.nextafter(choose_threshold(fitted.score, fitted.right, wanted), 0)
        record[name] = {
            "library": tested.counts(FILTER_THRESHOLD),
            "threshold": float(threshold),
            "chosen": tested.counts(threshold),
            "images": {names[image]: tested.counts(threshold, image) for image in tested.matchable},
        }
    return record


def matches_of(pairs: Iterable[Any], rule: FittedRule | None) -> Matches:
    """The mutual matches of image pairs under a rule of rows and columns; None is softmax."""

    def beta_of(z: np.ndarray) -> np.ndarray:
        if rule is None:
            return np.ones(len(z))
        H = row_entropy(z.astype(np.float32)).astype(float)
        return rule.beta(H, np.full(len(z), np.log(max(z.shape[1], 2))))

    scores, rights, images, matchable = [], [], [], dict[int, int]()
    for pair in pairs:
        last_layer = pair.similarity, pair.matchability0, pair.matchability1, pair.truth
        score_of_match, right = mutual_matches(*last_layer, beta_of)
        scores.append(score_of_match)
        rights.append(right)
        images.append(np.full(len(right), pair.cluster))
        matchable[pair.cluster] = matchable.get(pair.cluster, 0) + pair.n_matchable
    return Matches(*map(np.concatenate, (scores, rights, images)), matchable)


def accepted_answers(rows: HeadRows, rules: Mapping[str, FittedRule]) -> dict[str, Any]:
    """By rule: the share of rows whose top item has the confidence, and how many are right."""
    scores, record = score(rows, rules), {}
    for name, confidence in scores.confidence.items():
        accepted = confidence >= ACCEPTED_AT
        precision = float(scores.right_on_top[accepted].mean()) if accepted.any() else None
        record[name] = {"accepted": float(accepted.mean()), "precision": precision}
    return record
