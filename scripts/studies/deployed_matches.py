"""Precision and recall of a matching head under a rule, and saved image pairs.

LightGlue scores the match of keypoints i and j with the softmax of row i times the softmax of
column j times both keypoints' matchability. A match is accepted if each is the best for the other
and the score is above a threshold. A rule replaces the inverse temperature 1 of both softmaxes.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from deployed_rows import CALIBRATION, TEST
from deployed_rules import ETS, Ets, Rules, beta_of
from scipy.special import log_expit, log_softmax

import calibrate
from calibrate.core.row_batches import row_entropy
from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.evidence.evidence import BASELINE
from calibrate.storage.npz import read_arrays, write_arrays
from calibrate.store.fit import Fit

FILTER_THRESHOLD = 0.1  # LightGlue's default: matches of a lower score are rejected
MATCH_TOLERANCE = 3.0  # pixels from the projected place to a match that counts as right
MATCH_RULES = (BASELINE, CONSTANT, POLYNOMIAL, ETS)

BetaFunction = Callable[[np.ndarray], np.ndarray]  # (rows, n) logits -> (rows,) beta


class MatchedPair(NamedTuple):
    """The head's last layer on one image pair at one size; pruned keypoints have no line."""

    similarity: np.ndarray  # (rows, columns), before the softmax
    matchability0: np.ndarray  # (rows,) logits that a keypoint has a partner
    matchability1: np.ndarray  # (columns,)
    projected: np.ndarray  # (rows, 2) places of the first image's keypoints in the second, pixels
    keypoints1: np.ndarray  # (columns, 2) of the second image
    cluster: int  # number of the photograph
    split: int
    n_matchable: int  # keypoints with a partner, pruned ones included


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


def match_record(folder: Path, rules: Rules, names: list[str]) -> dict[str, Any]:
    """Precision and recall of matches by rule: at the library's threshold, and at one chosen anew.

    The threshold is the lowest whose precision on the calibration images is at least that of
    softmax at the library's threshold.
    """
    pairs = read_pairs(folder / "pairs.npz")
    splits = {
        split: [pair for pair in pairs if pair.split == split] for split in (CALIBRATION, TEST)
    }
    rules = {BASELINE: calibrate.identity(), **rules}
    found = {
        name: [matches_of(part, rules[name]) for part in splits.values()]
        for name in MATCH_RULES if name in rules
    }  # fmt: skip
    wanted = found[BASELINE][0].counts(FILTER_THRESHOLD)["precision"]
    record: dict[str, Any] = {"pairs": {str(split): len(part) for split, part in splits.items()}}
    for name, (fitted, tested) in found.items():
        threshold = np.nextafter(choose_threshold(fitted.score, fitted.right, wanted), 0)
        record[name] = {
            "library": tested.counts(FILTER_THRESHOLD),
            "threshold": float(threshold),
            "chosen": tested.counts(threshold),
            "images": {names[image]: tested.counts(threshold, image) for image in tested.matchable},
        }
    return record


def choose_threshold(score: np.ndarray, right: np.ndarray, precision: float) -> float:
    """The lowest threshold whose accepted items, score >= it, have at least this precision.

    Without one, the threshold of the highest precision.
    """
    order = np.argsort(-score, kind="stable")
    accepted = np.arange(1, len(order) + 1)
    shares = np.cumsum(right[order]) / accepted
    is_last = np.append(np.diff(score[order]) < 0, True)  # equal scores are accepted together
    enough = np.flatnonzero(is_last & (shares >= precision))
    place = enough[-1] if len(enough) else np.flatnonzero(is_last)[shares[is_last].argmax()]
    return float(score[order][place])


def matches_of(pairs: Iterable[MatchedPair], rule: Fit | Ets) -> Matches:
    """The mutual matches of image pairs under a rule of rows and columns."""

    def beta_function(z: np.ndarray) -> np.ndarray:
        H = row_entropy(z.astype(np.float32)).astype(float)
        return beta_of(rule, H, np.full(len(z), np.log(max(z.shape[1], 2))))

    found, matchable = [], dict[int, int]()
    for pair in pairs:
        score, right = mutual_matches(pair, beta_function)
        found.append((score, right, np.full(len(right), pair.cluster)))
        matchable[pair.cluster] = matchable.get(pair.cluster, 0) + pair.n_matchable
    return Matches(*map(np.concatenate, zip(*found, strict=True)), matchable)


def mutual_matches(pair: MatchedPair, beta_function: BetaFunction) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the mutual nearest matches, and whether each is right; any threshold applies."""
    if not pair.similarity.size:
        return np.zeros(0), np.zeros(0, bool)
    log_score = log_match_scores(pair, beta_function)
    best1 = log_score.argmax(axis=1)
    row = np.arange(len(log_score))
    mutual = log_score.argmax(axis=0)[best1] == row
    row, column = row[mutual], best1[mutual]
    right = distances(pair.projected, pair.keypoints1)[row, column] <= MATCH_TOLERANCE
    return np.exp(log_score[row, column]), right


def log_match_scores(pair: MatchedPair, beta_function: BetaFunction) -> np.ndarray:
    """(rows, columns) log of LightGlue's scores, with a beta for each row and each column."""
    z = np.asarray(pair.similarity, np.float64)
    of_rows = log_softmax(beta_function(z)[:, None] * z, axis=1)
    of_columns = log_softmax(beta_function(z.T)[None, :] * z, axis=0)
    matchable = log_expit(np.asarray(pair.matchability0, np.float64))[:, None]
    return of_rows + of_columns + matchable + log_expit(np.asarray(pair.matchability1, np.float64))


def distances(projected: np.ndarray, keypoints1: np.ndarray) -> np.ndarray:
    """(rows, columns) pixels from the projected places to keypoints of the second image."""
    return np.linalg.norm(projected[:, None] - keypoints1[None], axis=2)


def write_pairs(path: Path, pairs: Iterable[MatchedPair]) -> None:
    """Writes image pairs as npz, atomically; floats as float32, the similarity as float16."""
    arrays = {}
    for number, pair in enumerate(pairs):
        for name, value in pair._asdict().items():
            dtype = int if np.ndim(value) == 0 else np.float32
            dtype = np.float16 if name == "similarity" else dtype
            arrays[f"{number}/{name}"] = np.asarray(value, dtype)
    write_arrays(path, arrays)


def read_pairs(path: Path) -> list[MatchedPair]:
    """The image pairs of a file that `write_pairs` wrote."""
    arrays, fields = read_arrays(path), MatchedPair._fields
    pairs = [
        MatchedPair(*(arrays[f"{number}/{name}"] for name in fields))
        for number in range(len(arrays) // len(fields))
    ]
    return [
        pair._replace(
            similarity=pair.similarity.astype(np.float32), cluster=int(pair.cluster),
            split=int(pair.split), n_matchable=int(pair.n_matchable),
        )
        for pair in pairs
    ]  # fmt: skip
