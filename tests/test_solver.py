"""The optimal beta and solved inputs, against roots in float64, a dense grid and classes."""

import numpy as np
import pytest
import reference
from conftest import ToyHead

import calibrate
from calibrate.parallel import Jobs
from calibrate.rows import root_finding
from calibrate.rows.collect import collect_from_head
from calibrate.rows.collection import open_collection
from calibrate.rows.optimal_beta import FLAT, INTERIOR, SHARP, UNSOLVED
from calibrate.rows.solve import solve_collection, solve_rows


def draw_row(rng):
    n = int(rng.choice([2, 3, 5, 17, 64, 300]))
    kind = rng.integers(4)
    z = [
        lambda: rng.standard_normal(n),
        lambda: rng.uniform(-1, 1, n),
        lambda: -(rng.exponential(size=n) ** 2),
        lambda: np.round(rng.standard_normal(n), 1),
    ][kind]()
    z = z / max(np.ptp(z), 1e-9) * 10 ** rng.uniform(-6, 4) + rng.choice([0, 10.0])
    above_mean = np.flatnonzero(z > z.mean())
    return z, int(rng.choice(above_mean)) if len(above_mean) else 0


def is_marginal(z, t):
    """True within 1e-6 of the range of being flat or sharp, where rounding decides."""
    spread = np.ptp(z)
    return spread == 0 or min(abs(z[t] - z.mean()), z.max() - z[t]) < 1e-6 * spread


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_classes_match_the_definitions(dtype):
    rng = np.random.default_rng(1)
    for _ in range(150):
        z, _ = draw_row(rng)
        z, t = z.astype(dtype), int(rng.integers(len(z)))
        if is_marginal(z.astype(float), t) and z[t] != z.max():
            continue
        # Masked items at the end make one shape of all, and so one compilation.
        beta, status = calibrate.optimal_beta(padded(z, 300), t)
        expected = reference.optimal_beta(z, t)
        assert status == {np.inf: SHARP, 0.0: FLAT}.get(expected, INTERIOR)
        assert float(beta) == pytest.approx(expected, rel=2e-3 if dtype == np.float32 else 1e-8)


@pytest.mark.parametrize("spread", [1e-6, 1e4])
@pytest.mark.parametrize("n", [2, 3, 65_536])
def test_any_length_and_range(n, spread):
    z = np.random.default_rng(n).uniform(0, spread, (3, n)).astype(np.float32)
    target = np.argsort(z, axis=1)[:, -2] if n > 2 else np.zeros(3, int)
    result = calibrate.optimal_beta(z, target)
    assert (result.status != UNSOLVED).all()
    for row in np.flatnonzero(result.status == INTERIOR):
        residual = reference.expected_excess(float(result.beta[row]), z[row], target[row])
        assert abs(residual) <= 1e-6 * np.ptp(z[row].astype(float))


def targets(z, sets):
    order = np.argsort(z, axis=-1)
    if not sets:
        return order[..., -3]
    return (z >= np.take_along_axis(z, order[..., -3:-2], -1)) & (z < z.max(-1, keepdims=True))


@pytest.mark.parametrize("sets", [False, True])
def test_masked_items_do_not_count(sets):
    z = np.random.default_rng(2).standard_normal((20, 30)).astype(np.float32)
    target = targets(z, sets)
    expected = calibrate.optimal_beta(z, target)
    padded = np.concatenate([z, np.full((20, 10), 50, np.float32)], axis=1)
    if sets:
        target = np.concatenate([target, np.ones((20, 10), bool)], axis=1)
    masked = calibrate.optimal_beta(padded, target, where=np.arange(40) < np.full((20, 1), 30))
    np.testing.assert_array_equal(masked.status, expected.status)
    np.testing.assert_allclose(masked.beta, expected.beta, rtol=1e-5)
    padded[:, 30:] = -np.inf
    np.testing.assert_allclose(calibrate.optimal_beta(padded, target).beta, masked.beta, rtol=0)


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.slow
def test_shapes_batches_and_traces(sets):
    z = np.random.default_rng(3).standard_normal((3, 500, 256)).astype(np.float32)
    target = targets(z, sets)
    kernel = root_finding.solve_sets if sets else root_finding.solve_one
    kernel.clear_cache()
    whole = calibrate.optimal_beta(z, target)
    assert kernel._cache_size() == 1
    assert whole.beta.shape == whole.status.shape == (3, 500)
    one = calibrate.optimal_beta(z[1, 5], target[1, 5])
    assert one.beta.shape == ()
    assert float(one.beta) == pytest.approx(float(whole.beta[1, 5]), rel=1e-4)
    none = calibrate.optimal_beta(np.zeros((0, 4)), targets(np.zeros((0, 4)), sets))
    assert none.beta.shape == none.status.shape == (0,)


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
    [(3, 25, np.float64), (30, 25, np.float32), (300, 15, np.float64), (2000, 6, np.float32)],
)
def test_no_beta_of_a_dense_grid_does_better(n, count, dtype):
    z, target = draw_rows(np.random.default_rng(n), n, count)
    z = z.astype(dtype)
    solved = calibrate.optimal_beta(z, target)
    assert set(np.unique(solved.status)) <= {SHARP, FLAT, INTERIOR}
    for beta, row, chosen in zip(solved.beta, z, target, strict=True):
        spread = np.ptp(row[row > -np.inf].astype(float)) or 1
        betas = [0, *np.geomspace(1e-4, 1e6, 2_000) / spread, np.inf]
        best = max(log_mass(other, row, chosen) for other in betas)
        assert log_mass(float(beta), row, chosen) >= best - 1e-9


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
        ([0, -0.1, -1.8, -4.5, -16.232], [1, 3], 0.139, 1.546),  # on the grid the lower one leads
    ],
)
@pytest.mark.slow
def test_the_higher_of_two_peaks(row, target, lower, higher):
    z, chosen = padded(np.array(row)), np.isin(np.arange(8), target)
    for peak in (lower, higher):  # both are peaks
        left, top, right = (log_mass(peak * c, z, chosen) for c in (0.8, 1, 1.25))
        assert top > max(left, right)
    for dtype in (np.float32, np.float64):
        beta, status = calibrate.optimal_beta(z.astype(dtype), chosen)
        assert status == INTERIOR
        assert float(beta) == pytest.approx(higher, rel=0.02)


