"""The prior of a gain, pseudo-observations, which the lower end of its interval includes.

A sample of N rows does not show failures that are rarer than 1 in N, and log p has no bound: a head
that is right in all of 100 rows seems to gain by any larger beta. So rules are fitted as if there
were m more rows, pseudo-observations with the logits of the others and targets drawn from the
baseline, and the lower end of an interval includes them. They are the prior of a Dirichlet process
(Ferguson 1973), that the head is calibrated as it is: the posterior's mean is that of N + m rows,
and its variance includes that of such targets. N counts groups, as all rows of a few may lack
failures that others show; m is 10, but N / 4 at most. A fit needs fewer of them, the more failures
its rows do show: m falls as 1 / (1 + f / 10) with f misranked ones. The test of a fit has all of
them. Where rows have sets of targets, the baseline draws one item: the beta of such fits is
somewhat smaller than the optimum.
"""

import numpy as np

from calibrate.evidence.estimate import MIN_EFFECTIVE, t_quantile
from calibrate.evidence.evidence import PLAIN, Evidence
from calibrate.evidence.metrics import BETA, EXPECTED, LOG_P
from calibrate.evidence.selection_criterion import Gain

PRIOR_ROWS = 10.0
MAX_PRIOR = 0.25  # of the number of groups
SHOWN_FAILURES = 10.0  # misranked rows that halve the prior of a fit


def prior_of_fit(prior_rows: float, failures: float) -> float:
    """The number of pseudo-observations of a fit, whose rows show so many failures."""
    return prior_rows / (1 + failures / SHOWN_FAILURES)


def prior_share(groups: float, prior_rows: float) -> tuple[float, float]:
    """The share m / (N + m) of m more rows, and N + m.

    Args:
      groups: N, their effective number.
      prior_rows: m, but a quarter of N at most, or few groups would never outweigh them.
    """
    m = min(prior_rows, groups * MAX_PRIOR)
    return m / (groups + m), groups + m


def cautious_gain(
    evidence: Evidence, rule: str, over: str = PLAIN, prior_rows: float = PRIOR_ROWS
) -> Gain:
    """The mean gain of a rule over another in log p, and its interval with the prior.

    Args:
      evidence: with LOG_P, BETA and EXPECTED, and the variance of each row.
      rule: whose gain it is.
      over: the rule that it is compared with.
      prior_rows: m.
    """
    from scipy.special import stdtr

    design = evidence.design
    difference = evidence.scores(rule, LOG_P) - evidence.scores(over, LOG_P)
    mean, error = map(float, design.mean_and_error(difference))
    degrees = max(design.dof, MIN_EFFECTIVE - 1)
    error = error if design.groups >= MIN_EFFECTIVE else np.inf
    both = np.array([[mean, error], _posterior(evidence, rule, over, prior_rows, mean, error)])
    margin = both[:, 1] * t_quantile(degrees)
    low, high = (both[:, 0] - margin).min(), mean + margin[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.nan_to_num(both[:, 0] / both[:, 1], nan=0.0)
    p = min(1.0, 2 * float(stdtr(degrees, -t).max()))
    return Gain(mean, float(low), float(high), p)


def _posterior(
    evidence: Evidence, rule: str, over: str, prior_rows: float, mean: float, error: float
) -> tuple[float, float]:
    """Mean and standard deviation of the gain, given those of the rows alone."""
    assert evidence.variance is not None
    weight = evidence.design.item_weight
    expected = evidence.scores(rule, EXPECTED) - evidence.scores(over, EXPECTED)
    prior_mean = float(weight @ expected)
    # For a target drawn from the baseline, the difference is (beta - beta') z + constant.
    step = evidence.scores(rule, BETA) - evidence.scores(over, BETA)
    prior_variance = weight @ ((expected - prior_mean) ** 2 + step**2 * evidence.variance)
    share, n = prior_share(evidence.design.groups, prior_rows)
    between = share * (1 - share) * (mean - prior_mean) ** 2
    variance = ((1 - share) * error) ** 2 + (share * prior_variance + between) / (n + 1)
    return (1 - share) * mean + share * prior_mean, float(np.sqrt(variance))
