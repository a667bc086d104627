"""The optimal beta of a set of targets: against a dense grid in float64, and against one target."""

import numpy as np
import pytest
from test_solver import draw_row, is_marginal

import calibrate
from calibrate.maths import reference, solver, target_sets


def draw_rows(rng, n, count):
    """Rows of any range with ties and masks, whose targets lie at random or in bands."""
    gaps = 10 ** rng.uniform(-3, 1.5, (count, n))
    kinds = [rng.standard_normal((count, n)), np.round(rng.standard_normal((count, n)), 1), -gaps]
    z = np.choose(rng.integers(3, size=(count, 1)), kinds)
    bands = np.sin(rng.uniform(1, 6, (count, 1)) * np.log(gaps) + rng.uniform(0, 6, (count, 1))) > 0
    at_random = rng.random((count, n)) < rng.choice([0.01, 0.1, 0.5, 0.9, 1.0], (count, 1))
    target = np.where(rng.random((count, 1)) < 0.5, bands, at_random)
    z = np.where(rng.random((count, n)) < rng.choice([0, 0.3], (count, 1)), -np.inf, z)
    z[:, 0], target[:, 0] = rng.standard_normal(count), True
    return z * 10 ** rng.uniform(-6, 4, (count, 1)), target


def log_mass(beta, z, target):
    """log p_T of one row in float64, at a beta that may be 0 or inf."""
    z = z.astype(float) - z.max()
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(z == 0, 1.0, np.where(z == -np.inf, 0.0, np.exp(beta * z)))
        return np.log(weights[target].sum()) - np.log(weights.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "count", "dtype"),
    [
        (2, 25, np.float32), (3, 25, np.float64), (30, 25, np.float32), (30, 25, np.float64),
        (300, 15, np.float64), (2000, 6, np.float32),
    ],
)  # fmt: skip
def test_no_beta_of_a_dense_grid_does_better(n, count, dtype):
    z, target = draw_rows(np.random.default_rng(n), n, count)
    z = z.astype(dtype)
    solved = calibrate.optimal_beta(z, target)
    assert set(np.unique(solved.status)) <= {solver.SHARP, solver.FLAT, solver.INTERIOR}
    for row in range(count):
        expected = reference.optimal_beta(z[row], target[row])
        best = log_mass(expected, z[row], target[row])
        assert log_mass(float(solved.beta[row]), z[row], target[row]) == pytest.approx(
            best, abs=1e-9
        )
        ends = max(log_mass(end, z[row], target[row]) for end in (0.0, np.inf))
        if not expected or expected == np.inf or best > ends + 1e-6:  # else the class is a tie
            assert solved.status[row] == {np.inf: solver.SHARP, 0.0: solver.FLAT}.get(expected, 0)


def padded(array, n=8):
    """The array with masked items at its end: one shape for all, and so one compilation."""
    fill = False if array.dtype == bool else -np.inf
    return np.concatenate([array, np.full(n - len(array), fill)]).astype(array.dtype)


@pytest.mark.parametrize(
    ("row", "target", "lower", "higher"),
    [
        ([0, -0.2, -1.7, -6.7, -12.6], [1, 3], 1.16, 0.090),
        ([0, -0.1, -1.8, -4.5, -13.7], [1, 3], 0.16, 1.53),
        ([0, -0.1, -0.2, -0.6, -0.8, -3, -15, -23.7], [1, 2, 5, 6], 2.92, 0.0365),
    ],
)
def test_the_higher_of_two_peaks(row, target, lower, higher):
    z, chosen = padded(np.array(row)), np.isin(np.arange(8), target)
    for peak in (lower, higher):  # both are peaks
        left, top, right = reference.log_odds(peak * np.array([0.8, 1, 1.25]), z, chosen)
        assert top > max(left, right)
    for dtype in (np.float32, np.float64):
        beta, status = calibrate.optimal_beta(z.astype(dtype), chosen)
        assert status == solver.INTERIOR
        assert float(beta) == pytest.approx(higher, rel=0.02)
        assert float(beta) == pytest.approx(reference.optimal_beta(z, chosen), rel=1e-5)


