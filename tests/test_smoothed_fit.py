"""The smoothed fit: penalised maximum likelihood of each kind, against SciPy and planted rules."""

import math

import numpy as np
import paper_procedure_data
import pytest
from planted import planted_rows, weighted_and_repeated
from reference import entropy
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax

from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, KINDS, LOG_SIZE, POLYNOMIAL, TERMS
from calibrate.core.rule import beta_of as rule_beta
from calibrate.fitting.fit_rule import (
    N_FOLDS,
    can_have_slope,
    choose_penalty,
    deal_folds,
    fit_rule,
    fit_smoothed,
)
from calibrate.fitting.held_out import score_held_out
from calibrate.fitting.options import FitOptions
from calibrate.fitting.penalised_likelihood import (
    KIND_COLUMNS,
    PENALTIES,
    degrees_of_freedom,
    fit_constant_beta,
    is_exact_in_float32,
    make_design,
    make_likelihood,
    penalty_curvatures,
)
from calibrate.rows.solve import concatenate_solved, solve_rows

BOUNDS = 1 / 1024, 1024.0
OPTIONS = FitOptions().resolved()


def fit(rows, kind=POLYNOMIAL):
    return fit_rule(rows, kind, OPTIONS)


def likelihood_of(rows, kind, constant=None):
    """The likelihood of a kind, and its design."""
    constant = fit_constant_beta(rows, BOUNDS) if constant is None else constant
    design = make_design(rows)
    columns = design.columns(rows.entropy, np.log(rows.n))[:, KIND_COLUMNS[kind]]
    return make_likelihood(rows, columns, constant, BOUNDS), design


def loss(likelihood, c, penalty):
    return likelihood.evaluate(c).loss(penalty_curvatures(len(c), penalty))


def rising(H, n):
    """A planted rule that depends on the entropy alone."""
    return 0.5 + 1.2 * H


@pytest.fixture(scope="module")
def rows():
    return planted_rows(rising, count=600)


def gumbel_targets(z, beta, seed=1):
    rng = np.random.default_rng(seed)
    return (beta * z + rng.gumbel(size=z.shape)).argmax(axis=1)


def solved(z, target, **columns):
    z = np.asarray(z, np.float32)
    return solve_rows(z, np.asarray(target), entropy(z), z.shape[1])._replace(**columns)


def nll(z, target, beta):
    return -log_softmax(np.reshape(beta, (-1, 1)) * z, axis=1)[np.arange(len(z)), target]


