"""The batches of examples of a fit through a model, in an order of their own."""

from collections.abc import Iterator
from itertools import cycle

import numpy as np

from calibrate.datasets.examples import ExampleSet
from calibrate.model.questions import answers_of

TOKENS_A_STEP = 4096
MAX_OF_A_CELL = 8  # examples in a batch


class BatchSampler:
    """Batches of about `tokens` tokens of answers, without end, with `n_answers` in the mean.

    A batch has as many examples of each cell as it has room for. Where one of each cell is too
    much, it has some cells, and the next batch the next ones. In `n_once` batches, an epoch, each
    example comes once.
    The right answers to one question come together, and count as one.
    """

    def __init__(
        self, examples: ExampleSet, indices: np.ndarray, seed: int, tokens: int = TOKENS_A_STEP
    ):
        self._answers = {x[0]: x for x in answers_of(examples, indices.tolist())}
        firsts = np.array(list(self._answers), int)
        cell = np.array([examples.examples[i].cell for i in firsts])
        lengths = np.array(
            [sum(len(examples.examples[i].tokens) for i in x) for x in self._answers.values()]
        )
        members = {int(i): firsts[cell == i] for i in np.unique(cell)}
        length = {i: int(lengths[cell == i].max()) for i in members}
        answers = [i for i in members if not examples.cells[i].text]
        has_room_for = tokens // sum(length[i] for i in answers)
        self._of_each = min(MAX_OF_A_CELL, max(1, has_room_for))
        answers = np.random.default_rng(seed).permutation(answers).tolist()  # templates are mixed
        sizes = [self._of_each * length[i] for i in answers]
        self._groups = _groups(answers, sizes, tokens)
        self.n_answers = self._of_each * len(answers) / len(self._groups)
        most = max(len(members[i]) for i in answers)
        self.n_once = len(self._groups) * -(-most // self._of_each)
        self._members, self._seed = members, seed

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(self._seed)
        streams = {i: _shuffled(members, rng) for i, members in self._members.items()}
        for cells in cycle(self._groups):
            firsts = [next(streams[i]) for i in cells for _ in range(self._of_each)]
            yield [answer for first in firsts for answer in self._answers[first]]


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
