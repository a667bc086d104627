"""The optimal temperature of every input of a collection, as arrays."""

from dataclasses import dataclass

import numpy as np

from calibrate.datasets.row_collection import RowCollection
from calibrate.solver.optimal_beta import STATUS_NAMES
from calibrate.solver.solved_rows import Rows


@dataclass(frozen=True, eq=False)
class SolvedInputs:
    """The optimal temperature of every input that was collected; arrays are (inputs,).

    Attributes:
      rows: the inputs, solved.
      collection: what they were collected in.
    """

    rows: Rows
    collection: RowCollection

    @property
    def n(self) -> np.ndarray:
        """Unmasked items of each input."""
        return self.rows.items

    @property
    def entropy(self) -> np.ndarray:
        """Shannon entropy of softmax(z), nats."""
        return self.rows.entropy

    @property
    def beta(self) -> np.ndarray:
        """The inverse temperature beta > 0 that maximises log p of the target.

        inf where log p rises for ever (the target is ranked first), 0 where no beta > 0 is best.
        """
        return self.rows.beta

    @property
    def theta(self) -> np.ndarray:
        """The temperature 1 / beta; 0 where beta is inf, inf where it is 0."""
        with np.errstate(divide="ignore"):
            return 1 / self.rows.beta

    @property
    def status(self) -> np.ndarray:
        """Classes of the optima, texts: "interior", "sharp" (beta = inf), "flat" or "unsolved"."""
        names = np.array([STATUS_NAMES[code] for code in range(len(STATUS_NAMES))])
        return np.asarray(names[self.rows.status])

    @property
    def misranked(self) -> np.ndarray:
        """True where some item's logit is greater than the target's, bool."""
        return self.rows.misranked
