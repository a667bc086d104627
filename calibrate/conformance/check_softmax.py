"""Checks somebody else's adaptive softmax with the vectors, and names its faults."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from calibrate.conformance.calls import Outputs, mask_keyword
from calibrate.conformance.mistakes import (
    COMBINED,
    DIFFERS,
    EPSILONS,
    LOG_EPSILON,
    PLAIN,
    REMEDIES,
    WRONG_AXIS,
    ZERO_LOG_ZERO,
    RowBeta,
    has_zero_weight,
    mistaken_row,
)
from calibrate.conformance.vectors import VectorRow, vector_rows
from calibrate.store.fit import Fit
from calibrate.store.loading import load

# Probabilities of a function that is right in float32 are within this of the exact ones: its
# entropy is off by 1e-5 at most (16,384 items), and d p / d H by 10 at most for a steep rule.
TOLERANCE = 1e-4
EPS_OF_OUTPUT = 4  # of narrow output dtypes, in units of their precision
MAX_SUM_ERROR = 0.02  # of the probabilities of a row
MOST_TOGETHER = 3  # mistakes


@dataclass(frozen=True)
class SoftmaxCheck:
    """The result of `check_softmax`; prints as a sentence with the remedy.

    >>> import scipy.special
    >>> check = calibrate.check_softmax(lambda z: scipy.special.softmax(z, axis=-1))
    >>> check.right, check.faults
    (False, ('plain-softmax',))

    Attributes:
      right: whether the function agrees with the rule on all rows.
      faults: names of mistakes, such as "reversed-coefficients"; ("differs",) if none explains it.
      error: the largest difference of a probability; NaN if the function gives NaN.
      row: the name of the row with that difference.
      entropy: of that row, in nats.
      beta: the inverse temperature that the rule gives there.
      their_beta: the one that explains the function's probabilities best.
      note: what the function does not take, such as a batch; "" if it takes all.
    """

    right: bool
    faults: tuple[str, ...]
    error: float
    row: str
    entropy: float
    beta: float
    their_beta: float
    note: str = ""

    def __str__(self) -> str:
        """The verdict, the faults with their remedies, and the row with the largest error."""
        if self.right:
            rows = "of single rows " if self.note else ""
            text = f"right: every probability {rows}is within {self.error:.1g} of the rule's"
            return "\n".join(filter(None, [text, self.note]))
        faults = [f"{name}: {REMEDIES[name]}" for name in self.faults]
        if np.isnan(self.error):
            where = f'NaN on the row "{self.row}"'
        else:
            where = (
                f'largest error {self.error:.2g} on the row "{self.row}": at H = '
                f"{self.entropy:.3g} nats beta should be {self.beta:.3g} and is "
                f"{self.their_beta:.3g}"
            )
        return "\n".join(filter(None, ["wrong", *faults, where, self.note]))


def check_softmax(
    function: Callable[..., Any], fit: Fit | str = "paper", *, mask: str | None = None
) -> SoftmaxCheck:
    """Compares a function of logits with the rule of a fit, and names its faults.

    The function is called with logits (n,), (rows, n) or (1, 1, 1, n), as arrays of NumPy, PyTorch
    or JAX (of the libraries that are imported), and returns probabilities of the same shape. An
    argument `axis` or `dim` is -1. The rows are those of `vectors.json`: ties, one item, masks,
    entropies around the threshold, up to 16,384 items. A function that is right in float32 passes.

        >>> import numpy as np
        >>> def pasted(z):
        ...     p = np.exp(z - z.max(-1, keepdims=True))
        ...     p = p / p.sum(-1, keepdims=True)
        ...     H = -(p * np.log(p + 1e-9)).sum(-1, keepdims=True)
        ...     beta = np.polyval([-1.791, 4.917, -2.3, 0.481, -0.037], H)
        ...     z = np.where(H > 0.5, np.maximum(beta, 1), 1) * z
        ...     p = np.exp(z - z.max(-1, keepdims=True))
        ...     return p / p.sum(-1, keepdims=True)
        >>> check_softmax(pasted).faults
        ('reversed-coefficients',)

    Args:
      function: of logits.
      fit: with one rule for all heads, or its reference; "paper" is the published polynomial.
      mask: the name of the argument that takes a bool mask, True for real items; None: `where` or
        `mask`, if it has one of these.
    Raises:
      CalibrateError: the function raises, or its result has another shape.
      CoefficientsError: a fit that distinguishes heads or layers.
    """
    fit = fit if isinstance(fit, Fit) else load(fit)
    fit.only  # noqa: B018 - raises for a fit that distinguishes heads or layers
    keyword = mask_keyword(function, mask)
    # A row without real items has no probabilities: 0 and NaN are both in use.
    rows = [r for r in vector_rows() if r.real.any() and (keyword or r.mask is None)]
    outputs = Outputs(function, rows, keyword)
    tolerance = max(TOLERANCE, EPS_OF_OUTPUT * outputs.eps)
    exact = [mistaken_row(row, fit) for row in rows]
    answers = list(map(_Answer, outputs.alone, rows, exact))
    faults = _faults(answers, fit, tolerance)
    if wrong := [x for x in outputs.batches if not _agree(x, outputs.alone, tolerance)]:
        faults = WRONG_AXIS, *(name for name in faults if name != DIFFERS)
        answers = list(map(_Answer, wrong[-1], rows, exact))
    failure = outputs.failure
    note = f"a batch of rows raises {type(failure).__name__}: {failure}" if failure else ""
    return _summary(faults, answers, note)


class _Answer(NamedTuple):
    """What the function gives for a row, and what is right there."""

    output: np.ndarray  # (n,) probabilities
    row: VectorRow
    exact: RowBeta

    @property
    def beta(self) -> float:
        """The slope of log p in z between the lowest and the highest item that have some weight.

        NaN where all logits with weight are equal, or the output has NaN.
        """
        seen = self.row.real & (self.output > 1e-6)
        z = self.row.logits[seen].astype(float)
        if len(z) < 2 or z.min() == z.max():
            return float("nan")
        p = self.output[seen]
        low, high = z.argmin(), z.argmax()
        return float(np.log(p[high] / p[low]) / (z[high] - z[low]))


def _summary(faults: tuple[str, ...], answers: Sequence[_Answer], note: str) -> SoftmaxCheck:
    errors = [np.abs(x.output - x.exact.probabilities).max() for x in answers]
    number = int(np.argmax(errors))  # the first NaN, if there is one
    worst, error = answers[number], float(errors[number])
    numbers = worst.exact.entropy, worst.exact.beta, worst.beta
    return SoftmaxCheck(not faults, faults, error, worst.row.name, *numbers, note)


def _agree(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> bool:
    """True if all rows agree; NaN agrees with NaN."""
    pairs = zip(outputs, expected, strict=True)
    return all(np.allclose(p, e, 0, tolerance, equal_nan=True) for p, e in pairs)


def _faults(answers: Sequence[_Answer], fit: Fit, tolerance: float) -> tuple[str, ...]:
    """Names of the fewest mistakes that explain the outputs; () if they are right."""
    outputs = [x.output for x in answers]
    if _agree(outputs, [x.exact.probabilities for x in answers], tolerance):
        return ()
    if any(abs(p.sum() - 1) > MAX_SUM_ERROR for p in outputs):
        return (DIFFERS,)  # no probabilities: logarithms of them, for instance
    if with_nan := [x for x in answers if np.isnan(x.output).any()]:
        if not all(has_zero_weight(x.row) for x in with_nan):
            return (DIFFERS,)
        others = [x for x in answers if not np.isnan(x.output).any()]
        return (ZERO_LOG_ZERO, *_faults(others, fit, tolerance))

    def explains(**mistake: Any) -> bool:
        return all(
            np.allclose(x.output, mistaken_row(x.row, fit, **mistake).probabilities, 0, tolerance)
            for x in answers
        )

    for mistakes, epsilon in _sets_of_mistakes():
        if explains(mistakes=mistakes, epsilon=epsilon):
            return mistakes
    return (DIFFERS,)


def _sets_of_mistakes() -> Iterator[tuple[tuple[str, ...], float]]:
    """Mistakes with an epsilon, the fewest first."""
    yield (PLAIN,), EPSILONS[0]
    for size in range(1, MOST_TOGETHER + 1):
        for mistakes in combinations(COMBINED, size):
            for epsilon in EPSILONS if LOG_EPSILON in mistakes else EPSILONS[:1]:
                yield mistakes, epsilon
