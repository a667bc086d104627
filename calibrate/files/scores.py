"""Scores on disk: which sets a head got right, one npz file per head and set size.

A file is named for the number of sets and their seed, and holds, per rule, one bit per set
(packed, lowest set first) and "RULE/beta", the constant that a rule chose itself (else NaN).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.errors import CalibrateError
from calibrate.files.arrays import read_arrays, write_arrays
from calibrate.files.whole import remove_leftovers


class Outcome(NamedTuple):
    """What one rule did on the sets of one size."""

    correct: np.ndarray  # bool (sets,)
    beta: float = np.nan  # the constant that the rule chose in hindsight


def scores_path(folder: Path, size: int, sets: int, seed: int) -> Path:
    """Where the scores of one head at one set size are."""
    return folder / f"n{size}-sets{sets}-seed{seed}.npz"


def read_scores(path: Path, sets: int) -> dict[str, Outcome]:
    """Every rule's outcome so far; none if there is no file.

    Raises:
      CalibrateError: the file is damaged.
    """
    if not path.exists():
        return {}
    arrays = read_arrays(path)
    outcomes = {}
    for key in arrays:
        if key.endswith("/beta"):
            continue
        packed, beta = arrays[key], arrays.get(f"{key}/beta", np.empty(0))
        right_form = packed.dtype == np.uint8 and packed.shape == (-(-sets // 8),)
        if not right_form or beta.dtype != np.float64 or beta.shape != ():
            raise CalibrateError(f"{path}: {key!r} is no score of {sets} sets; delete the file")
        correct = np.unpackbits(packed, count=sets).astype(bool)
        outcomes[key] = Outcome(correct, float(beta))
    return outcomes


def write_scores(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Writes every rule's outcome, whole or not at all."""
    remove_leftovers(path.parent, path.name)
    arrays: dict[str, ArrayLike] = {}
    for key, outcome in outcomes.items():
        arrays[key] = np.packbits(outcome.correct)
        arrays[f"{key}/beta"] = np.float64(outcome.beta)
    write_arrays(path, arrays)
