"""A step of natural gradient from the baseline, in the metric of retention text.

The gradient of the answers at the baseline, shrunk by its noise, is divided by the Fisher
information of text, which is the curvature of its KL divergence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from calibrate.model.basis import SHARED_SLOPE
from calibrate.model.fit_splits import Calibration
from calibrate.model.parameters import Parameters, RuleFamily

FULL_KL = 0.04  # nats a token: the KL of text at interpolation weight 1, by its curvature
_TINY = 1e-8


@dataclass(frozen=True, eq=False)
class NaturalGradient:
    """Steps of natural gradient from the baseline; derivatives are shared among families."""

    calibration: Calibration
    text: list[int]  # the indices of windows; without any, there is no such step
    # (gradient of each batch, Fisher scores), by a full family
    _derivatives: dict[RuleFamily, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def suits(self, family: RuleFamily) -> bool:
        """True if a family's rules are a step from the baseline."""
        return bool(self.text) and family.kind != SHARED_SLOPE

    def passes(self, families: Sequence[RuleFamily]) -> list[list[int]]:
        """The examples of every pass that the steps of some families take."""
        new = dict.fromkeys(x.full for x in families if x.full not in self._derivatives)
        return [indices for _ in new for indices in (*self.calibration.epoch(), self.text)]

    def step(self, family: RuleFamily, n_per_layer: int | None = None) -> Parameters:
        """The step whose KL of text is FULL_KL by its curvature; the baseline if it has none.

        With `n_per_layer`, it is of the heads alone that gain most in their layers by the step of
        all heads: at first order, the gradient times the step.
        """
        heads = self.calibration.scorer.heads
        if family.full not in self._derivatives:
            self._derivatives[family.full] = self._differentiate(family.full)
        derivatives = self._derivatives[family.full]
        gradients, scores = (family.project_gradient(x, heads) for x in derivatives)
        fisher = np.einsum("wrc,wsc->crs", scores, scores)
        gradient = shrink_gradient(gradients)
        numbers = natural_gradient_step(gradient, fisher, FULL_KL)
        if numbers is not None and n_per_layer and not family.is_global:
            gained = (gradient * numbers).sum(axis=0)
            is_best = family.best_of_layers(gained, heads, n_per_layer)
            numbers = natural_gradient_step(gradient * is_best, fisher, FULL_KL)
        return family.baseline(heads) if numbers is None else Parameters(family, numbers)

    def _differentiate(self, family: RuleFamily) -> tuple[np.ndarray, np.ndarray]:
        """At the baseline, the gradient of the answers of each batch, and `fisher_scores`."""
        calibration, scorer = self.calibration, self.calibration.scorer
        baseline = family.baseline(scorer.heads)
        batches = calibration.epoch()
        gradients = np.array([calibration.gradient(baseline, batch) for batch in batches])
        return gradients, scorer.fisher_scores(baseline, self.text)


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

    The median curvature of all columns is added to that of each: some heads have next to none, and
    no step is that long.

    Args:
      gradient: (rows, columns).
      curvature: (columns, rows, rows), second derivatives of the cost.
      cost: of the numbers, above 0.
    Returns:
      (rows, columns); None if the gradient is 0, or nothing costs.
    """
    typical = np.median(np.diagonal(curvature, axis1=1, axis2=2), axis=0)
    ridge = curvature + np.diag(np.maximum(typical, _TINY))
    step = np.linalg.solve(ridge, gradient.T[:, :, None])  # (columns, rows, 1)
    costs = float((step.mT @ curvature @ step).sum()) / 2
    if costs <= 0:
        return None
    return np.array(step[:, :, 0].T * np.sqrt(cost / costs))
