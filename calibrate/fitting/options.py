"""Options of a fit to the inputs of a head: one table of defaults."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from calibrate.core.rule import CONSTANT, KINDS, LOG_SIZE, POLYNOMIAL, RuleForm
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
MIN_INPUTS = 100  # of a fit; of least squares, misranked inputs
MIN_GROUPS = 10
MAX_NUMBER = 1 << 53  # of sizes and tolerances: the integers up to it are exact as floats
# The guards of the rule by loss, where the options give none.
GUARDS: dict[str, dict[str, Any]] = {
    LIKELIHOOD: {"min_entropy": 0.0, "min_beta": MIN_BETA, "max_beta": MAX_BETA},
    LEAST_SQUARES: {
        "min_entropy": MIN_ENTROPY, "min_beta": PAPER_MIN_BETA, "max_beta": PAPER_MAX_BETA
    },
}  # fmt: skip
RANGES = {
    "min_entropy": (0, 20), "min_beta": (MIN_BETA, 1), "max_beta": (1, MAX_BETA),
    "trained_up_to": (0, MAX_NUMBER), "tolerance": (0, MAX_NUMBER), "seed": (0, 2**64 - 1),
}  # fmt: skip


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit; `resolved` fills in the defaults of the loss.

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

    def resolved(self, trained_up_to: int | None = None) -> "FitOptions":
        """The options with every default filled in, checked.

        Raises:
          CalibrateError: an option is out of range, or does not go with another.
        """
        if self.loss not in LOSSES:
            raise CalibrateError(f"loss is {self.loss!r}; give one of {', '.join(LOSSES)}")
        defaults = {**GUARDS[self.loss], "trained_up_to": trained_up_to}
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        options = replace(self, **missing)
        options._check_kind()
        numbers: dict[str, Any] = {name: _in_range(name, getattr(options, name)) for name in RANGES}
        return replace(options, **numbers)

    def _check_kind(self) -> None:
        if self.kind not in (None, *KINDS):
            loss = f', or loss="{LEAST_SQUARES}"' if self.kind == LEAST_SQUARES else ""
            raise CalibrateError(f"kind is {self.kind!r}; give one of {', '.join(KINDS)}{loss}")
        if self.loss == LEAST_SQUARES and self.rule_kind != POLYNOMIAL:
            raise CalibrateError(
                f"loss {LEAST_SQUARES} fits the polynomial alone, and kind is {self.kind!r}; "
                "leave one of them out"
            )
        if self.min_entropy and self.rule_kind in (CONSTANT, LOG_SIZE):
            raise CalibrateError(
                f"a rule of kind {self.rule_kind} has no threshold; leave min_entropy= out",
                parameter="min_entropy",
            )

    def form(self, kind: str) -> RuleForm:
        """The form of a rule of a kind, of options that are resolved."""
        guards: dict[str, Any] = {name: getattr(self, name) for name in GUARDS[self.loss]}
        if not RuleForm(kind=kind).by_entropy:
            guards["min_entropy"] = 0.0
        return RuleForm(**guards, kind=kind)

    def record(self) -> dict[str, Any]:
        """The options as a coefficient file has them."""
        given = asdict(self) | {"kind": self.rule_kind}
        return {name: value for name, value in given.items() if value is not None}


def _in_range(name: str, value: Any) -> float | int | None:
    """An option as a number of Python, an integer where it must be one; CalibrateError if not."""
    if value is None and name == "trained_up_to":
        return None
    low, high = RANGES[name]
    is_whole = name in ("trained_up_to", "seed")
    if not low <= value <= high or (is_whole and value != int(value)):
        noun = "an integer" if is_whole else "a number"
        raise CalibrateError(f"{name} is {value}; give {noun} from {low:g} to {high:g}")
    return int(value) if is_whole else float(value)
