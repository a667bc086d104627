"""Candidates: planted rules come back, and pooling loses nothing."""

import numpy as np
import pytest
from fakes import QuadraticScorer, even_examples
from planted import planted_rows, regression_of

from calibrate.core.rule import ENTROPY_POLYNOMIAL, VARIABLES, bare_value
from calibrate.core.rule_kinds import ENTROPY, KINDS, RuleKind, kind_in_file
from calibrate.errors import QualityError
from calibrate.fitting.bootstrap import bootstrap
from calibrate.fitting.constrained_newton import Objective
from calibrate.fitting.cross_validate import cross_validate
from calibrate.fitting.fit_polynomial import LogLeastSquares
from calibrate.fitting.fit_rule import applied_beta, fit_kind, fit_rule
from calibrate.fitting.groups import N_BLOCKS, assign_blocks
from calibrate.fitting.multistart import maximise
from calibrate.fitting.options import LogLikelihood, Options
from calibrate.fitting.select import select_rule
from calibrate.model.calibration_and_validation import (
    Validation,
    calibration_of,
    validation_indices,
)
from calibrate.model.head_rule_optimizer import HeadRuleOptimizer
from calibrate.model.objective import ModelObjective
from calibrate.model.options import ModelOptions, families_of
from calibrate.solver.solved_rows import concatenate_rows, solve_rows
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry


def rising(H, n):
    return 1.2 + 0.5 * H


@pytest.fixture(scope="module")
def rows():
    return planted_rows(rising)


def test_a_planted_constant_comes_back_as_every_kind():
    rows = planted_rows(lambda H, n: np.full_like(H, 2.5))
    for kind in KINDS:
        beta = applied_beta(fit_kind(rows, kind), rows)
        acts = beta != 1
        assert acts.mean() > 0.9
        assert np.median(beta[acts]) == pytest.approx(2.5, abs=0.15)


