"""A step of natural gradient from the baseline, in the metric of retention text.

The gradient of the answers at the baseline, shrunk by its noise, is divided by the Fisher
information of text, which is the curvature of its KL divergence. Both are estimated once, for the
terms of all kinds.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calibrate.model.calibration_and_validation import Calibration
from calibrate.model.parameters import SHARED_SLOPE, Parameters, RuleFamily

FULL_KL = 0.04  # nats a token: the KL of text at interpolation weight 1, by its curvature
DAMPING = 0.3  # of the median curvature of all heads, which is added to that of each
_TINY = 1e-8


class Derivatives(NamedTuple):
    """Derivatives at the baseline, by the numbers of a full family."""

    gradients: np.ndarray  # (batches, rows, columns) of the answers
    fisher_scores: np.ndarray  # (windows, rows, columns) of text


@dataclass(frozen=True, eq=False)
class NaturalGradient:
    """Steps of natural gradient from the baseline; families share one set of derivatives."""

    calibration: Calibration
    text: list[int]  # the indices of windows; without any, there is no such step
    full: RuleFamily | None  # contains the families; None: there is no such step

    def suits(self, family: RuleFamily) -> bool:
        """True if a family's rules are a step from the baseline."""
        if not self.text or self.full is None or family.kind == SHARED_SLOPE:
            return False
        return self.full.basis.contains(family.basis)

    @cached_property
    def derivatives(self) -> Derivatives:
        """The derivatives at the baseline by the numbers of `full`."""
        calibration, scorer = self.calibration, self.calibration.scorer
        assert self.full is not None
        calibration.begin("differentiating", [*calibration.epoch(), self.text])
        baseline = self.full.baseline(scorer.heads)
        gradients = [calibration.gradient(baseline, batch) for batch in calibration.epoch()]
        return Derivatives(np.array(gradients), scorer.fisher_scores(baseline, self.text))

    def step(self, family: RuleFamily, n_per_layer: int | None = None) -> Parameters:
        """The step whose KL of text is FULL_KL by its curvature; the baseline if it has none.

        With `n_per_layer`, it is of the heads alone that gain most in their layers by the step of
        all heads: at first order, the gradient times the step.
        """
        heads = self.calibration.scorer.heads
        assert self.full is not None
        gradients, scores = (family.project_gradient(x, heads, self.full) for x in self.derivatives)
        fisher = np.einsum("wrc,wsc->crs", scores, scores)
        gradient = shrink_gradient(gradients)
        numbers = natural_gradient_step(gradient, fisher, FULL_KL)
        if numbers is not None and n_per_layer and not family.is_global:
            gained = (gradient * numbers).sum(axis=0)
            is_best = family.best_of_layers(gained, heads, n_per_layer)
            numbers = natural_gradient_step(gradient * is_best, fisher, FULL_KL)
        return family.baseline(heads) if numbers is None else Parameters(family, numbers)


def shrink_gradient(gradients: np.ndarray) -> np.ndarray:
    """The mean of gradients, (steps, ...), each number shrunk by the noise in its square."""
    mean = np.array(gradients.mean(axis=0))
    if len(gradients) == 1:
        return mean
    noise = gradients.var(axis=0, ddof=1) / len(gradients)
    return np.array(mean * np.maximum(0.0, 1 - noise / np.maximum(mean**2, _TINY**2)))


def natural_gradient_step(
    gradient: np.ndarray, curvature: np.ndarray, cost: float
) -> np.ndarray | None:
    """The numbers that gain most at first order, of those that cost so much at second order.

    Args:
      gradient: (rows, columns).
      curvature: (columns, rows, rows), second derivatives of the cost; `damped` for the step.
      cost: of the numbers, above 0.
    Returns:
      (rows, columns); None if the gradient is 0, or nothing costs.
    """
    step = np.linalg.solve(damped(curvature), gradient.T[:, :, None])  # (columns, rows, 1)
    costs = float((step.mT @ curvature @ step).sum()) / 2
    if not costs > 0:
        return None
    return np.array(step[:, :, 0].T * np.sqrt(cost / costs))


def damped(curvature: np.ndarray) -> np.ndarray:
    """The curvature of each column, and DAMPING of the median of all, row by row.

    Some heads have next to none, and the few windows that it is estimated from make that of a step
    look too small in some direction.

    Args:
      curvature: (columns, rows, rows).
    """
    typical = np.median(np.diagonal(curvature, axis1=1, axis2=2), axis=0)
    return np.array(curvature + np.diag(np.maximum(DAMPING * typical, _TINY)))
