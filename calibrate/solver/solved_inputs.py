"""The optimal temperature of every input of a collection, as arrays."""

from dataclasses import dataclass

import numpy as np

from calibrate.datasets.row_collection import RowCollection
from calibrate.solver.optimal_beta import STATUS_NAMES
from calibrate.solver.solved_rows import Rows

QUARTILES = 0.25, 0.5, 0.75


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        """Numbers of inputs by class of their optimum, and quartiles of theta."""
        counts = ", ".join(f"{n:,} {name}" for name, n in self.rows.count_by_status().items() if n)
        lines = [
            f"Solved inputs of {self.collection.folder}",
            f"{len(self.theta):,} inputs, {np.count_nonzero(self.misranked):,} misranked",
            f"optimum: {counts}",
        ]
        if self.misranked.any():
            quartiles = ", ".join(f"{theta:.3g}" for theta in theta_quartiles(self.rows))
            lines.append(f"theta of misranked inputs, quartiles: {quartiles}")
        return "\n".join(lines)


def theta_quartiles(rows: Rows) -> np.ndarray:
    """(3,) weighted quartiles of theta = 1 / beta of misranked rows; NaN without any."""
    used = rows.take(rows.misranked & (rows.weight > 0) & ~np.isnan(rows.beta))
    if not len(used.beta):
        return np.full(len(QUARTILES), np.nan)
    with np.errstate(divide="ignore"):
        theta = 1 / used.beta  # inf where beta is 0, and so no mean of two
    return np.quantile(theta, QUARTILES, method="inverted_cdf", weights=used.weight)