@pytest.mark.parametrize(
    ("row", "target", "beta"),
    [
        ([3.0, 1.0, 0.0], [1, 0, 0], np.inf),
        ([3.0, 3.0, 3.0], [0, 1, 0], 0),
        ([3.0, 1.0, 0.0], [0, 0, 1], 0),
        ([2.0, 1.0, 0.0], [0, 1, 0], 0),
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
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_class_of_a_row(row, target, beta, dtype):
    z, target = padded(np.array(row, dtype)), padded(np.array(target, bool))
    solved = calibrate.optimal_beta(z, target)
    assert solved.status == {np.inf: SHARP, 0: FLAT}.get(beta, INTERIOR)
    assert float(solved.beta) == pytest.approx(beta, rel=1e-6)
    if target.sum() == 1:
        one = calibrate.optimal_beta(z, int(target.argmax()))
        assert (one.beta, one.status) == (solved.beta, solved.status)


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**40])
def test_beta_is_in_units_of_the_logits(factor):
    z, target = draw_rows(np.random.default_rng(5), 20, 200)
    z = (z / np.abs(np.where(z > -np.inf, z, 0)).max(axis=1, keepdims=True)).astype(np.float32)
    one, scaled = (calibrate.optimal_beta(np.float32(c) * z, target) for c in (1, factor))
    np.testing.assert_array_equal(scaled.status, one.status)
    np.testing.assert_allclose(scaled.beta * factor, one.beta, rtol=1e-6)


def test_every_input_is_solved_as_by_the_reference(tmp_path):
    folder = tmp_path / "toy"
    collect_from_head(ToyHead(noise=1.0), [16, 256], 400, 0, folder, keep="misranked")
    collection = open_collection(folder)
    solved = solve_collection(collection)
    first_of_size = np.flatnonzero(np.diff(solved.size, prepend=0))
    for first, (_, shard) in zip(first_of_size, collection.shards(), strict=True):
        for i in range(5):
            logits, target = shard.logits[i], shard.target[i]
            row = solved.take(np.array([first + i]))
            assert row.beta[0] == pytest.approx(reference.optimal_beta(logits, target), rel=1e-3)
            log_p = np.log(reference.softmax(logits, beta=2.0)[target])
            assert row.log_p(2.0)[0] == pytest.approx(log_p, abs=1e-3)
    assert sum(solved.count_by_status().values()) == len(solved.beta)
    assert (solved.status[solved.fitted_by_least_squares()] == "interior").all()
    assert solved.misranked.all()


@pytest.mark.slow
def test_solving_does_not_depend_on_the_jobs(tmp_path, monkeypatch):
    collection = collect_from_head(ToyHead(noise=1.0), [16, 64, 256], 400, 0, tmp_path / "toy")
    one, two = (solve_collection(collection, jobs) for jobs in (Jobs(1), Jobs(2)))
    for a, b in zip(one[:-2], two[:-2], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.profile.series, two.profile.series)


def test_columns_of_solved_inputs_are_of_unmasked_items():
    z = np.array([[3, 1, -np.inf, 0], [3, 1, 2, 0]], np.float32)
    solved = solve_rows(z, np.array([0, 2], np.int32), reference.entropy(z), 4)
    np.testing.assert_array_equal(solved.n, [3, 4])
    np.testing.assert_array_equal(solved.size, [4, 4])
    np.testing.assert_array_equal(solved.misranked, [False, True])
    np.testing.assert_allclose(solved.uniform, -np.log([3, 4]))
    np.testing.assert_array_equal(solved.margin, [2, -1])
    several = np.array([[1, 1, 1, 0], [1, 0, 1, 0]], bool)
    solved = solve_rows(z, several, reference.entropy(z), 4)
    np.testing.assert_allclose(solved.uniform, np.log([2 / 3, 2 / 4]))
    np.testing.assert_array_equal(solved.margin, [3, 2])
