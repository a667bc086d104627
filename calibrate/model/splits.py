"""Calibration, validation and test split of a model's examples.

Of four groups of examples of a cell, in turn, two are for calibration, one for validation and one
for test: a group, such as the lines of one prompt, is never divided, and most examples are groups
of their own. Where there are six prompt templates or more, whole templates are held out, as a fit
to a few may not generalise: in their order the last quarter is for test, the quarter before for
validation, and the others for calibration, but for one group of four, which is for test, too.
Groups that have several templates rule this out.

No text is for calibration: windows are for validation and test in turn, and of six text domains or
more, which are their templates, the last half is for test and the others for validation.

Windows of text are cut from segments: a window's segment has the same fold at every length, so that
no token is in the test split at one length and in the validation split at another.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from calibrate.datasets.examples import Example, ExampleSet
from calibrate.model.questions import answers_of
from calibrate.prompts.retention_text import N_FOLDS, segment_of_window

CALIBRATION = 0
VALIDATION = 1
TEST = 2
# Of N_FOLDS groups of a cell, in turn.
_SPLITS = np.array([CALIBRATION, TEST, CALIBRATION, VALIDATION])
_SPLITS_OF_TEXT = np.array([VALIDATION, TEST, VALIDATION, TEST])
MIN_TEMPLATES = 6  # of which some are held out as a whole


def splits_of(examples: ExampleSet) -> np.ndarray:
    """The split of each example, (examples,) int."""
    folds, wholly = _places(examples.examples) % N_FOLDS, whole_templates(examples)
    cell = np.array([example.cell for example in examples.examples])
    is_text = np.array([x.text for x in examples.cells])[cell]
    by_fold = np.where(is_text, _SPLITS_OF_TEXT[folds], _SPLITS[folds])
    splits: np.ndarray = by_fold.copy()
    for i, split in enumerate(wholly):
        if split == CALIBRATION:
            splits[(cell == i) & (by_fold == VALIDATION)] = CALIBRATION
        elif split is not None:
            splits[cell == i] = split
    return splits


def whole_templates(examples: ExampleSet) -> list[int | None]:
    """The split that each cell's template belongs to as a whole; None if it does not."""
    cells, split_of = examples.cells, dict[tuple[str, bool], int]()
    for text in (False, True):
        names = list(dict.fromkeys(cell.template for cell in cells if cell.text == text))
        if (n := len(names)) >= MIN_TEMPLATES and not (not text and mixes_templates(examples)):
            n_test = n // (2 if text else 4)
            n_calibration = 0 if text else n - 2 * n_test
            parts = [CALIBRATION] * n_calibration + [VALIDATION] * (n - n_calibration - n_test)
            parts += [TEST] * n_test
            split_of |= zip([(name, text) for name in names], parts, strict=True)
    return [split_of.get((cell.template, cell.text)) for cell in cells]


def mixes_templates(examples: ExampleSet) -> bool:
    """True if a group has examples of several templates: none can be held out as a whole."""
    grouped = [x for x in examples.examples if x.group >= 0]
    pairs = {(x.group, examples.cells[x.cell].template) for x in grouped}
    return len(pairs) > len({x.group for x in grouped})


def warn_of_mixed_templates(examples: ExampleSet) -> None:
    """Warns if there are enough prompt templates to hold some out, but groups have several."""
    n_templates = len({cell.template for cell in examples.cells if not cell.text})
    if n_templates >= MIN_TEMPLATES and mixes_templates(examples):
        warnings.warn(
            "some prompts or groups have lines of several templates: no template is held out as a "
            "whole",
            stacklevel=3,
        )


def split(examples: ExampleSet, name: int) -> list[int]:
    """The indices of the examples of a split: CALIBRATION, VALIDATION or TEST."""
    return np.flatnonzero(splits_of(examples) == name).tolist()


def first_of_cells(
    examples: ExampleSet, indices: Sequence[int], count: int, whole: Collection[int] = ()
) -> list[int]:
    """Of some examples, the answers to so many questions of each cell, or so many windows.

    Args:
      whole: cells of which all examples are given.
    """
    chosen, counted = list[int](), Counter[int]()
    for answers in answers_of(examples, indices):
        cell = examples.examples[answers[0]].cell
        counted[cell] += 1
        chosen += answers if cell in whole or counted[cell] <= count else []
    return sorted(chosen)


def segments_of(examples: ExampleSet) -> np.ndarray:
    """(examples,) int, the segment of text that a window is cut from; -1 of answers.

    A segment is as long as the longest windows of its text; there are as many as these.
    """
    cells, places = examples.cells, _places(examples.examples)
    cell = np.array([example.cell for example in examples.examples])
    segments, first = np.full(len(cell), -1), 0
    for name in dict.fromkeys(c.template for c in cells if c.text):
        of_domain = {i for i, c in enumerate(cells) if c.text and c.template == name}
        longest = max(of_domain & set(cell.tolist()), key=lambda i: cells[i].length, default=-1)
        n_segments = int((cell == longest).sum())
        for i in np.flatnonzero(np.isin(cell, list(of_domain))):
            segments[i] = first + segment_of_window(int(places[i]), n_segments)[0]
        first = segments.max(initial=-1) + 1
    return segments


def groups_of(examples: ExampleSet) -> np.ndarray:
    """(examples,) int, the segment of each window, or the group of each answer; -1: it is alone."""
    segment = segments_of(examples)
    group = np.array([example.group for example in examples.examples])
    first = segment.max(initial=-1) + 1
    return np.where(segment >= 0, segment, np.where(group >= 0, first + group, -1))


def _places(examples: Sequence[Example]) -> np.ndarray:
    """(examples,) the place of each one's group in the cell where the group first occurs."""
    first, n_groups = dict[int, int](), Counter[int]()
    places = np.empty(len(examples), int)
    for i, example in enumerate(examples):
        known = first.get(example.group) if example.group >= 0 else None
        places[i] = n_groups[example.cell] if known is None else known
        if known is None:
            n_groups[example.cell] += 1
            first[example.group] = int(places[i])
    return places