@pytest.mark.parametrize(
    ("row", "target", "beta"),
    [
        ([3.0, 1.0, 0.0], [1, 0, 1], np.inf),  # a target is highest
        ([3.0, 3.0, 0.0], [1, 0, 0], np.inf),  # 1/3 to 1/2
        ([3.0, 3.0, 2.0, 2.0], [1, 0, 1, 1], 0),  # 3/4 to 1/2
        ([3.0, 3.0, 2.0, 1.0], [1, 0, 1, 0], np.log(1 + np.sqrt(2))),  # both ends are 1/2
        ([3.0, 3.0, 2.0, 1.0], [1, 0, 0, 1], 0),  # both ends are 1/2, and less between
        ([3.0, 2.0, 3.0, 2.0], [1, 1, 0, 0], 0),  # 1/2 throughout
        ([1.8, 0.1, 0.7, 0.1, 0.7, 1.8], [1, 1, 1, 0, 0, 0], 0),  # but for rounding
        ([3.0, 2.0, 1.0], [0, 1, 1], 0),  # one other item, and it is highest
        ([2.0, 2.0, 2.0], [1, 1, 0], 0),
        ([3.0, 1.0, 0.0], [1, 1, 1], 0),
        ([5.0], [1], 0),
        ([3.0, 1.0, -np.inf], [1, 1, 0], 0),
        ([3.0, 2.0, -np.inf, -np.inf], [0, 1, 1, 0], 0),  # a masked target does not count
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_class_of_a_row(row, target, beta, dtype):
    z, target = padded(np.array(row, dtype)), padded(np.array(target, bool))
    solved = calibrate.optimal_beta(z, target)
    assert solved.status == {np.inf: solver.SHARP, 0: solver.FLAT}.get(beta, solver.INTERIOR)
    assert float(solved.beta) == pytest.approx(beta, rel=1e-6)
    assert reference.optimal_beta(z, target) == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "rel"), [pytest.param(np.float32, 2e-3, marks=pytest.mark.slow), (np.float64, 1e-9)]
)
def test_a_set_of_one_is_a_target(dtype, rel):
    rng = np.random.default_rng(4)
    for _ in range(150):
        z, t = draw_row(rng)
        z = z.astype(dtype)
        if is_marginal(z.astype(float), t) and z[t] != z.max():
            continue
        z = padded(z, 300)
        one = calibrate.optimal_beta(z, t)
        as_set = calibrate.optimal_beta(z, np.arange(300) == t)
        assert as_set.status == one.status
        assert float(as_set.beta) == pytest.approx(float(one.beta), rel=rel)


@pytest.mark.parametrize("factor", [2.0**-60, 1e-5, 3.0, 2.0**40])
def test_beta_is_in_units_of_the_logits(factor):
    z, target = draw_rows(np.random.default_rng(5), 20, 200)
    z = (z / np.abs(np.where(z > -np.inf, z, 0)).max(axis=1, keepdims=True)).astype(np.float32)
    one, scaled = (
        calibrate.optimal_beta(c * z, target) for c in (np.float32(1), np.float32(factor))
    )
    exact = np.log2(factor) % 1 == 0
    alike = one.status == scaled.status
    assert alike.all() if exact else alike.mean() > 0.95  # other factors round ties away
    np.testing.assert_allclose(
        scaled.beta[alike] * factor, one.beta[alike], rtol=1e-6 if exact else 1e-2
    )


def test_masked_items_do_not_count():
    z, target = draw_rows(np.random.default_rng(6), 25, 50)
    z = z.astype(np.float32)
    expected = calibrate.optimal_beta(z, target)
    longer = np.concatenate([z, np.full((50, 7), 50, np.float32)], axis=1)
    marked = np.concatenate([target, np.ones((50, 7), bool)], axis=1)
    solved = calibrate.optimal_beta(longer, marked, where=np.arange(32) < np.full((50, 1), 25))
    np.testing.assert_array_equal(solved.status, expected.status)
    np.testing.assert_allclose(solved.beta, expected.beta, rtol=1e-4)


def test_shapes_blocks_and_traces():
    z, target = draw_rows(np.random.default_rng(7), 256, 1500)
    z, target = z.astype(np.float32).reshape(3, 500, 256), target.reshape(3, 500, 256)
    target_sets.solve.clear_cache()
    whole = calibrate.optimal_beta(z, target)
    assert target_sets.solve._cache_size() == 1
    assert whole.beta.shape == whole.status.shape == (3, 500)
    one = calibrate.optimal_beta(z[2, 7], target[2, 7])
    assert one.beta.shape == ()
    assert one.status == whole.status[2, 7]
    none = calibrate.optimal_beta(np.zeros((0, 4)), np.zeros((0, 4), bool))
    assert none.beta.shape == none.status.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "target", "where", "message"),
    [
        (np.zeros((2, 3)), np.ones(2, bool), None, "mark targets in the shape of the logits"),
        (np.zeros((2, 3)), np.ones((2, 3), int), None, "one target for each row"),
        (np.zeros(()), np.ones((), bool), None, "target has shape"),
        (np.zeros((2, 3)), np.eye(2, 3, 1) > 2, None, r"row \(0,\) marks no unmasked item; mark"),
        (np.array([0, -np.inf]), np.array([False, True]), None, "marks no unmasked item"),
        (np.zeros((1, 2)), np.array([[False, True]]), np.array([[True, False]]), "no unmasked"),
        (np.array([np.nan, 1]), np.array([False, True]), None, "NaN or"),
    ],
)
def test_bad_input_is_named(logits, target, where, message):
    with pytest.raises(ValueError, match=message):
        calibrate.optimal_beta(logits, target, where)
