"""Least squares of the optimal beta of misranked inputs: the paper's procedure, and R^2."""

import numpy as np

from calibrate.core.rule import DEGREE
from calibrate.errors import QualityError
from calibrate.rows.solve import SolvedInputs

LEAST_R_SQUARED = 1e-9  # less is rounding


def fit_least_squares(solved: SolvedInputs) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Fits numpy.polyfit to the optimal beta of the misranked rows; no optimal beta is clipped.

    Returns:
      (coefficients of H^4 to 1, the least and the largest entropy of these rows).
    Raises:
      QualityError: too few different entropies.
    Reference: Velickovic et al. 2024, appendix B.
    """
    used = solved.take(solved.fitted_by_least_squares())
    n_entropies = len(np.unique(used.entropy))
    if n_entropies <= DEGREE:
        raise QualityError(
            f"the misranked inputs have {n_entropies} different entropies, and a polynomial of "
            f"degree {DEGREE} needs more; collect more inputs"
        )
    powers = np.polyfit(used.entropy, used.beta, DEGREE, w=np.sqrt(used.weight))
    return tuple(map(float, powers)), (float(used.entropy.min()), float(used.entropy.max()))


def r_squared_of_log_beta(solved: SolvedInputs, beta: np.ndarray) -> float | None:
    """R^2 of a rule's (rows,) beta: 1 - Var(log beta* - log beta) / Var(log beta*).

    It is of the misranked rows with a finite optimal beta*; None where these do not vary.
    """
    is_used = solved.fitted_by_least_squares()
    if not is_used.any():
        return None
    share = solved.weight[is_used] / solved.weight[is_used].sum()
    optimal = np.log(solved.beta[is_used])
    residual = optimal - np.log(beta[is_used])
    total, rest = (share @ (values - share @ values) ** 2 for values in (optimal, residual))
    if not total > 0:
        return None
    r_squared = float(1 - rest / total)
    return 0.0 if abs(r_squared) < LEAST_R_SQUARED else r_squared
