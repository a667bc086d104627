"""Options of a fit to the inputs of a head: one table of defaults."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from calibrate.core.rule import CONSTANT, KINDS, LOG_SIZE, POLYNOMIAL, Rule
from calibrate.defaults import (
    MAX_BETA,
    MIN_BETA,
    MIN_ENTROPY,
    NLL_TOLERANCE,
    PAPER_MAX_BETA,
    PAPER_MIN_BETA,
)
from calibrate.errors import CalibrateError

LIKELIHOOD = "likelihood"
LEAST_SQUARES = "least-squares"
LOSSES = (LIKELIHOOD, LEAST_SQUARES)
MIN_INPUTS = 100  # that a fit needs; of least squares, misranked ones
MIN_GROUPS = 10
MAX_NUMBER = 1 << 53  # of sizes and tolerances: finite, and exact as a float
# By loss: the guards of the rule where the options name none.
GUARDS = {
    LIKELIHOOD: {"min_entropy": 0.0, "min_beta": MIN_BETA, "max_beta": MAX_BETA},
    LEAST_SQUARES: {
        "min_entropy": MIN_ENTROPY, "min_beta": PAPER_MIN_BETA, "max_beta": PAPER_MAX_BETA
    },
}  # fmt: skip


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit; `resolved` fills in the defaults of its loss.

    Attributes:
      kind: of rule, one of KINDS; None: the default, a polynomial that is saved only if it gains.
      loss: "likelihood", of all inputs; or "least-squares", the paper's procedure: squares of the
        optimal beta of misranked inputs, for a polynomial.
      min_entropy: nats, at and below which beta is 1; 0 is no threshold.
      min_beta, max_beta: bounds of beta.
      trained_up_to: largest n of the training data; None: that of the collection, if it has one.
      tolerance: NLL in nats that may be lost at sizes up to it.
      seed: of the folds.
    """

    kind: str | None = None
    loss: str = LIKELIHOOD
    min_entropy: float | None = None
    min_beta: float | None = None
    max_beta: float | None = None
    trained_up_to: int | None = None
    tolerance: float = NLL_TOLERANCE
    seed: int = 0

    @property
    def is_named(self) -> bool:
        """True if the user named the kind, which is saved whatever its verdict."""
        return self.kind is not None

    @property
    def rule_kind(self) -> str:
        """The kind of rule that is fitted."""
        return POLYNOMIAL if self.kind is None else self.kind

    @property
    def procedure(self) -> str:
        """The kind of rule that is fitted by likelihood, or "least-squares"."""
        return self.rule_kind if self.loss == LIKELIHOOD else LEAST_SQUARES

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of beta, of options that are resolved."""
        assert self.min_beta is not None
        assert self.max_beta is not None
        return self.min_beta, self.max_beta

    def resolved(self, trained_up_to: int | None = None) -> "FitOptions":
        """The options with every default filled in, checked.

        Raises:
          CalibrateError: an option is out of range, or does not go with another.
        """
        if self.loss not in LOSSES:
            raise CalibrateError(f"loss is {self.loss!r}; give one of {', '.join(LOSSES)}")
        defaults: dict[str, Any] = {**GUARDS[self.loss], "trained_up_to": trained_up_to}
        missing = {name: x for name, x in defaults.items() if getattr(self, name) is None}
        options = replace(self, **missing)
        options._check()
        names = (*GUARDS[self.loss], "tolerance")
        numbers: dict[str, Any] = {name: float(getattr(options, name)) for name in names}
        up_to = options.trained_up_to
        return replace(
            options,
            **numbers,
            trained_up_to=None if up_to is None else int(up_to),
            seed=int(options.seed),
        )

    def _check(self) -> None:
        if self.kind not in (None, *KINDS):
            loss = f', or loss="{LEAST_SQUARES}"' if self.kind == LEAST_SQUARES else ""
            raise CalibrateError(f"kind is {self.kind!r}; give one of {', '.join(KINDS)}{loss}")
        if self.loss == LEAST_SQUARES and self.rule_kind != POLYNOMIAL:
            raise CalibrateError(
                f"loss {LEAST_SQUARES} fits the polynomial alone, and kind is {self.kind!r}; "
                "leave one of them out"
            )
        ranges = {
            "min_entropy": (0, 20), "min_beta": (MIN_BETA, 1), "max_beta": (1, MAX_BETA),
            "trained_up_to": (0, MAX_NUMBER), "tolerance": (0, MAX_NUMBER), "seed": (0, 2**64 - 1),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is None and name == "trained_up_to":
                continue
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise CalibrateError(f"{name} is {value}; give a number from {low:g} to {high:g}")
        for name in ("trained_up_to", "seed"):
            if not isinstance(getattr(self, name), int | np.integer | None):
                raise CalibrateError(f"{name} is {getattr(self, name)}; give an integer")
        if self.min_entropy and self.rule_kind in (CONSTANT, LOG_SIZE):
            raise CalibrateError(
                f"a rule of kind {self.rule_kind} has no threshold; leave min_entropy= out",
                parameter="min_entropy",
            )

    def rule(self, kind: str) -> Rule:
        """The guards of a rule of a kind, of options that are resolved."""
        assert self.min_entropy is not None
        by_entropy = Rule(kind=kind).by_entropy
        return Rule(self.min_entropy if by_entropy else 0.0, *self.bounds, kind=kind)

    def record(self) -> dict[str, Any]:
        """The options as a coefficient file has them."""
        given = asdict(self) | {"kind": self.rule_kind}
        return {name: value for name, value in given.items() if value is not None}
