"""Which heads of a model want to be sharper, and which more diffuse: means and their errors.

Templates and lengths count alike, whatever the number of their examples. Plain text is kept apart:
what is good for the answers may be bad for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.files.examples import Cell, ExampleSet
from calibrate.model.comparison import over_cells
from calibrate.model.derivatives import Derivatives

STEP = 1.1  # times beta, or divided by it: the step of which the first-order gain is shown
LEVEL = 0.05  # of a wrong direction for any head, by Bonferroni

SHARPER, DIFFUSE, UNCLEAR = "sharper", "more diffuse", "unclear"


class Mean(NamedTuple):
    """Of some cells, with equal weights."""

    slope: np.ndarray  # (heads,) nats per unit of log beta
    error: np.ndarray  # (heads,) standard errors; NaN where a cell has one example
    freedom: np.ndarray  # (heads,) degrees of it in the errors; 0 where they are NaN
    log_p: float  # nats
    examples: int


class HeadLook(NamedTuple):
    """A head; None where there are no examples of the kind."""

    layer: int
    head: int
    answers: tuple[float, float] | None  # slope and error
    text: tuple[float, float] | None
    wants: str  # SHARPER, DIFFUSE or UNCLEAR: by the answers, or by text where there are none
    text_wants: str
    gain: float  # nats, to first order: of a step of beta by 10 % in the direction of the slope


class Look(NamedTuple):
    """The first look at a model."""

    answers: Mean | None
    text: Mean | None
    by_length: dict[int, Mean]  # of the answers
    by_template: dict[str, Mean]  # of the answers
    heads: list[HeadLook]  # the steepest first

    def wanting(self, word: str) -> list[HeadLook]:
        """The heads that want something."""
        return [head for head in self.heads if head.wants == word]


def first_look(found: Derivatives, examples: ExampleSet) -> Look:
    """Means over examples of the derivatives, and what they say about each head."""
    cell = np.array([example.cell for example in examples.examples])
    kinds = {
        text: [i for i, c in enumerate(examples.cells) if c.text is text] for text in (False, True)
    }
    answers, text = (
        _mean(found, cell, examples.cells, members) if (members := kinds[kind]) else None
        for kind in (False, True)
    )
    by_length = _by(found, cell, examples.cells, [c.length for c in examples.cells])
    by_template = _by(found, cell, examples.cells, [c.template for c in examples.cells])
    main = text if answers is None else answers
    assert main is not None  # there is an example
    wants, of_text = _wants(main), [UNCLEAR] * len(found.heads) if text is None else _wants(text)
    heads = [
        HeadLook(
            *name, _of_head(answers, i), _of_head(text, i), wants[i], of_text[i],
            float(np.log(STEP) * abs(main.slope[i])),
        )
        for i, name in enumerate(found.heads)
    ]  # fmt: skip
    heads.sort(key=lambda head: -head.gain)
    return Look(answers, text, by_length, by_template, heads)


def _of_head(mean: Mean | None, i: int) -> tuple[float, float] | None:
    return None if mean is None else (float(mean.slope[i]), float(mean.error[i]))


def _by(
    found: Derivatives, cell: np.ndarray, cells: Sequence[Cell], names: Sequence[Any]
) -> dict[Any, Mean]:
    """The mean of the answers of each name that cells have."""
    of_answers = [i for i, c in enumerate(cells) if not c.text]
    return {
        name: _mean(found, cell, cells, [i for i in of_answers if names[i] == name])
        for name in sorted({names[i] for i in of_answers})
    }


def _mean(
    found: Derivatives, cell: np.ndarray, cells: Sequence[Cell], members: Sequence[int]
) -> Mean:
    """The mean over some cells, with equal weights."""
    rows, share = [cell == i for i in members], np.full(len(members), 1 / len(members))
    of_text = all(cells[i].text for i in members)
    slope, error, freedom = over_cells([found.slope[row] for row in rows], share, of_text)
    log_p = float(np.mean([found.log_p[row].mean() for row in rows]))
    return Mean(slope, error, freedom, log_p, int(np.sum(rows)))


def _wants(mean: Mean) -> list[str]:
    """What each head wants, where the slope's sign is beyond chance."""
    from scipy.special import stdtrit

    known = (mean.freedom > 0) & (mean.error > 0)
    quantile = stdtrit(np.where(known, mean.freedom, 1), 1 - LEVEL / 2 / len(mean.slope))
    beyond = known & (np.abs(mean.slope) > quantile * np.where(known, mean.error, 0))
    words = np.where(mean.slope > 0, SHARPER, DIFFUSE)
    return [str(word) for word in np.where(beyond, words, UNCLEAR)]
