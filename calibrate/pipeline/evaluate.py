"""Evaluate: a head's accuracy under several softmax rules, on sets that no fit has seen."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from calibrate.errors import CalibrateError
from calibrate.files.coefficients import Coefficients
from calibrate.heads import Head
from calibrate.pipeline.units import attended_pieces, one_ahead, plan_units
from calibrate.softmax import adaptive_softmax

STREAM = "evaluate"


class Score(NamedTuple):
    """Accuracy at one set size, of every rule on the same sets."""

    size: int
    correct: dict[str, np.ndarray]  # rule -> bool (sets,)

    def accuracy(self, rule: str) -> float:
        return float(self.correct[rule].mean())

    def standard_error(self, rule: str) -> float:
        """Binomial standard error of the accuracy."""
        p = self.accuracy(rule)
        return float(np.sqrt(p * (1 - p) / len(self.correct[rule])))

    def gain(self, rule: str, over: str) -> tuple[float, float]:
        """(difference of accuracy, its standard error), paired set by set."""
        difference = self.correct[rule].astype(float) - self.correct[over]
        return float(difference.mean()), float(difference.std() / np.sqrt(len(difference)))


def evaluate(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    rules: Mapping[str, Coefficients | None],
    report: Callable[[Score], None] = lambda score: None,
) -> list[Score]:
    """Scores each rule on the same sets; the head runs once per set.

    Args:
      head: one whose attention can be scored (`correct`).
      sizes: set sizes n.
      sets: how many sets of each size, drawn from the stream "evaluate": no fit has seen them.
      seed: of the data.
      rules: name -> fit, or None for plain softmax.
      report: called after each size.
    Returns:
      One Score per size.
    Warns:
      UserWarning: a fit that was made for another head.
    """
    _warn_of_other_heads(head, rules.values())
    scores = []
    for size in sorted(set(sizes)):
        correct = {name: np.empty(sets, bool) for name in rules}
        for unit in plan_units(size, sets):
            for part, _, attended in one_ahead(attended_pieces(head, STREAM, seed, unit)):
                rows = slice(unit.first + part.start, unit.first + part.stop)
                for name, fit in rules.items():
                    correct[name][rows] = _correct(head, attended, fit)
        scores.append(Score(size, correct))
        report(scores[-1])
    return scores


def _warn_of_other_heads(head: Head, fits: Iterable[Coefficients | None]) -> None:
    for fit in fits:
        if fit and fit.fingerprint not in (None, head.fingerprint):
            warnings.warn(
                f"{fit.reference} was made for head {fit.source.get('head')!r} "
                f"({fit.fingerprint}), and is scored on {head.name!r} ({head.fingerprint})",
                stacklevel=3,
            )


def _correct(head: Head, attended: Any, fit: Coefficients | None) -> np.ndarray:
    """bool (count,): whether the head is right under one rule."""
    logits = attended.logits
    weights = jax.nn.softmax(logits) if fit is None else adaptive_softmax(logits, fit)
    right = np.asarray(head.correct(attended, weights))
    if right.shape != (len(logits),) or right.dtype != bool:
        raise CalibrateError(
            f"head {head.name!r}: correct gave {right.dtype}{right.shape}, "
            f"expected bool ({len(logits)},)"
        )
    return right
