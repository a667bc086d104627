"""Groups and splits of a model's examples, and the batches of the calibration split.

* The examples of a group are dependent, such as the lines of one prompt, or windows of text from
  one segment; a group is never divided between splits.
* Of four groups of a cell, in turn, two are for calibration, one for validation and one for test.
  From MIN_TEMPLATES prompt templates on, whole templates are held out, since a fit to a few may not
  generalise: in their order the last quarter is for test, the quarter before it for validation, and
  the others for calibration, except for one group of four, which is for test. Groups with several
  templates rule this out.
* No text is for calibration: windows are for validation and test in turn. From MIN_TEMPLATES text
  domains on, the last half of the domains is for test and the others are for validation. A segment
  is in the same split at every length, so that no token is in two splits.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import cycle

import numpy as np

from calibrate.prompts.examples import Example, ExampleSet
from calibrate.prompts.retention_text import SPLIT_CYCLE, segment_of_window

CALIBRATION = 0
VALIDATION = 1
TEST = 2
# By place in a cycle of SPLIT_CYCLE groups of a cell.
_SPLITS = np.array([CALIBRATION, TEST, CALIBRATION, VALIDATION])
_TEXT_SPLITS = np.array([VALIDATION, TEST, VALIDATION, TEST])
MIN_TEMPLATES = 6  # from which on some are held out as a whole
MAX_BATCH_TOKENS = 4096
MAX_PER_CELL = 8  # examples of a cell in a batch

# Groups


def assign_groups(examples: ExampleSet) -> np.ndarray:
    """(examples,) int, the segment of each window and the group of each answer; -1: independent."""
    segment = assign_segments(examples)
    group = np.array([example.group for example in examples.examples])
    first = segment.max(initial=-1) + 1
    return np.where(segment >= 0, segment, np.where(group >= 0, first + group, -1))


def assign_segments(examples: ExampleSet) -> np.ndarray:
    """(examples,) int, the segment of text that each window is cut from; -1 for answers.

    A domain has as many segments as longest windows, which are as long as a segment.
    """
    cells, places = examples.cells, _group_places(examples.examples)
    cell = np.array([example.cell for example in examples.examples])
    segments, first = np.full(len(cell), -1), 0
    for name in dict.fromkeys(c.template for c in cells if c.text):
        in_domain = {i for i, c in enumerate(cells) if c.text and c.template == name}
        longest = max(in_domain & set(cell.tolist()), key=lambda i: cells[i].length, default=-1)
        n_segments = int((cell == longest).sum())
        for i in np.flatnonzero(np.isin(cell, list(in_domain))):
            segments[i] = first + segment_of_window(int(places[i]), n_segments)[0]
        first = segments.max(initial=-1) + 1
    return segments


def _group_places(examples: Sequence[Example]) -> np.ndarray:
    """(examples,) the place of each example's group in the cell where the group first occurs."""
    place_of_group, n_groups = dict[int, int](), Counter[int]()
    places = np.empty(len(examples), int)
    for i, example in enumerate(examples):
        place = place_of_group.get(example.group) if example.group >= 0 else None
        if place is None:
            place = n_groups[example.cell]
            n_groups[example.cell] += 1
            place_of_group[example.group] = place
        places[i] = place
    return places


# Splits


def assign_splits(examples: ExampleSet) -> np.ndarray:
    """(examples,) int, the split of each example."""
    turns, whole = _group_places(examples.examples) % SPLIT_CYCLE, whole_template_splits(examples)
    cell = np.array([example.cell for example in examples.examples])
    is_text = np.array([x.text for x in examples.cells])[cell]
    by_turn = np.where(is_text, _TEXT_SPLITS[turns], _SPLITS[turns])
    splits: np.ndarray = by_turn.copy()
    for i, of_template in enumerate(whole):
        if of_template == CALIBRATION:
            splits[(cell == i) & (by_turn == VALIDATION)] = CALIBRATION
        elif of_template is not None:
            splits[cell == i] = of_template
    return splits


