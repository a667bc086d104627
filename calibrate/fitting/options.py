"""Options of a fit to rows, and the losses that they name."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import DEGREE, KINDS, OF_LEAST_SQUARES
from calibrate.datasets.row_collection import RowCollection
from calibrate.defaults import MIN_BETA_LIMIT, MIN_ENTROPY, NLL_TOLERANCE
from calibrate.errors import CalibrateError
from calibrate.evidence.non_inferiority import NonInferiority, trained_sizes
from calibrate.evidence.prior import PRIOR_ROWS
from calibrate.fitting.fit_polynomial import (
    LEAST_SQUARES,
    LOG_LEAST_SQUARES,
    LeastSquares,
    LogLeastSquares,
)
from calibrate.solver.solved_rows import Rows

LIKELIHOOD = "likelihood"
SQUARES: dict[str, LogLeastSquares | LeastSquares] = {
    "log-least-squares": LOG_LEAST_SQUARES,
    "least-squares": LEAST_SQUARES,
}


@dataclass(frozen=True)
class LogLikelihood:
    """The log-likelihood, the sum of log p; with q > 0 that of (p^q - 1) / q.

    q is the exponent of the generalised cross-entropy: at 1 the mean of p is maximised.
    """

    q: float = 0.0


Loss = LogLikelihood | LogLeastSquares | LeastSquares


class Options(NamedTuple):
    """Options of a fit to rows."""

    rows: str | None = None  # "all" or "misranked"; None: those of the collection
    min_entropy: float = 0.0  # nats: at and below it beta is 1; 0 is no threshold
    prior_rows: float = PRIOR_ROWS  # see calibrate/evidence/prior.py
    q: float | None = None  # of the loss, 0 (maximum likelihood) to 1; None: selected, from 0
    # Up to this set size log p may fall by `tolerance`; None: that of the collection, if any.
    trained_up_to: int | None = None
    kind: str | None = None  # of rule, published whatever its verdict; None: selected by scores
    min_beta: float = 1.0  # the least beta of a rule, from MIN_BETA_LIMIT to 1
    loss: str = LIKELIHOOD  # or one of SQUARES, of polynomials: see fitting/fit_polynomial.py
    tolerance: float = NLL_TOLERANCE  # nats, in the mean of held-out rows of a size

    @classmethod
    def of_the_paper(cls) -> "Options":
        """The paper's procedure, robust: see `calibrate/fitting/fit_polynomial.py`."""
        return cls("misranked", MIN_ENTROPY, kind=OF_LEAST_SQUARES.name, loss=next(iter(SQUARES)))

    @property
    def tunes_q(self) -> bool:
        """True if the loss has a q, and the accuracy of a head may select it."""
        return self.q is None and self.loss == LIKELIHOOD

    def checked(self) -> "Options":
        """The options; raises CalibrateError for one that is out of range."""
        ranges = {
            "q": (0, 1),
            "trained_up_to": (0, np.inf),
            "tolerance": (0, np.inf),
            "min_beta": (MIN_BETA_LIMIT, 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise CalibrateError(f"{name} is {value}; give a number from {low:g} to {high:g}")
        if not isinstance(self.trained_up_to, int | np.integer | None):
            raise CalibrateError(f"trained_up_to is {self.trained_up_to}; give an integer")
        losses = (LIKELIHOOD, *SQUARES)
        choices = {"kind": (None, *KINDS), "loss": losses, "rows": (None, "all", "misranked")}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                words = ", ".join(filter(None, known))
                raise CalibrateError(f"{name} is {value!r}; give one of {words}")
        if self.loss != LIKELIHOOD:
            self._check_least_squares()
        return self

    def _check_least_squares(self) -> None:
        """Raises CalibrateError for options that least squares would ignore."""
        kind = OF_LEAST_SQUARES.name
        if self.kind != kind:
            raise CalibrateError(f"loss {self.loss} fits the {kind} alone; give kind {kind}")
        absent = {"q": (None, 0), "trained_up_to": (None,), "tolerance": (NLL_TOLERANCE,)}
        for name, values in absent.items():
            if getattr(self, name) not in values:
                raise CalibrateError(
                    f"loss {self.loss} has no {name}; leave out {name}=, or give "
                    f'loss="{LIKELIHOOD}"',
                    parameter=(name, "loss"),
                )

    def record(self) -> dict[str, Any]:
        """The options as a coefficient file keeps them."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        # Keys of files stay as they were, and files from before an option are of the same fit.
        absent = {"min_beta": 1, "loss": LIKELIHOOD, "tolerance": NLL_TOLERANCE}
        given = {k: value for k, value in given.items() if absent.get(k) != value}
        of_files = {"min_entropy": "gate", "kind": "force"}
        named = {of_files.get(name, name): value for name, value in given.items()}
        return named | {"degree": DEGREE}

    def loss_of_fit(self) -> Loss:
        """The loss, with q = 0 where the options leave it open."""
        if self.loss == LIKELIHOOD:
            return LogLikelihood(self.q or 0.0)
        return SQUARES[self.loss]

    def trained_limit(self) -> NonInferiority:
        """The limit on what rows of trained sizes may lose; without such sizes it has no rows."""
        return trained_sizes(self.trained_up_to or 0, self.tolerance)

    def rule(self, file_kind: str) -> Rule:
        """The guards of a rule of this kind in a file."""
        return Rule(self.min_entropy, self.min_beta, kind=file_kind)

    def usable(self, rows: Rows) -> np.ndarray:
        """(rows,) bool: the solved rows that a fit is made of; not those at which the rule is off.

        A rule without a threshold of entropy is not fitted where the options have one.
        """
        usable = rows.has_optimum()
        if self.min_entropy > 0:
            usable &= rows.entropy > self.min_entropy
        return usable & rows.misranked if self.rows == "misranked" else usable


def resolve_options(collection: RowCollection, options: Options | None = None) -> Options:
    """The options, checked; what they leave open is as the collection has it.

    Least squares have no limit on what sizes of the training may lose, and may not be given one;
    those sizes of the collection are recorded, so that reports state the loss there.
    """
    options = (options or Options()).checked()
    configuration = collection.manifest["configuration"]
    if options.rows == "all" and collection.misranked_only:
        raise CalibrateError(
            f"{collection.folder} keeps misranked rows only, and all are asked for; collect into "
            f"another folder and keep all rows, or fit with "
            'rows="misranked"',
            parameter="rows",
        )
    if options.trained_up_to is None:
        options = options._replace(trained_up_to=configuration.get("trained_up_to"))
    kept = "misranked" if collection.misranked_only else "all"
    return options._replace(rows=options.rows or kept)
