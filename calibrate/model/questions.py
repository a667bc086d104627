"""Questions with several right answers: any of them will do.

Each answer is an example, scored by itself. The probability that a question is answered right is
the sum of theirs, as no answer begins with another one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from calibrate.datasets.examples import ExampleSet


def answers_of(examples: ExampleSet, indices: Iterable[int]) -> list[list[int]]:
    """The examples of each question, in the order in which questions first occur in `indices`."""
    answers = dict[tuple[int, int], list[int]]()
    for i in indices:
        answers.setdefault(_key(examples, i), []).append(i)
    return list(answers.values())


def question_of(examples: ExampleSet, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """(len(indices),) the number of each example's question, from 0 in the order of `answers_of`.

    Raises:
      ValueError: a question has answers that are not among these.
    """
    number = dict[tuple[int, int], int]()
    numbers = [number.setdefault(_key(examples, i), len(number)) for i in indices]
    n_answers = Counter(x.question for x in examples.examples if x.question >= 0)
    given = Counter(question for question, _ in (_key(examples, i) for i in indices))
    if any(given[question] not in (0, n) for question, n in n_answers.items()):
        raise ValueError("some answers to a question are given without its others")
    return np.array(numbers, int)


def _key(examples: ExampleSet, i: int) -> tuple[int, int]:
    """The key that the answers to a question have in common."""
    question = examples.examples[i].question
    return (question, -1) if question >= 0 else (-1, int(i))


def log_p_of_any(log_p: np.ndarray, question: np.ndarray) -> np.ndarray:
    """(questions,) nats: log of the summed probability of their answers, (examples,) nats.

    What is scored of one answer alone may be any measure, and stays as it is.
    """
    n = int(question.max(initial=-1)) + 1
    largest = np.full(n, -np.inf)
    np.maximum.at(largest, question, log_p)
    total = np.bincount(question, np.exp(log_p - largest[question]), n)
    summed = np.minimum(largest + np.log(total), 0.0)  # rounding
    return np.where(np.bincount(question, minlength=n) > 1, summed, largest)


def shares_of(log_p: np.ndarray, question: np.ndarray) -> np.ndarray:
    """(examples,) each answer's share of its question's probability: 1 of one that is alone.

    They weigh the answers' derivatives: d log sum(p) = sum(share d log p).
    """
    return np.array(np.exp(log_p - log_p_of_any(log_p, question)[question]))


def per_question(reduce: np.ufunc, values: np.ndarray, question: np.ndarray) -> np.ndarray:
    """(questions, ...) the values of their answers, (examples, ...), under np.add or the like."""
    order = np.argsort(question, kind="stable")
    first = np.flatnonzero(np.diff(question[order], prepend=-1))
    return np.array(reduce.reduceat(values[order], first, axis=0))
