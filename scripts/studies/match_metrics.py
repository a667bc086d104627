"""Precision and recall of a dual-softmax matching head under a rule, and saved image pairs.

LightGlue scores the match of keypoints i and j with the softmax of row i times the softmax of
column j times both keypoints' matchability. A match is accepted if each is the best for the other
and the score is above a threshold. A rule replaces the inverse temperature 1 of both softmaxes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import log_expit, log_softmax

from calibrate.storage.npz import read_arrays, write_arrays

FILTER_THRESHOLD = 0.1  # LightGlue's default: matches of a lower score are rejected
MATCH_TOLERANCE = 3.0  # pixels from the projected place to a match that counts as right
FACTS = ("n", "group", "cluster", "split", "n_matches", "n_matchable")

BetaFunction = Callable[[np.ndarray], np.ndarray]  # (rows, n) logits -> (rows,) beta


class MatchedPair(NamedTuple):
    """The head's last layer on one image pair at one size; pruned keypoints have no line."""

    similarity: np.ndarray  # (rows, columns), before the softmax
    matchability0: np.ndarray  # (rows,) logits that a keypoint has a partner
    matchability1: np.ndarray  # (columns,)
    projected: np.ndarray  # (rows, 2) places of the first image's keypoints in the second, pixels
    keypoints1: np.ndarray  # (columns, 2) of the second image
    n: int  # keypoints of an image before pruning
    group: int  # number of the image pair
    cluster: int  # number of the photograph
    split: int
    n_matches: int  # that the package accepts
    n_matchable: int  # keypoints with a partner, pruned ones included

    @property
    def truth(self) -> np.ndarray:
        """(rows, columns) bool, as of `right_matches`."""
        return right_matches(self.projected, self.keypoints1)


def mutual_matches(
    similarity: np.ndarray,
    matchability0: np.ndarray,
    matchability1: np.ndarray,
    truth: np.ndarray,
    beta_function: BetaFunction,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the mutual nearest matches, and whether each is right; any threshold applies."""
    if not similarity.size:
        return np.zeros(0), np.zeros(0, bool)
    log_score = log_match_scores(similarity, matchability0, matchability1, beta_function)
    best1 = log_score.argmax(axis=1)
    row = np.arange(len(log_score))
    mutual = log_score.argmax(axis=0)[best1] == row
    row, column = row[mutual], best1[mutual]
    return np.exp(log_score[row, column]), truth[row, column]


def log_match_scores(
    similarity: np.ndarray,
    matchability0: np.ndarray,
    matchability1: np.ndarray,
    beta_function: BetaFunction,
) -> np.ndarray:
    """(rows, columns) log of LightGlue's scores, with a beta for each row and each column."""
    z = np.asarray(similarity, np.float64)
    of_rows = log_softmax(beta_function(z)[:, None] * z, axis=1)
    of_columns = log_softmax(beta_function(z.T)[None, :] * z, axis=0)
    matchable = log_expit(np.asarray(matchability0, np.float64))[:, None]
    return of_rows + of_columns + matchable + log_expit(np.asarray(matchability1, np.float64))


def right_matches(
    projected: np.ndarray, keypoints1: np.ndarray, tolerance: float = MATCH_TOLERANCE
) -> np.ndarray:
    """(rows, columns) bool: keypoints of the second image near the projected place."""
    distance = np.linalg.norm(projected[:, None] - keypoints1[None], axis=2)
    return distance <= tolerance


def write_pairs(path: Path, pairs: list[MatchedPair]) -> None:
    """Writes image pairs as npz, atomically; the similarity as float16, matrices flat."""
    columns = {
        "similarity": np.concatenate([pair.similarity.ravel() for pair in pairs]),
        "shape": np.array([pair.similarity.shape for pair in pairs], np.int32),
        "matchability0": np.concatenate([pair.matchability0 for pair in pairs]),
        "matchability1": np.concatenate([pair.matchability1 for pair in pairs]),
        "projected": np.concatenate([pair.projected for pair in pairs]),
        "keypoints1": np.concatenate([pair.keypoints1 for pair in pairs]),
    }
    half = {"similarity": np.float16}
    arrays = {key: value.astype(half.get(key, np.float32)) for key, value in columns.items()}
    arrays["shape"] = columns["shape"]
    facts = {key: np.array([getattr(pair, key) for pair in pairs], np.int32) for key in FACTS}
    write_arrays(path, {**arrays, **facts})


def read_pairs(path: Path) -> Iterator[MatchedPair]:
    """The image pairs of a file that `write_pairs` wrote."""
    arrays = read_arrays(path)
    shape = arrays["shape"]
    ends = np.cumsum(np.column_stack([shape, shape.prod(axis=1, dtype=np.int64)]), axis=0)
    starts = np.vstack([np.zeros((1, 3), np.int64), ends])
    for number, (rows, columns) in enumerate(shape):
        row, column, entry = (slice(*pair) for pair in starts[number : number + 2].T)
        yield MatchedPair(
            arrays["similarity"][entry].reshape(rows, columns).astype(np.float32),
            arrays["matchability0"][row],
            arrays["matchability1"][column],
            arrays["projected"][row],
            arrays["keypoints1"][column],
            **{key: int(arrays[key][number]) for key in FACTS},
        )