@pytest.mark.parametrize("q", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("trained_up_to", [0, 64])
def test_folds_at_once_have_the_rules_that_each_has_alone(rows, q, trained_up_to):
    folds = (np.arange(N_BLOCKS) % 5 != np.arange(3)[:, None]) * np.array([[1.0], [0.5], [2.0]])
    options = Options(rows="all", q=q, trained_up_to=trained_up_to)
    for kind in KINDS:
        problem = regression_of(rows, kind, options)
        start, design = problem.solve(), problem.form.design
        alone = np.array([problem.solve(weights, start) for weights in folds])
        at_once = problem.solve_each(folds, start)
        np.testing.assert_allclose(at_once @ design.T, alone @ design.T, atol=1e-6)
        assert len(np.unique(alone[:, -1])) == 3


LINE_IN_ENTROPY = RuleKind(
    name="line-in-entropy",
    label="a line in entropy",
    file_kind=ENTROPY_POLYNOMIAL,
    needs=frozenset({ENTROPY}),
    min_sizes=1,
    ones=(0.0, 1.0),
    design=lambda H, log_n, domain: np.column_stack([np.clip(H, *domain), np.ones(len(H))]),
    bounded=lambda design: design[[design[:, 0].argmin(), design[:, 0].argmax()]],
    file_coefficients=lambda c, domain: (0.0, 0.0, 0.0, *map(float, c)),
    own_terms=("H", "1"),
)


@pytest.fixture
def one_more_kind():
    """KINDS with LINE_IN_ENTROPY in its place: it is simpler than a polynomial."""
    known = dict(KINDS)
    KINDS.clear()
    for name, kind in known.items():
        if name == "polynomial":
            KINDS[LINE_IN_ENTROPY.name] = LINE_IN_ENTROPY
        KINDS[name] = kind
    yield
    KINDS.clear()
    KINDS.update(known)


def test_a_new_kind_is_one_record(rows):
    validation = cross_validate(rows, [KINDS["constant"], LINE_IN_ENTROPY], Options())
    chosen = select_rule(validation, ("constant", "line-in-entropy")).published
    assert chosen.kind == "line-in-entropy"
    assert chosen.coefficients.only.coefficients[-2:] == pytest.approx((0.5, 1.2), abs=0.2)
    errors, band = bootstrap(chosen.fitted, n_resamples=10)
    assert errors[:3] == [0, 0, 0]
    assert band is not None


@pytest.mark.parametrize("name", [*KINDS, LINE_IN_ENTROPY.name])
@pytest.mark.parametrize("lengths", [(10, 20, 40), (20,)])
def test_a_kind_of_a_model_has_the_terms_of_its_record(name, lengths, one_more_kind):
    families = families_of(ModelOptions(name), even_examples(lengths))
    assert families[-1].kind == name
    basis, rng = families[-1].basis, np.random.default_rng(1)
    assert basis.full.contains(basis)
    numbers = rng.standard_normal((len(basis.terms), 1))
    coefficients = [float(c[0]) for c in basis.coefficients(list(numbers))]
    fit = Coefficients(basis.rule, (Entry(coefficients, basis.domain),))
    assert kind_in_file(fit.rule, coefficients) == name or not KINDS[name].needs
    H, L = rng.uniform(0.1, 3, (2, 20))
    h, length = 2 * H / basis.center - 1, L - basis.center
    expected = 1 + sum(x * h**i * length**j for x, (i, j) in zip(numbers, basis.terms, strict=True))
    point = [{"H": H, "L": L}[variable] for variable in VARIABLES[fit.rule.kind]]
    np.testing.assert_allclose(bare_value(point, coefficients, fit.rule.kind), expected, rtol=1e-9)


@pytest.mark.parametrize("text", [(), (30,)])
def test_a_new_kind_is_solved(text, one_more_kind):
    """By proximal Adam, and with text by natural gradient."""
    examples = even_examples([10, 20, 40], text)
    scorer = QuadraticScorer(examples, np.full(8, 0.4), fisher=0.3)
    objective = ModelObjective(examples, scorer.baseline())
    families = families_of(ModelOptions(LINE_IN_ENTROPY.name), examples)
    validation = Validation(scorer, objective, validation_indices(objective))
    calibration = calibration_of(scorer, examples, max_steps=2, seed=0)
    optimizer = HeadRuleOptimizer(calibration, validation, families)
    last = optimizer.solve()[-1]
    assert last.family.kind == LINE_IN_ENTROPY.name
    assert text or last.value.gain > 0
    assert optimizer.natural_gradient.suits(last.family) == bool(text)


def test_sizes_have_equal_weight_however_many_rows_they_have():
    rows = planted_rows(lambda H, n: np.full_like(H, np.log2(n) / 2), (16, 256), count=200)
    more = concatenate_rows([rows, rows.take(rows.size == 16)])
    options = Options(q=0.0, prior_rows=0.0)
    one, other = (fit_kind(x, "constant", options).only.coefficients[-1] for x in (rows, more))
    assert other == pytest.approx(one, rel=1e-3)


def test_a_line_that_falls_is_still_on_at_sizes_beyond_those_fitted():
    fit = fit_kind(planted_rows(lambda H, n: np.full_like(H, 10 - 1.5 * np.log(n))), "log-size")
    assert fit.only.coefficients[0] < -1
    n = np.array([256, 512, 32_768])
    beta = fit.only.beta_at(None, np.log(n), fit.rule)
    assert (beta > 1.5).all()
    assert (beta == beta[0]).all()


def test_a_planted_polynomial_comes_back(rows):
    fit = fit_kind(rows, "polynomial")
    H = np.linspace(1.5, 5, 20)
    np.testing.assert_allclose(np.polyval(fit.only.coefficients, H), rising(H, 0), rtol=0.15)


@pytest.mark.parametrize("which", ["all", "misranked"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_other_rule_of_the_kind_is_more_likely(rows, which, kind):
    problem = regression_of(rows, kind, Options(which))
    c = problem.solve()
    objective_of = problem.pool.objective(np.ones(N_BLOCKS))

    def value(c):
        return objective_of.values(np.clip(problem.form.design @ c, 1, 64))

    rng = np.random.default_rng(0)
    tried = 0
    for scale in (1e-2, 0.1):
        for _ in range(60):
            other = c + scale * rng.standard_normal(len(c))
            bound = problem.form.matrix @ other
            if ((bound >= problem.form.low) & (bound <= problem.form.high)).all():
                tried += 1
                assert value(other) <= value(c) + 2e-5
    assert tried or np.isclose(np.abs(c - 1).min(), 0, atol=1e-6)  # at a bound, few are allowed


def test_pooling_by_cells_is_as_good_as_every_row(rows):
    problem = regression_of(rows, "polynomial", Options(prior_rows=0))
    used = rows.take(Options().usable(rows))
    weight = used.shares()
    H, log_n = used.entropy, np.log(used.items)
    form = KINDS["polynomial"].form(H, log_n, problem.domain, 1.0, 64.0)
    (exact,) = maximise([Objective(used.profile, weight)], form, 1.0, 64.0)
    beta = np.clip(form.design @ problem.solve(), 1, 64)
    assert weight @ used.profile.log_p(beta) == pytest.approx(exact.value, abs=2e-5)


def test_weights_of_blocks_are_those_of_rows(rows):
    block = assign_blocks(rows)
    half = (np.arange(N_BLOCKS) < N_BLOCKS // 2).astype(float)
    some = rows.take(block < N_BLOCKS // 2)
    for options in (Options(), Options("misranked")):
        problem = regression_of(rows, "constant", options)
        of_half = problem.checked_coefficients(problem.solve(half, start=problem.solve()))
        alone = fit_kind(some, "constant", options)
        assert of_half.only.coefficients[-1] == pytest.approx(alone.only.coefficients[-1], rel=0.01)


def test_gated_rows_do_not_enter_a_rule_that_leaves_them_alone():
    rows = planted_rows(rising, count=200, scale=(0.3, 8.0))
    gated = rows.entropy <= 0.5
    assert gated.sum() > 10
    options = Options(min_entropy=0.5)
    assert not options.usable(rows)[gated].any()
    with pytest.raises(QualityError, match="log n"):
        fit_kind(rows, "log-size", options)
    assert Options().usable(rows)[gated].all()
    assert fit_kind(rows, "polynomial", options).rule.min_entropy == 0.5
    assert not Options(rows="misranked").usable(rows)[~rows.misranked].any()


def test_rows_that_determine_no_rule_are_refused(rows):
    with pytest.raises(QualityError, match="^99 .* 100"):
        fit_kind(rows.take(np.arange(99)), "constant")
    with pytest.raises(QualityError, match=r"have 1 .* 1\.124 .* 4\.117 "):
        fit_kind(rows.take(rows.size == 64), "log-size")
    two = np.where(np.arange(len(rows.size)) % 2, 2.0, 3.0)
    with pytest.raises(QualityError, match="polynomial"):
        fit_kind(rows._replace(entropy=two), "polynomial")


def test_a_domain_too_narrow_for_plain_powers_is_refused(rows):
    narrow = rows._replace(entropy=5 + 1e-5 * rows.entropy)
    with pytest.raises(QualityError, match=r"entropies 5 .*\b5 nats"):
        fit_kind(narrow, "polynomial")


def test_sets_of_targets_are_fitted_by_their_highest_peak(rows):
    """Items nearly alike, of which the highest is a target: what is best is to find it."""
    z = np.tile(np.float32([0, 0.02, -0.11, -0.05, 0.04, -0.08, -0.01]), (200, 1))
    wins = np.tile(np.isin(np.arange(7), [2, 3, 4]), (200, 1))
    sets = solve_rows(z, wins, np.linspace(1.93, 1.94, 200), 7)
    assert fit_kind(sets, "constant", Options(prior_rows=0)).only.coefficients[-1] > 60
    assert not concatenate_rows([rows, sets]).profile.concave
    assert rows.profile.concave


@pytest.mark.parametrize("loss", [LogLikelihood(), LogLeastSquares()])
def test_rows_without_blocks_are_not_fitted(loss):
    rows = planted_rows(rising, count=200)
    undealt = rows._replace(block=np.full(len(rows.size), -1))
    with pytest.raises(ValueError, match="deal_into_blocks"):
        fit_rule(undealt, KINDS["polynomial"], loss, Options())