# A flat likelihood has its optimum less well in float32.
@pytest.mark.parametrize(
    ("beta", "rtol", "n_rows", "n_groups"),
    [
        *((beta, rtol, *numbers)
          for beta, rtol in ((0.3, 1e-5), (1, 1e-6), (8, 1e-6), (13.5, 1e-6))
          for numbers in ((1_200, 40), (100, 100))),
        (8, 1e-6, 10_000, 10_000),
    ],
)  # fmt: skip
def test_a_constant_is_scipys_optimum_and_near_the_planted_one(beta, rtol, n_rows, n_groups):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(n_rows, 12)).astype(np.float32)
    target = gumbel_targets(z, beta)
    group = np.repeat(np.arange(n_groups), n_rows // n_groups)
    constant = fit_constant_beta(solved(z, target, group=group), BOUNDS)
    best = minimize_scalar(
        lambda x: nll(z.astype(float), target, np.exp(x)).mean(),
        bounds=(-6, 6), method="bounded", options={"xatol": 1e-12},
    )  # fmt: skip
    assert constant == pytest.approx(np.exp(best.x), rel=rtol)
    p = np.exp(log_softmax(constant * z.astype(float), axis=1))
    variance = (p * z**2).sum(1) - (p * z).sum(1) ** 2
    assert abs(constant - beta) < 3 / math.sqrt(variance.sum())


@pytest.mark.parametrize(
    ("kind", "penalty"),
    [*((kind, 1e-2) for kind in KINDS), *((kind, 0.0) for kind in (LOG_SIZE, POLYNOMIAL))],
)
def test_no_other_coefficients_have_a_lower_penalised_nll(rows, kind, penalty):
    """Another minimiser of SciPy, without derivatives, on the same columns finds none."""
    likelihood, _ = likelihood_of(rows, kind)
    best = likelihood.solve((1.0, penalty))[penalty]
    other = minimize(lambda c: loss(likelihood, c, penalty), best.c + 0.05, method="Powell",
                     options={"xtol": 1e-8, "ftol": 1e-12})  # fmt: skip
    lowest = loss(likelihood, best.c, penalty)
    assert lowest <= other.fun + 1e-9
    beta = np.clip(likelihood.constant * likelihood.columns @ best.c, *BOUNDS)
    mean = -np.average(rows.log_p(beta), weights=rows.weight)
    assert lowest == pytest.approx(mean + penalty * (best.c[1:] ** 2).sum(), rel=1e-9)


def test_gradient_and_hessian_are_those_of_the_loss(rows):
    likelihood, _ = likelihood_of(rows, ENTROPY_AND_SIZE, constant=1.5)
    c = np.array([1.1, 0.3, -0.1, 0.05, 0.02, 0.1, 0.03, -0.05])
    point, steps = likelihood.evaluate(c), 1e-4 * np.eye(len(c))
    above, below = ([likelihood.evaluate(c + sign * step) for step in steps] for sign in (1, -1))
    pairs = list(zip(above, below, strict=True))
    numeric = np.array([(a.nll - b.nll) / 2e-4 for a, b in pairs])
    np.testing.assert_allclose(point.gradient, numeric, atol=2e-5)
    numeric = np.array([(a.gradient - b.gradient) / 2e-4 for a, b in pairs])
    np.testing.assert_allclose(point.hessian, numeric, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_coefficients_are_the_rule_of_the_columns(rows, kind):
    design, rng = make_design(rows), np.random.default_rng(0)
    c = np.r_[1.0, rng.normal(size=len(KIND_COLUMNS[kind]) - 1) / 10]
    plain = design.plain_coefficients(kind, c)
    assert len(plain) == len(TERMS[kind])
    H, log_n = np.clip(rows.entropy, design.entropy.low, design.entropy.high), np.log(rows.n)
    expected = design.columns(H, log_n)[:, KIND_COLUMNS[kind]] @ c
    guards = OPTIONS.form(kind)._replace(min_beta=1e-9, max_beta=1e9)
    beta = rule_beta(H, log_n, plain, design.domain(guards), guards, np)
    np.testing.assert_allclose(np.broadcast_to(beta, H.shape), expected, rtol=1e-9)


def test_a_planted_rule_comes_back(rows):
    rule = fit(rows)
    lo, hi = rule.domain
    inside = (rows.entropy > lo) & (rows.entropy < hi)
    expected = rising(rows.entropy, rows.n)[inside]
    np.testing.assert_allclose(rule.beta(rows)[inside], expected, rtol=0.25)
    assert rule.degrees_of_freedom > 1.5
    assert rule.penalty < 1


def test_a_planted_line_in_log_n_comes_back():
    rows = planted_rows(lambda H, n: 0.5 * np.log(n) + 0 * H, count=800)
    slope, level = fit(rows, LOG_SIZE).coefficients
    assert slope == pytest.approx(0.5, abs=0.08)
    assert level == pytest.approx(0, abs=0.3)


def test_where_a_constant_is_right_the_rule_is_nearly_one():
    rows = planted_rows(lambda H, n: 2.0 + 0 * H, count=600)
    rule = fit(rows)
    assert rule.degrees_of_freedom < 2.5
    np.testing.assert_allclose(rule.beta(rows), fit_constant_beta(rows, BOUNDS), rtol=0.1)


def test_degrees_of_freedom_fall_with_the_penalty(rows):
    likelihood, _ = likelihood_of(rows, POLYNOMIAL)
    points = likelihood.solve(PENALTIES)
    freedom = [degrees_of_freedom(points[penalty], penalty) for penalty in PENALTIES]
    assert freedom[0] == pytest.approx(5)
    assert freedom == sorted(freedom, reverse=True)
    assert degrees_of_freedom(points[1.0], 1e9) == pytest.approx(1, abs=1e-6)


def test_a_shorter_likelihood_gives_the_larger_penalty():
    """A wiggle that few rows show is not fitted; many rows show it."""
    few, many = (planted_rows(rising, count=count, seed=3) for count in (30, 1_500))
    assert fit(few).penalty > fit(many).penalty


def permuted(z, target, group, weight, rng):
    order = rng.permutation(len(z))
    return z[order], target[order], group[order], weight[order]


def shifted(z, target, group, weight, rng):
    return z + rng.integers(-8, 8, (len(z), 1)), target, group, weight


def relabelled(z, target, group, weight, rng):
    order = rng.permutation(z.shape[1])
    return z[:, order], np.argsort(order)[target], 7 * group + 3, weight


def doubled(z, target, group, weight, rng):
    return (np.repeat(x, 2, axis=0) for x in (z, target, group, weight / 2))


def padded(z, target, group, weight, rng):
    return np.pad(z, ((0, 0), (0, 5)), constant_values=-np.inf), target, group, weight


def fit_of_columns(kind, z, target, group, weight):
    return fit(solved(z, target, group=group, weight=weight), kind)


@pytest.fixture(scope="module", params=[CONSTANT, POLYNOMIAL])
def kind_columns_and_fit(request):
    rng = np.random.default_rng(0)
    z = np.round(64 * rng.uniform(0.3, 2, (1_200, 1)) * rng.normal(size=(1_200, 24))) / 64
    target = gumbel_targets(z, 0.5 + rising(entropy(z), 24)[:, None])
    columns = z, target, np.arange(1_200) // 4, rng.random(1_200).astype(np.float32)
    return request.param, columns, fit_of_columns(request.param, *columns)


@pytest.mark.parametrize("change", [permuted, shifted, relabelled, doubled, padded])
def test_what_does_not_matter(change, kind_columns_and_fit):
    kind, columns, one = kind_columns_and_fit
    other = fit_of_columns(kind, *change(*columns, np.random.default_rng(1)))
    assert one.penalty == other.penalty
    np.testing.assert_allclose(one.domain, other.domain, rtol=1e-5)
    H = np.linspace(0.5, 3, 50)
    betas = [rule_beta(H, None, x.coefficients, x.domain, x.form, np) for x in (one, other)]
    np.testing.assert_allclose(*betas, rtol=1e-4)


@pytest.mark.parametrize("scale", [1 / 64, 64.0])
@pytest.mark.parametrize("kind", [CONSTANT, LOG_SIZE])
def test_rules_without_entropy_scale_with_the_logits(scale, kind):
    rng = np.random.default_rng(0)
    parts = {1.0: [], scale: []}
    for n in (8, 32):
        z = rng.normal(size=(600, n)).astype(np.float32)
        target = gumbel_targets(z, 0.8 * np.log(n), seed=n)
        for factor, rows in parts.items():
            rows.append(solved(z * np.float32(factor), target))
    one, other = (fit(concatenate_solved(rows), kind) for rows in parts.values())
    np.testing.assert_allclose(scale * np.array(other.coefficients), one.coefficients, rtol=2e-5)
    assert one.penalty == other.penalty


def test_inputs_that_are_all_ranked_right_have_a_constant_of_their_margin():
    z = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
    rule = fit(solved(z, z.argmax(axis=1)))
    ordered = np.sort(z, axis=1)
    margin = np.sort(ordered[:, -1] - ordered[:, -2])[249]
    assert rule.coefficients == pytest.approx((0, 0, 0, 0, math.log(501) / margin), rel=1e-5)
    assert (rule.penalty, rule.degrees_of_freedom) == (math.inf, 1.0)


def test_without_a_slope_to_see_the_rule_is_the_constant():
    rng = np.random.default_rng(0)
    z = 5.0 * (np.arange(10) == rng.integers(0, 10, 800)[:, None])
    target = np.where(rng.random(800) < 0.71, z.argmax(axis=1), rng.integers(0, 10, 800))
    rows = solved(z, target)  # all entropies are equal
    rule = fit(rows)
    assert rule.penalty == math.inf
    assert rule.coefficients[:4] == (0, 0, 0, 0)
    assert rule.coefficients[4] == pytest.approx(fit_constant_beta(rows, BOUNDS))
    assert fit(rows, LOG_SIZE).penalty == math.inf  # one n


def test_fewer_than_20_groups_have_no_slope(rows):
    few = rows._replace(group=np.arange(len(rows.beta)) % 19)
    assert not can_have_slope(few)
    assert can_have_slope(rows._replace(group=np.arange(len(rows.beta)) % 20))
    assert fit_rule(rows, POLYNOMIAL, OPTIONS, has_slope=False).penalty == math.inf


@pytest.mark.slow
def test_several_right_items_are_one_event():
    """log of their summed probability, whose constant is SciPy's too."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(800, 12)).astype(np.float32)
    sets = np.zeros(z.shape, bool)
    sets[np.arange(800), gumbel_targets(z, 3.0)] = True
    sets[np.arange(800), rng.integers(0, 12, 800)] = True
    constant = fit_constant_beta(solved(z, sets), BOUNDS)

    def loss(x):
        log_p = log_softmax(np.exp(x) * z.astype(float), axis=1)
        return -np.log(np.where(sets, np.exp(log_p), 0).sum(axis=1)).mean()

    best = minimize_scalar(loss, bounds=(-3, 4), method="bounded", options={"xatol": 1e-10})
    assert constant == pytest.approx(np.exp(best.x), rel=1e-5)
    assert fit(solved(z, sets)).penalty in (*PENALTIES, math.inf)


def test_plain_powers_that_are_inexact_in_float32_raise_the_penalty():
    """A narrow domain far from 0 cancels to noise; what is saved is within 1 % in float32."""
    rows = planted_rows(
        lambda H, n: 1 + 40 * (H - 6.2), sizes=(600,), count=1_000, scale=(0.3, 0.4)
    )
    rule = fit(rows)
    H = np.linspace(*rule.domain, 200)
    exact = rule_beta(H, None, rule.coefficients, rule.domain, rule.form, np)
    terms, domain = np.float32(rule.coefficients), np.float32(rule.domain)
    rounded = rule_beta(H.astype(np.float32), None, terms, domain, rule.form, np)
    assert np.abs(rounded / exact - 1).max() <= 0.012
    likelihood, design = likelihood_of(rows, POLYNOMIAL)
    c = likelihood.constant * likelihood.solve((0.0,))[0.0].c
    assert not is_exact_in_float32(design, rule.form, design.plain_coefficients(POLYNOMIAL, c), c)
    without = fit_smoothed(rows, rule.form, 0.0)
    assert without.penalty > 0


@pytest.mark.parametrize("sizes", [(16,), (16, 64, 256)])
def test_folds_hold_whole_groups_and_are_alike(sizes):
    rows = planted_rows(rising, sizes=sizes, count=200)
    rows = rows._replace(group=np.tile(np.arange(100), len(rows.beta) // 100))
    fold = deal_folds(rows)
    assert all(len(set(fold[rows.group == g])) == 1 for g in range(100))
    assert set(np.bincount(fold)) == {len(fold) // N_FOLDS}
    means = [rows.entropy[fold == i].mean() for i in range(N_FOLDS)]
    assert np.ptp(means) < 0.2
    assert (deal_folds(rows, seed=1) != fold).any()


@pytest.mark.slow
@pytest.mark.parametrize("draw", ["near_ties", "clusters", "query_norms", "heavy_tails"])
def test_it_keeps_the_gain_where_entropy_matters_and_is_the_constant_elsewhere(draw):
    """Held out: not below the constant, and nine tenths of the gain without a penalty."""
    rng = np.random.default_rng(0)
    parts = [getattr(paper_procedure_data, draw)(rng, 300, n) for n in (8, 64, 256)]
    rows = concatenate_solved([solved(z, target) for z, target in parts])
    held_out = score_held_out(rows, ["constant", "polynomial"], OPTIONS)
    gain = held_out.gain("polynomial", over="constant")
    assert gain.mean > -2 * gain.error - 1e-4
    without = held_out.estimate(held_out_log_p(rows, 0.0) - held_out.log_p["constant"])
    if draw in ("query_norms", "heavy_tails"):
        assert without.significant
        assert gain.mean > 0.9 * without.mean
    else:
        assert not without.significant or without.mean < 0.005


def test_ranges_and_means_of_a_design_count_rows_by_their_weight():
    weighted, repeated = weighted_and_repeated(planted_rows(rising, count=200))
    one, other = map(make_design, (weighted, repeated))
    assert (one.entropy, one.log_n) == (other.entropy, other.log_n)
    np.testing.assert_allclose(one.means, other.means, rtol=1e-9, atol=1e-12)


def test_folds_are_those_of_rows_that_are_repeated_in_their_group():
    rows = planted_rows(rising, sizes=(16,), count=300)
    rows = rows._replace(group=np.arange(300) // 3)
    weighted, repeated = weighted_and_repeated(rows)
    often = weighted.weight.astype(int)
    np.testing.assert_array_equal(np.repeat(deal_folds(weighted), often), deal_folds(repeated))


def test_the_median_margin_counts_rows_by_their_weight():
    z = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    rows = solve_rows(z, z.argmax(axis=1), entropy(z), 8)
    far = rows.margin > 0.5
    often = np.where(far, 5, 1)
    one = fit_constant_beta(rows._replace(weight=often.astype(float)), BOUNDS)
    assert one == fit_constant_beta(rows.take(np.repeat(np.arange(300), often)), BOUNDS)


def test_the_error_that_chooses_lambda_is_that_of_groups():
    """Rows that are written often in their group tell nothing more."""
    form, chosen = OPTIONS.form(POLYNOMIAL), []
    for seed in range(2):
        rows = planted_rows(rising, sizes=(64,), count=100, seed=seed)
        rows = rows._replace(group=np.arange(100))
        often = rows.take(np.repeat(np.arange(100), 25))
        one, other = (choose_penalty(x, form) for x in (rows, often))
        assert one == other
        chosen.append(one)
    assert max(chosen) > 0


def held_out_log_p(rows, penalty):
    """(rows,) log p of each row under a polynomial with this lambda, fitted to the other folds."""
    fold, log_p = deal_folds(rows), np.empty(len(rows.beta))
    for i in range(N_FOLDS):
        train, test = rows.take(fold != i), rows.take(fold == i)
        likelihood, design = likelihood_of(train, POLYNOMIAL)
        c = likelihood.solve((penalty,))[penalty].c
        columns = design.columns(test.entropy, np.log(test.n))[:, KIND_COLUMNS[POLYNOMIAL]]
        log_p[fold == i] = test.log_p(likelihood.constant * columns @ c)
    return log_p


@pytest.mark.parametrize("seed", [1, 5, 6])
def test_lambda_is_the_largest_within_one_error_of_the_best(seed):
    """By held-out scores of a fit at each lambda, on the same folds: 1, 1 and 0.1."""
    rows = planted_rows(rising, sizes=(64,), count=200, seed=seed)
    chosen = choose_penalty(rows, OPTIONS.form(POLYNOMIAL))
    log_p = {penalty: held_out_log_p(rows, penalty) for penalty in PENALTIES}
    best = max(PENALTIES, key=lambda penalty: log_p[penalty].mean())
    within = [best]
    for penalty in set(PENALTIES) - {best}:
        loss = log_p[best] - log_p[penalty]
        if loss.mean() <= loss.std(ddof=1) / math.sqrt(len(loss)):
            within.append(penalty)
    assert chosen == max(within)
    assert min(within) < chosen
