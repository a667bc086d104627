"""Proximal Adam with early stopping: it optimises rules where there is no retention text.

Gradient ascent (Kingma and Ba 2015) with one scale a head and a group lasso (Yuan and Lin 2006),
which, by proximal steps, keeps the numbers of a head at 0 where its gradient is small.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np

from calibrate.model.calibration_and_validation import Calibration, ModelSolution
from calibrate.model.parameters import Parameters

LEARNING_RATE = 0.04  # of beta
SHARED_LEARNING_RATE = 0.06  # of numbers that all heads share
GROUP_LASSO = 0.003  # nats for a unit of beta of one head
STEPS_TO_A_CHECK = 10
_N_HALVINGS = 3  # of the learning rate, each when a check finds no gain; then it stops early
_N_SHARED_HALVINGS = 1  # of numbers that all heads share: their gradient has little noise
_MIN_RISE = 0.002  # nats from one check to the next
_DECAY = 0.9
_DECAY_OF_SCALE = 0.98
_TINY = 1e-8


class ProximalAdam:
    """The state of the optimizer."""

    def __init__(self, start: Parameters):
        family, self.numbers = start
        self.gained = np.zeros(self.numbers.shape[1])  # nats, of each head
        is_common = family.is_common(self.numbers)
        self._clip = family.clip_to_feasible
        self._rate = np.where(is_common, SHARED_LEARNING_RATE, LEARNING_RATE)
        self._penalty = np.where(is_common, 0.0, GROUP_LASSO)
        self._mean, self._square = np.zeros_like(self.numbers), np.zeros_like(self.gained)
        self._last_move, self._count = np.zeros_like(self.numbers), 0

    def step(self, gradient: np.ndarray) -> None:
        """Takes a step of gradient ascent.

        What a head gained is the gradient at a step times the last move: its noise is of other
        examples.
        """
        self.gained = self.gained + (gradient * self._last_move).sum(axis=0)
        self._count += 1
        self._mean = _DECAY * self._mean + (1 - _DECAY) * gradient
        square = (gradient**2).mean(axis=0)
        self._square = _DECAY_OF_SCALE * self._square + (1 - _DECAY_OF_SCALE) * square
        scale = np.sqrt(self._square / (1 - _DECAY_OF_SCALE**self._count)) + _TINY
        moved = self.numbers + self._rate * self._mean / (1 - _DECAY**self._count) / scale
        length = np.sqrt((moved**2).sum(axis=0))
        kept = 1 - self._rate * self._penalty / scale / np.maximum(length, _TINY)
        moved = self._clip(moved * np.maximum(0.0, kept))
        self._last_move, self.numbers = moved - self.numbers, moved

    def reset_to(self, numbers: np.ndarray) -> None:
        """Goes on from these numbers."""
        self.numbers, self._last_move = numbers, np.zeros_like(numbers)

    def halve_learning_rate(self) -> None:
        """Halves the learning rate."""
        self._rate = self._rate / 2


def ascend(
    start: ModelSolution,
    calibration: Calibration,
    evaluate: Callable[[Parameters], ModelSolution],
    is_free: np.ndarray | None = None,
) -> tuple[ModelSolution, np.ndarray]:
    """The best of the rules at every check, and what each column gained, (columns,) nats.

    Args:
      start: where it begins, with its value.
      evaluate: gives rules their value on the validation split.
      is_free: (columns,) bool: the columns that it changes; None: all.
    """
    best, family = start, start.family
    halvings = _N_SHARED_HALVINGS if family.is_global else _N_HALVINGS
    adam = ProximalAdam(start.parameters)
    batches, n_steps = calibration.batches(), 0
    while to_a_check := list(islice(batches, STEPS_TO_A_CHECK)):
        n_steps += len(to_a_check)
        calibration.begin(f"{family.label}: step {n_steps} of {calibration.max_steps}", to_a_check)
        for indices in to_a_check:
            gradient = calibration.gradient(Parameters(family, adam.numbers), indices)
            adam.step(gradient if is_free is None else gradient * is_free)
        current = evaluate(Parameters(family, adam.numbers))
        rise = current.value.gain - best.value.gain
        best = current if rise > 0 else best
        if rise < _MIN_RISE:
            if not halvings:
                break
            halvings -= 1
            adam.halve_learning_rate()
        if best is not current:
            adam.reset_to(best.parameters.numbers)
    return best, adam.gained
