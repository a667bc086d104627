"""Cross-validation: folds of whole groups, and the choice of the penalty lambda of each kind."""

import math
from collections.abc import Sequence

import numpy as np

from calibrate.core.rule import RuleForm
from calibrate.evidence.estimate import estimate
from calibrate.fitting.penalised_likelihood import (
    KIND_COLUMNS,
    MIN_RANGE,
    PENALTIES,
    fit_constant_beta,
    make_design,
    make_likelihood,
)
from calibrate.rows.solve import SolvedInputs

N_FOLDS = 5


def deal_folds(solved: SolvedInputs, seed: int = 0) -> np.ndarray:
    """(rows,) fold of each row, from 0 to N_FOLDS - 1; rows of one group share a fold.

    Groups are sorted by their largest n, mean entropy and mean log p at beta = 1. Each N_FOLDS
    successive groups go to different folds at random: so the folds are alike, and neither the order
    of the rows nor writing each row twice at half its weight changes them.
    """
    group = solved.group_index()
    n_groups = group.max(initial=-1) + 1
    largest = np.zeros(n_groups)
    np.maximum.at(largest, group, solved.n)
    total = np.bincount(group, solved.weight, n_groups)
    total = np.where(total > 0, total, 1)
    entropy, log_p = (
        np.bincount(group, solved.weight * values, n_groups) / total
        for values in (solved.entropy, solved.log_p(1.0))
    )
    order = np.lexsort([log_p, entropy, largest])
    rng = np.random.default_rng(seed)
    n_deals = -(-n_groups // N_FOLDS)
    deals = rng.permuted(np.tile(np.arange(N_FOLDS), (n_deals, 1)), axis=1).ravel()
    fold = np.empty(n_groups, int)
    fold[order] = deals[:n_groups]
    return np.asarray(fold[group])


def choose_penalties(
    solved: SolvedInputs, forms: Sequence[RuleForm], seed: int = 0, has_slope: bool = True
) -> dict[str, float]:
    """Chooses lambda of each kind by cross-validation.

    It is the largest lambda whose held-out log p is within one standard error of the best. Each of
    5 folds of whole groups is scored by rules that are fitted to the other four, with the ranges,
    means and constant of these. lambda is infinite where a slope cannot be seen: without misranked
    rows, or where a variable of the kind does not vary.

    Args:
      solved: see `fit_smoothed`.
      forms: of several kinds, with the same bounds of beta.
      seed: of the folds.
      has_slope: see `fit_rules`.
    Returns:
      By kind.
    """
    kinds = [form.kind for form in forms if has_slope and _can_see_slope(solved, form)]
    if not kinds:
        return {form.kind: math.inf for form in forms}
    bounds = forms[0].bounds
    fold = deal_folds(solved, seed)
    log_p = {kind: np.empty((len(PENALTIES), len(fold))) for kind in kinds}
    for i in range(N_FOLDS):
        train, test = solved.take(fold != i), solved.take(fold == i)
        constant, design = fit_constant_beta(train, bounds), make_design(train)
        columns, test_columns = (
            design.columns(part.entropy, np.log(part.n)) for part in (train, test)
        )
        for kind in kinds:
            chosen = KIND_COLUMNS[kind]
            likelihood = make_likelihood(train, columns[:, chosen], constant, bounds)
            solutions = likelihood.solve(PENALTIES)
            for j, penalty in enumerate(PENALTIES):
                beta = constant * (test_columns[:, chosen] @ solutions[penalty].c)
                log_p[kind][j, fold == i] = test.log_p(beta)
    without_slope = {form.kind: math.inf for form in forms}
    return without_slope | {kind: _largest_within_one_error(log_p[kind], solved) for kind in kinds}


def _can_see_slope(solved: SolvedInputs, form: RuleForm) -> bool:
    """True if the rows tell a slope: some are misranked, and every variable of the rule varies."""
    variables = []
    if form.by_entropy:
        variables.append(solved.entropy)
    if form.by_size:
        variables.append(np.log(solved.n))
    varies = all(np.ptp(values) > MIN_RANGE for values in variables)
    return bool(variables) and varies and bool(solved.misranked.any())


def _largest_within_one_error(log_p: np.ndarray, solved: SolvedInputs) -> float:
    """The largest of PENALTIES whose held-out log p (penalties, rows) is as good as the best.

    As good: the mean loss against the best is within one standard error, over groups, of that
    paired difference.
    """
    best = int(np.argmax(log_p @ solved.weight))
    losses = estimate(log_p[best] - log_p, solved.weight, solved.group)
    is_within = losses.mean <= np.nan_to_num(losses.error)
    return max(penalty for penalty, within in zip(PENALTIES, is_within, strict=True) if within)
