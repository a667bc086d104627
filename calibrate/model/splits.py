"""Which examples fit a rule and in which steps, which choose among rules, and which judge.

Of four examples of a cell, in turn, two fit, one chooses and one judges. Where there are six
templates or more, whole templates are kept from the fit, as what is learned of a few may not carry
over: in their order the last quarter judges, the quarter before chooses, and the others fit, but
for one example of four, which judges too.

No text fits: windows choose and judge in turn, and of six registers or more, which are their
templates, the last half judges and the others choose.

Windows of text are cut from stretches: a window's stretch has the same turn at every length, so no
token judges a fit that was chosen by it at another length.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np

from calibrate.files.examples import Cell, Example, ExampleSet

FITTING, CHOOSING, JUDGING = range(3)
_SPLITS = np.array([FITTING, JUDGING, FITTING, CHOOSING])  # of four examples of a cell, in turn
_SPLITS_OF_TEXT = np.array([CHOOSING, JUDGING, CHOOSING, JUDGING])
N_TURNS = len(_SPLITS)
LEAST_TEMPLATES = 6  # of which some choose or judge as a whole
TOKENS_A_STEP = 4096
MOST_OF_A_CELL = 8  # examples in a step


def splits_of(examples: ExampleSet) -> np.ndarray:
    """The split of each example, (examples,) int."""
    turns, wholly = _places(examples.examples) % N_TURNS, whole_templates(examples.cells)
    cell = np.array([example.cell for example in examples.examples])
    is_text = np.array([x.text for x in examples.cells])[cell]
    by_turn = np.where(is_text, _SPLITS_OF_TEXT[turns], _SPLITS[turns])
    splits: np.ndarray = by_turn.copy()
    for i, split in enumerate(wholly):
        if split == FITTING:
            splits[(cell == i) & (by_turn == CHOOSING)] = FITTING
        elif split is not None:
            splits[cell == i] = split
    return splits


def whole_templates(cells: Sequence[Cell]) -> list[int | None]:
    """The split that each cell's template belongs to as a whole; None where there are too few."""
    found = dict[tuple[str, bool], int]()
    for text in (False, True):
        names = list(dict.fromkeys(cell.template for cell in cells if cell.text == text))
        if (n := len(names)) >= LEAST_TEMPLATES:
            n_judging = n // (2 if text else 4)
            n_fitting = 0 if text else n - 2 * n_judging
            parts = [FITTING] * n_fitting + [CHOOSING] * (n - n_fitting - n_judging)
            parts += [JUDGING] * n_judging
            found |= zip([(name, text) for name in names], parts, strict=True)
    return [found.get((cell.template, cell.text)) for cell in cells]


def split(examples: ExampleSet, which: int) -> list[int]:
    """The examples of a split."""
    return np.flatnonzero(splits_of(examples) == which).tolist()


def stretches_of(examples: ExampleSet) -> np.ndarray:
    """(examples,) int, the stretch of text that a window is cut from; -1 of answers.

    A stretch is as long as the longest windows of its text, which tell how many there are.
    """
    cells, places = examples.cells, _places(examples.examples)
    cell = np.array([example.cell for example in examples.examples])
    found, first = np.full(len(cell), -1), 0
    for name in dict.fromkeys(c.template for c in cells if c.text):
        its = {i for i, c in enumerate(cells) if c.text and c.template == name}
        longest = max(its & set(cell.tolist()), key=lambda i: cells[i].length, default=-1)
        n_stretches = int((cell == longest).sum())
        for i in np.flatnonzero(np.isin(cell, list(its))):
            found[i] = first + turn(int(places[i]), n_stretches)[0]
        first = found.max(initial=-1) + 1
    return found


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


class Schedule:
    """Steps of about TOKENS_A_STEP tokens of answers, without end, with `n_answers` in the mean.

    A step has as many examples of each cell as it has room for. Where one of each cell is too much,
    it has some cells, and the next step the next ones. In `n_once` steps each example comes once.
    """

    def __init__(self, examples: ExampleSet, which: np.ndarray, seed: int):
        cell = np.array([examples.examples[i].cell for i in which])
        lengths = np.array([len(examples.examples[i].tokens) for i in which])
        members = {int(i): which[cell == i] for i in np.unique(cell)}
        length = {i: int(lengths[cell == i].max()) for i in members}
        answers = [i for i in members if not examples.cells[i].text]
        has_room_for = TOKENS_A_STEP // sum(length[i] for i in answers)
        self._of_each = min(MOST_OF_A_CELL, max(1, has_room_for))
        answers = np.random.default_rng(seed).permutation(answers).tolist()  # layouts are mixed
        sizes = [self._of_each * length[i] for i in answers]
        self._groups = _groups(answers, sizes, TOKENS_A_STEP)
        self.n_answers = self._of_each * len(answers) / len(self._groups)
        most = max(len(members[i]) for i in answers)
        self.n_once = len(self._groups) * -(-most // self._of_each)
        self._members, self._seed = members, seed

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(self._seed)
        streams = {i: _shuffled(members, rng) for i, members in self._members.items()}
        for cells in cycle(self._groups):
            yield [next(streams[i]) for i in cells for _ in range(self._of_each)]


def _groups(items: list[int], sizes: list[int], room: float) -> list[list[int]]:
    """The items in their order, in groups that have room; of one item at least."""
    groups, left = list[list[int]](), 0.0
    for item, size in zip(items, sizes, strict=True):
        if not groups or size > left:
            groups.append([])
            left = room
        groups[-1].append(item)
        left -= size
    return groups


def _shuffled(items: np.ndarray, rng: np.random.Generator) -> Iterator[int]:
    """The items in a new order each time round."""
    while True:
        yield from rng.permutation(items).tolist()
