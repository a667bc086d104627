"""`ModelScorer`: the interface through which a fit sees a model.

A scorer runs a model under rules of its heads. It gives log p of answers, the KL of text, and the
derivatives of both by the numbers of the rules. The fit (`fit.py` and the optimiser) uses nothing
else of the model. The implementations:

* `TransformersScorer` (`transformers_scorer.py`): a causal language model and its examples; results
  are cached, and workers share the batches. Used by `calibrate model fit`.
* `BatchScorer` (`calibrate/batch_fit.py`): a PyTorch module and batches with a function that gives
  log p. Used by `calibrate.fit_model`.
* `QuadraticScorer` (`tests/fakes.py`): gains known in closed form, for tests without a model.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from calibrate.datasets.examples import Scores
from calibrate.model.parameters import HeadId, Parameters
from calibrate.store.coefficients import Coefficients


class ModelScorer(Protocol):
    """Scores of a model's examples under rules of its heads, and their derivatives.

    Examples are given by their indices in the example set of the fit.
    """

    @property
    def heads(self) -> list[HeadId]:
        """The heads of the model."""
        ...

    def score(self, rules: Sequence[Coefficients], indices: Sequence[int]) -> list[Scores]:
        """The scores of some examples under each rule; nats."""
        ...

    def gradient(
        self, parameters: Parameters, indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers, (rows, columns).

        Log p of a question with several right answers is that of any of them; all have its weight.
        """
        ...

    def fisher_scores(self, parameters: Parameters, indices: Sequence[int]) -> np.ndarray:
        """Derivatives of log p of tokens that are drawn from the predictions of windows of text.

        (windows, rows, columns), over the root of the number of tokens: their squares add up to the
        Fisher information, the second derivatives of the KL of text, nats a token.
        """
        ...
