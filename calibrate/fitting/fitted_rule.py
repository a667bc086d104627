"""A rule that was fitted to the inputs of one head."""

from dataclasses import dataclass

import numpy as np

from calibrate.core.rule import Rule, beta_of
from calibrate.solver.solved_rows import Rows
from calibrate.store.entry import Entry

ROUNDING = 1e-9
AT_BOUND = 0.99  # of a bound, from which on beta counts as at it


@dataclass(frozen=True)
class FittedRule:
    """A rule in numbers.

    Attributes:
      rule: its kind and guards.
      coefficients, domain: as in a coefficient file.
      penalty: lambda of the smoothed fit, inf where the rule is a constant; None of least squares.
      degrees_of_freedom: effective ones.
    """

    rule: Rule
    coefficients: tuple[float, ...]
    domain: tuple[float, ...]
    penalty: float | None
    degrees_of_freedom: float

    def entry(self, layer: int | None = None, head: int | None = None) -> Entry:
        """The rule as an entry of a fit."""
        return Entry(self.coefficients, self.domain, layer, head)

    def beta(self, rows: Rows) -> np.ndarray:
        """(rows,) beta of each row."""
        log_n = np.log(rows.items)
        beta = beta_of(rows.entropy, log_n, self.coefficients, self.domain, self.rule, np)
        return np.broadcast_to(beta, rows.entropy.shape)

    def bound_reached(self, rows: Rows) -> str:
        """The bound that beta is at in most rows by weight, "min" or "max"; else ""."""
        beta, share = self.beta(rows), rows.weight / rows.weight.sum()
        if share @ (beta >= AT_BOUND * self.rule.max_beta) > 0.5:
            return "max"
        return "min" if share @ (beta <= self.rule.min_beta / AT_BOUND) > 0.5 else ""

    def r_squared(self, rows: Rows) -> float | None:
        """R^2 of log beta: 1 - Var(log beta* - log beta) / Var(log beta*).

        Of the misranked rows with a finite optimal beta*; None where these do not vary.
        """
        used = rows.take(rows.fitted_by_least_squares())
        if not len(used.beta):
            return None
        share = used.weight / used.weight.sum()

        def variance(values: np.ndarray) -> float:
            return float(share @ (values - share @ values) ** 2)

        optimal = np.log(used.beta)
        total = variance(optimal)
        if not total > 0:
            return None
        r_squared = 1 - variance(optimal - np.log(self.beta(used))) / total
        return 0.0 if abs(r_squared) < ROUNDING else r_squared  # of a constant
