"""Which examples each step of a fit sees: every template and length equally often."""

from collections.abc import Iterator

import numpy as np

from calibrate.files.examples import ExampleSet

TOKENS_A_STEP = 4096
MOST_OF_A_CELL = 8  # examples in a step


class Schedule:
    """Steps of about TOKENS_A_STEP tokens, without end.

    A step has as many examples of each cell as it has room for. Where one of each cell is too much,
    it has some cells, and the next step the next ones. Text of one length is in every step.

    Args:
      which: the examples that may be seen.
      seed: of their order.

    Attributes:
      n_answers: examples of a step that are answers, in the mean.
    """

    def __init__(self, examples: ExampleSet, which: np.ndarray, seed: int):
        cell = np.array([examples.examples[i].cell for i in which])
        lengths = np.array([len(examples.examples[i].tokens) for i in which])
        members = {int(i): which[cell == i] for i in np.unique(cell)}
        length = {i: int(lengths[cell == i].max()) for i in members}
        self._texts = [i for i in members if examples.cells[i].text]
        answers = [i for i in members if not examples.cells[i].text]
        of_text = sum(length[i] for i in self._texts) / max(1, len(self._texts))
        of_answers = sum(length[i] for i in answers)
        self._of_each = int(TOKENS_A_STEP // (of_answers + of_text))
        self._of_each = min(MOST_OF_A_CELL, max(1, self._of_each))
        room = TOKENS_A_STEP - self._of_each * of_text
        self._groups = _groups(answers, [self._of_each * length[i] for i in answers], room)
        self.n_answers = self._of_each * len(answers) / len(self._groups)
        self._members, self._seed = members, seed

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(self._seed)
        streams = {i: _shuffled(members, rng) for i, members in self._members.items()}
        number = 0
        while True:
            cells = list(self._groups[number % len(self._groups)])
            if self._texts:
                cells.append(self._texts[number % len(self._texts)])
            yield [next(streams[i]) for i in cells for _ in range(self._of_each)]
            number += 1


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
