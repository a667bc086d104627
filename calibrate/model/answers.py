"""Rules compared on the examples of a model: answers right and log p, paired by example."""

from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.evidence.evidence import LOG_P, PLAIN, RIGHT, Evidence, Scored, Stratum
from calibrate.files.examples import ExampleSet, Scores
from calibrate.model.splits import stretches_of

_ANSWERS = Scored("", items="answers")


def compare(
    examples: ExampleSet,
    which: Sequence[int],
    scores: Mapping[str, Scores],
    of: Scored = _ANSWERS,
) -> Evidence:
    """Rules by their scores of some examples: LOG_P, and RIGHT of whole answers.

    A stratum is a template at a length. Windows of text from one stretch are a group, whatever
    their lengths; answers are independent.

    Args:
      examples: of all cells.
      which: numbers of those that were scored.
      scores: by rule, with an entry for each of `which`; plain softmax is PLAIN.
      of: what was scored.
    """
    index = np.asarray(which, int)
    cell = np.array([example.cell for example in examples.examples])[index]
    present, stratum = np.unique(cell, return_inverse=True)
    cells = [examples.cells[i] for i in present]
    per_token, n_answer = np.array([c.text for c in cells])[stratum], examples.n_answer(index)
    rules = (PLAIN, *(rule for rule in scores if rule != PLAIN))
    log_p = [scores[rule].log_p / np.where(per_token, n_answer, 1) for rule in rules]
    share = [scores[rule].right / n_answer for rule in rules]
    right = [np.where(per_token, x, x == 1) for x in share]
    return Evidence(
        rules, {LOG_P: np.array(log_p), RIGHT: np.array(right)},
        tuple(Stratum(c.length, c.template, c.text) for c in cells), stratum,
        stretches_of(examples)[index], np.ones(len(index)), of,
    )  # fmt: skip


def plain_alone(examples: ExampleSet, scores: Scores) -> Evidence:
    """Plain softmax on all examples, by its scores of them."""
    return compare(examples, range(len(examples.examples)), {PLAIN: scores})
