"""A step of natural gradient from the baseline, in the metric of retention text.

The gradient of the answers at the baseline, shrunk by its noise, is divided by the Fisher
information of the text, which is the curvature of its KL divergence. Both are estimated once
for all families.

Reference: Amari 1998.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibrate.model.parameters import Parameters, RuleFamily, best_of_layers
from calibrate.model.scored_splits import Calibration

FULL_KL = 0.04  # KL of text at interpolation weight 1, by its curvature, nats per token
DAMPING = 0.3  # share of the median curvature of all heads that is added to that of each
_TINY = 1e-8


@dataclass(frozen=True, eq=False)
class NaturalGradient:
    """Steps of natural gradient from the baseline; all families use one set of derivatives."""

    calibration: Calibration
    text: list[int]  # indices of windows of text
    full: RuleFamily  # with numbers for each head, and all terms of the families

    @cached_property
    def derivatives(self) -> tuple[np.ndarray, np.ndarray]:
        """Derivatives at the baseline by the numbers of `full`.

        (batches, rows, columns) gradients of the answers, and (windows, rows, columns) Fisher
        scores of text.
        """
        calibration, scorer = self.calibration, self.calibration.scorer
        calibration.begin("differentiating", [*calibration.epoch(), self.text])
        baseline = self.full.baseline(scorer.heads)
        gradients = [calibration.gradient(baseline, batch) for batch in calibration.epoch()]
        return np.array(gradients), scorer.fisher_scores(baseline, self.text)

    def step(self, family: RuleFamily, n_per_layer: int | None = None) -> Parameters:
        """The step at which the KL of text is FULL_KL, by its curvature.

        Args:
          n_per_layer: heads of a layer that may change: those that gain most by the step of all
            heads, at first order (gradient times step).
        Returns:
          The baseline if the gradient is 0.
        """
        heads = self.calibration.scorer.heads
        gradients, scores = (family.project_gradient(x, heads, self.full) for x in self.derivatives)
        fisher = np.einsum("wrc,wsc->crs", scores, scores)
        gradient = shrink_gradient(gradients)
        numbers = natural_gradient_step(gradient, fisher, FULL_KL)
        if numbers is not None and n_per_layer and not family.is_global:
            gained = (gradient * numbers).sum(axis=0)
            is_best = best_of_layers(gained, heads, n_per_layer)
            numbers = natural_gradient_step(gradient * is_best, fisher, FULL_KL)
        return family.baseline(heads) if numbers is None else Parameters(family, numbers)


def shrink_gradient(gradients: np.ndarray) -> np.ndarray:
    """The mean of gradients, with each number shrunk by its noise.

    m (1 - v / (n m^2)), or 0 if that changes the sign, for the mean m and the variance v of n
    gradients: the James-Stein estimator of each number.

    Args:
      gradients: (batches, ...).
    """
    mean = np.array(gradients.mean(axis=0))
    if len(gradients) == 1:
        return mean
    noise = gradients.var(axis=0, ddof=1) / len(gradients)
    return np.array(mean * np.maximum(0.0, 1 - noise / np.maximum(mean**2, _TINY**2)))


def natural_gradient_step(
    gradient: np.ndarray, curvature: np.ndarray, cost: float
) -> np.ndarray | None:
    """The step x that maximises g.x among those whose cost x.C.x / 2 is given.

    x is proportional to C^-1 g, with the damped curvature.

    Args:
      gradient: g, (rows, columns).
      curvature: C, (columns, rows, rows), the second derivatives of the cost.
      cost: above 0.
    Returns:
      (rows, columns); None if the gradient is 0, or no step has a cost.
    """
    step = np.linalg.solve(damp(curvature), gradient.T[:, :, None])  # (columns, rows, 1)
    costs = float((step.mT @ curvature @ step).sum()) / 2
    if not costs > 0:
        return None
    return np.array(step[:, :, 0].T * np.sqrt(cost / costs))


def damp(curvature: np.ndarray) -> np.ndarray:
    """The curvature of each column plus DAMPING times the median diagonal of all columns.

    Some heads have nearly no curvature, and an estimate from few windows is too small in some
    directions.

    Args:
      curvature: (columns, rows, rows).
    """
    typical = np.median(np.diagonal(curvature, axis1=1, axis2=2), axis=0)
    return np.array(curvature + np.diag(np.maximum(DAMPING * typical, _TINY)))