def whole_template_splits(examples: ExampleSet) -> list[int | None]:
    """The split of each cell's template, if templates belong to splits as a whole; else None."""
    cells, split_of = examples.cells, dict[tuple[str, bool], int]()
    for text in (False, True):
        names = list(dict.fromkeys(cell.template for cell in cells if cell.text == text))
        n = len(names)
        if n < MIN_TEMPLATES or (not text and _mixes_templates(examples)):
            continue
        n_test = n // (2 if text else 4)
        n_calibration = 0 if text else n - 2 * n_test
        splits = [CALIBRATION] * n_calibration + [VALIDATION] * (n - n_calibration - n_test)
        splits += [TEST] * n_test
        split_of |= zip([(name, text) for name in names], splits, strict=True)
    return [split_of.get((cell.template, cell.text)) for cell in cells]


def _mixes_templates(examples: ExampleSet) -> bool:
    """True if a group has examples of several templates."""
    grouped = [x for x in examples.examples if x.group >= 0]
    pairs = {(x.group, examples.cells[x.cell].template) for x in grouped}
    return len(pairs) > len({x.group for x in grouped})


def split(examples: ExampleSet, name: int) -> list[int]:
    """The indices of the examples of a split: CALIBRATION, VALIDATION or TEST."""
    return np.flatnonzero(assign_splits(examples) == name).tolist()


def limit_per_cell(
    examples: ExampleSet, indices: Sequence[int], most: int, whole: Collection[int] = ()
) -> list[int]:
    """Chooses, of some examples, the first of each cell.

    Args:
      most: examples of a cell.
      whole: cells of which all are chosen.
    """
    chosen, counts = list[int](), Counter[int]()
    for i in indices:
        cell = examples.examples[i].cell
        counts[cell] += 1
        if cell in whole or counts[cell] <= most:
            chosen.append(i)
    return sorted(chosen)


# Batches


class BatchSampler:
    """An endless sequence of batches of answers.

    A batch has as many answers of each cell as fit into `tokens`. If one of each cell is too
    much, a batch has some of the cells, and the next batch has the next ones.

    Attributes:
      n_answers: the mean number of answers in a batch.
      n_epoch: the number of batches after which each example has come once.
    """

    def __init__(
        self, examples: ExampleSet, indices: np.ndarray, seed: int, tokens: int = MAX_BATCH_TOKENS
    ):
        cell = np.array([examples.examples[i].cell for i in indices])
        lengths = np.array([len(examples.examples[i].tokens) for i in indices])
        members = {int(i): indices[cell == i] for i in np.unique(cell)}
        length = {i: int(lengths[cell == i].max()) for i in members}
        cells = [i for i in members if not examples.cells[i].text]
        n_fitting = tokens // sum(length[i] for i in cells)
        self._n_per_cell = min(MAX_PER_CELL, max(1, n_fitting))
        cells = np.random.default_rng(seed).permutation(cells).tolist()  # templates are mixed
        sizes = [self._n_per_cell * length[i] for i in cells]
        self._cells_of_batches = _divide(cells, sizes, tokens)
        n_batches = len(self._cells_of_batches)
        self.n_answers = self._n_per_cell * len(cells) / n_batches
        most = max(len(members[i]) for i in cells)
        self.n_epoch = n_batches * -(-most // self._n_per_cell)
        self._members, self._seed = members, seed

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(self._seed)
        streams = {i: _shuffle_forever(members, rng) for i, members in self._members.items()}
        for cells in cycle(self._cells_of_batches):
            yield [next(streams[i]) for i in cells for _ in range(self._n_per_cell)]


def _divide(items: list[int], sizes: list[int], room: float) -> list[list[int]]:
    """Divides items in their order into parts of at most `room`, or of one item."""
    parts, left = list[list[int]](), 0.0
    for item, size in zip(items, sizes, strict=True):
        if not parts or size > left:
            parts.append([])
            left = room
        parts[-1].append(item)
        left -= size
    return parts


def _shuffle_forever(items: np.ndarray, rng: np.random.Generator) -> Iterator[int]:
    """The items in a random order, and then in another one, without end."""
    while True:
        yield from rng.permutation(items).tolist()
