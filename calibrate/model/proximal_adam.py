"""Proximal Adam: gradient ascent (Kingma and Ba 2015) with one scale a head and a group lasso.

The group lasso (Yuan and Lin 2006), by proximal steps, keeps the numbers of a head at 0 where its
gradient is small.
"""

import numpy as np

from calibrate.model.parameters import Form

LEARNING_RATE = 0.04  # of beta
SHARED_LEARNING_RATE = 0.06  # of numbers that all heads share
GROUP_LASSO = 0.003  # nats for a unit of beta of one head
_DECAY = 0.9
_DECAY_OF_SCALE = 0.98
_TINY = 1e-8


class ProximalAdam:
    """The state of the optimizer."""

    def __init__(self, form: Form, start: np.ndarray):
        self.numbers = start
        self.gained = np.zeros(start.shape[1])  # nats, of each head
        is_common = form.is_common(start)
        self._within = form.clip_to_feasible
        self._rate = np.where(is_common, SHARED_LEARNING_RATE, LEARNING_RATE)
        self._penalty = np.where(is_common, 0.0, GROUP_LASSO)
        self._mean, self._square = np.zeros_like(start), np.zeros(start.shape[1])
        self._last_move, self._count = np.zeros_like(start), 0

    def step(self, gradient: np.ndarray) -> None:
        """Takes a step of gradient ascent."""
        self.gained = self.gained + (gradient * self._last_move).sum(axis=0)
        self._count += 1
        self._mean = _DECAY * self._mean + (1 - _DECAY) * gradient
        square = (gradient**2).mean(axis=0)
        self._square = _DECAY_OF_SCALE * self._square + (1 - _DECAY_OF_SCALE) * square
        scale = np.sqrt(self._square / (1 - _DECAY_OF_SCALE**self._count)) + _TINY
        moved = self.numbers + self._rate * self._mean / (1 - _DECAY**self._count) / scale
        length = np.sqrt((moved**2).sum(axis=0))
        kept = 1 - self._rate * self._penalty / scale / np.maximum(length, _TINY)
        moved = self._within(moved * np.maximum(0.0, kept))
        self._last_move, self.numbers = moved - self.numbers, moved

    def reset_to(self, numbers: np.ndarray) -> None:
        """Goes on from these numbers."""
        self.numbers, self._last_move = numbers, np.zeros_like(numbers)

    def halve_learning_rate(self) -> None:
        """Halves the learning rate."""
        self._rate = self._rate / 2
