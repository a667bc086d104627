"""The optimal beta against a 50-digit root, a bisection in float64, and its own classes."""

import mpmath
import numpy as np
import pytest

import calibrate
from calibrate.maths import reference, solver
from calibrate.maths.row_blocks import FEW_ITEMS
from calibrate.rows.heads import load_head


def draw_row(rng):
    """One row of any shape: n, range, distribution and rank of the target vary."""
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
    """Within 1e-6 of the range of being flat or sharp, where no digits are promised."""
    spread = np.ptp(z)
    return spread == 0 or min(abs(z[t] - z.mean()), z.max() - z[t]) < 1e-6 * spread


def mpmath_root(z, t):
    """The root of E_beta[z] = z_t to 50 digits."""
    with mpmath.workdps(50):
        u = [mpmath.mpf(float(x)) - mpmath.mpf(float(z[t])) for x in z]
        top = max(u)

        def excess(beta):
            weights = [mpmath.exp(beta * (x - top)) for x in u]
            return mpmath.fdot(weights, u) / mpmath.fsum(weights)

        start = mpmath.mpf(reference.optimal_beta(z, t))
        return mpmath.findroot(excess, (start * (1 - 1e-9), start * (1 + 1e-9)), tol=1e-40)


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.slow)])
def test_float64_agrees_with_a_50_digit_root(count):
    rng = np.random.default_rng(0)
    checked = 0
    while checked < count:
        z, t = draw_row(rng)
        beta, status = calibrate.optimal_beta(z, t)
        if is_marginal(z, t) or status != solver.INTERIOR:
            continue
        root = mpmath_root(z, t)
        assert float(abs(beta - root) / root) < 1e-8, (z, t)
        checked += 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_classes_match_the_definitions(dtype):
    rng = np.random.default_rng(1)
    for _ in range(300):
        z, _ = draw_row(rng)
        z, t = z.astype(dtype), int(rng.integers(len(z)))
        if is_marginal(z.astype(float), t) and z[t] != z.max():
            continue
        # Masked items at the end make one shape of all, and so one compilation.
        longest = np.concatenate([z, np.full(300 - len(z), -np.inf, dtype)])
        beta, status = calibrate.optimal_beta(longest, t)
        expected = reference.optimal_beta(z, t)
        assert status == {np.inf: solver.SHARP, 0.0: solver.FLAT}.get(expected, solver.INTERIOR)
        assert float(beta) == pytest.approx(expected, rel=2e-3 if dtype == np.float32 else 1e-8)


@pytest.mark.parametrize(
    ("row", "target", "beta", "status"),
    [
        ([3.0, 1.0, 0.0], 0, np.inf, solver.SHARP),
        ([3.0, 3.0, 0.0], 0, np.inf, solver.SHARP),
        ([3.0, 3.0, 3.0], 1, 0.0, solver.FLAT),
        ([5.0], 0, 0.0, solver.FLAT),
        ([3.0, 1.0, 0.0], 2, 0.0, solver.FLAT),
        ([2.0, 1.0, 0.0], 1, 0.0, solver.FLAT),
        ([1.0, 0.9, -4.0], 1, None, solver.INTERIOR),
    ],
)
def test_class_of_a_row(row, target, beta, status):
    result = calibrate.optimal_beta(np.array(row), target)
    assert result.status == status
    if beta is not None:
        assert result.beta == beta


@pytest.mark.slow
def test_float32_residual_on_the_shipped_head():
    """At most 7 passes, and 1e-6 of the range left, from the least size to the greatest."""
    head = load_head("max-retrieval")
    for size in (16, 1_024, 16_384):
        count = max(8, 2**15 // size)
        batch = head.sample(7, size, count)
        logits = np.asarray(head.attend(batch).logits)
        # The second-highest item as target: an interior row of every set.
        target = np.argsort(logits, axis=1)[:, -2].astype(np.int32)
        beta, n_passes = solver._solve_in_blocks(logits, target, FEW_ITEMS)
        assert n_passes.max() <= 7
        interior = np.isfinite(beta) & (beta > 0)
        assert interior.mean() > 0.95
        for row in np.flatnonzero(interior)[:60]:
            residual = reference.expected_excess(float(beta[row]), logits[row], target[row])
            assert abs(residual) <= 1e-6 * np.ptp(logits[row].astype(float))


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("n", [2, 3, 1_000, 65_536])
def test_any_length_and_range(n, spread):
    z = np.random.default_rng(n).uniform(0, spread, (3, n)).astype(np.float32)
    target = np.argsort(z, axis=1)[:, -2] if n > 2 else np.zeros(3, int)
    result = calibrate.optimal_beta(z, target)
    assert (result.status != solver.UNSOLVED).all()
    for row in np.flatnonzero(result.status == solver.INTERIOR):
        residual = reference.expected_excess(float(result.beta[row]), z[row], target[row])
        assert abs(residual) <= 1e-6 * np.ptp(z[row].astype(float))


def test_masked_items_do_not_count():
    rng = np.random.default_rng(2)
    z = rng.standard_normal((20, 30)).astype(np.float32)
    target = np.argsort(z, axis=1)[:, -3]
    expected = calibrate.optimal_beta(z, target)
    padded = np.concatenate([z, np.full((20, 10), 50, np.float32)], axis=1)
    masked = calibrate.optimal_beta(padded, target, where=np.arange(40) < np.full((20, 1), 30))
    np.testing.assert_allclose(masked.beta, expected.beta, rtol=1e-5)
    padded[:, 30:] = -np.inf
    np.testing.assert_allclose(calibrate.optimal_beta(padded, target).beta, masked.beta, rtol=0)


def test_shapes_and_blocks():
    z = np.random.default_rng(3).standard_normal((3, 700, 256)).astype(np.float32)
    target = np.argsort(z, axis=-1)[..., -2]
    whole = calibrate.optimal_beta(z, target)
    assert whole.beta.shape == whole.status.shape == (3, 700)
    one = calibrate.optimal_beta(z[1, 5], target[1, 5])
    assert one.beta.shape == ()
    assert float(one.beta) == pytest.approx(float(whole.beta[1, 5]), rel=1e-5)
    none = calibrate.optimal_beta(np.zeros((0, 4)), np.zeros(0, int))
    assert none.beta.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "target", "where", "message"),
    [
        (np.zeros((2, 3)), np.array([0]), None, "one target for each row"),
        (np.zeros((2, 3)), np.array([0, 3]), None, r"target 3 is not a position in \[0, 3\)"),
        (np.zeros((2, 3)), np.array([0, -1]), None, "target -1 is not a position"),
        (np.zeros((2, 3)), np.array([0.0, 1.0]), None, "integer positions"),
        (np.array([[1.0, np.nan]]), np.array([0]), None, r"row \(0,\) hold NaN or \+inf"),
        (np.array([[1.0, np.inf]]), np.array([0]), None, "NaN or"),
        (np.array([[1.0, -np.inf]]), np.array([1]), None, "target of row .* is masked"),
        (np.ones((1, 2)), np.array([1]), np.array([[True, False]]), "is masked"),
        (np.ones((1, 2)), np.array([1]), np.array([True, False]), "where has shape"),
    ],
)
def test_bad_input_is_named(logits, target, where, message):
    with pytest.raises(ValueError, match=message):
        calibrate.optimal_beta(logits, target, where)
