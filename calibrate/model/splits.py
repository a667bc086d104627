"""Which examples fit a rule, which choose among rules, and which judge the one published.

Examples of a cell take turns. Windows of text are cut from stretches: a window's stretch has the
same turn at every length, so no token judges a fit that was fitted to it at another length.
"""

from collections.abc import Sequence

import numpy as np

from calibrate.files.examples import Example, ExampleSet

N_SPLITS = 3
FITTING, CHOOSING, JUDGING = range(N_SPLITS)
_SPLITS = np.array([FITTING, JUDGING, FITTING, CHOOSING])  # of four examples of a cell, in turn
N_TURNS = len(_SPLITS)


def splits_of(examples: Sequence[Example]) -> np.ndarray:
    """The split of each example, (examples,) int: in every cell a half, a quarter and a quarter."""
    splits: np.ndarray = _SPLITS[_places(examples) % N_TURNS]
    return splits


def split(examples: ExampleSet, which: int) -> list[int]:
    """The examples of a split."""
    found: list[int] = np.flatnonzero(splits_of(examples.examples) == which).tolist()
    return found


def stretches_of(examples: ExampleSet) -> np.ndarray:
    """(examples,) int, the stretch of text that a window is cut from; -1 of answers.

    A stretch is as long as the longest windows, which tell how many there are. Where windows were
    cut otherwise, those of one place at each length share a number.
    """
    cell = np.array([example.cell for example in examples.examples])
    of_text = np.array([c.text for c in examples.cells])[cell]
    if not of_text.any():
        return np.full(len(cell), -1)
    longest = max(set(cell[of_text]), key=lambda i: examples.cells[i].length)
    n_stretches = int((cell == longest).sum())
    places = _places(examples.examples)
    pairs = zip(places.tolist(), of_text.tolist(), strict=True)
    return np.array([turn(i, n_stretches)[0] if is_text else -1 for i, is_text in pairs])


def turn(number: int, n_stretches: int) -> tuple[int, int]:
    """The stretch of a window, by its number in its cell, and the window's place in that."""
    first, later = number % N_TURNS, number // N_TURNS
    of_turn = len(range(first, n_stretches, N_TURNS))
    place, behind = divmod(later, max(1, of_turn))
    return first + N_TURNS * behind, place


def _places(examples: Sequence[Example]) -> np.ndarray:
    """(examples,) the place of each in its cell."""
    cells = np.array([example.cell for example in examples])
    places = np.empty(len(cells), int)
    for cell in np.unique(cells):
        members = cells == cell
        places[members] = np.arange(members.sum())
    return places
