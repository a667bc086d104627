"""Scores on disk: which sets a head got right, one npz file per head and set size.

A file is named for the number of sets and their seed, and holds `about`, the head's fingerprint and
the version of this layout; and per rule one bit per set (packed, lowest set first), and
"RULE/beta", the constant that the rule chose itself (else NaN).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.errors import CalibrateError
from calibrate.files.atomic_io import locked, remove_leftovers
from calibrate.files.npz import read_arrays, write_arrays

LAYOUT = "calibrate.scores 1"


class Outcome(NamedTuple):
    """What one rule did on the sets of one size."""

    correct: np.ndarray  # bool (sets,)
    beta: float = np.nan  # the constant that the rule chose in hindsight


def scores_path(folder: Path, size: int, sets: int, seed: int) -> Path:
    """Where the scores of one head at one set size are."""
    return folder / f"n{size}-sets{sets}-seed{seed}.npz"


def read_scores(path: Path, fingerprint: str, sets: int) -> dict[str, Outcome]:
    """Every rule's outcome so far; none if there is no file.

    Raises:
      CalibrateError: the file is damaged, or of another head.
    """
    if not path.exists():
        return {}
    arrays = read_arrays(path)
    about = arrays.pop("about", np.empty(0, np.uint8))
    if about.tobytes() != _about(fingerprint):
        raise CalibrateError(
            f"{path} holds scores of another head or version; delete the file, or choose "
            "another folder"
        )
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


def add_scores(path: Path, fingerprint: str, sets: int, outcomes: Mapping[str, Outcome]) -> None:
    """Adds outcomes to those that are there, whole or not at all; processes take turns."""
    with locked(path.parent):
        remove_leftovers(path.parent, path.name)
        arrays: dict[str, ArrayLike] = {"about": np.frombuffer(_about(fingerprint), np.uint8)}
        for key, outcome in {**read_scores(path, fingerprint, sets), **outcomes}.items():
            arrays[key] = np.packbits(outcome.correct)
            arrays[f"{key}/beta"] = np.float64(outcome.beta)
        write_arrays(path, arrays)


def _about(fingerprint: str) -> bytes:
    return f"{LAYOUT}|{fingerprint}".encode()
