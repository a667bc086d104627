"""Which examples fit a rule, which choose among rules, and which judge the one published."""

from collections.abc import Sequence

import numpy as np

from calibrate.files.examples import Example

N_PARTS = 3
FITTING, CHOOSING, JUDGING = range(N_PARTS)
_PARTS = np.array([FITTING, JUDGING, FITTING, CHOOSING])  # of four examples of a cell, in turn
N_TURNS = len(_PARTS)


def parts_of(examples: Sequence[Example]) -> np.ndarray:
    """The part of each example, (examples,) int: in every cell a half, a quarter and a quarter."""
    cells = np.array([example.cell for example in examples])
    place = np.empty(len(cells), int)
    for cell in np.unique(cells):
        members = cells == cell
        place[members] = np.arange(members.sum())
    parts: np.ndarray = _PARTS[place % N_TURNS]
    return parts
