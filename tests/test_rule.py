"""The rule in NumPy, JAX and PyTorch, on both sides of every threshold."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from backends import BACKENDS

import calibrate
from calibrate.core.rule import (
    ENTROPY_AND_SIZE,
    KINDS,
    TERMS,
    RuleForm,
    beta_of,
    formula,
    horner,
    slope_of,
)
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

POWERS, DOMAIN = (0.1, -0.7, 1.0, 1.5, -0.2), (0.3, 4.5)
SURFACE = (*POWERS, 0.11, -0.09, 0.35)
# Its slope in log n is 0.35 + 0.11 H - 0.18 log n: above 0 at the small end, and at the large end
# where H > 3.36.
SURFACE_DOMAIN = (0.3, 4.5, 1.5, 4.0)
RULES = {
    "clamp": RuleForm(),
    "identity": RuleForm(outside="identity"),
    "low ceiling": RuleForm(max_beta=2.0),
    "floor of 2": RuleForm(min_entropy=0.1, min_beta=2.0),
    "surface": RuleForm(kind=ENTROPY_AND_SIZE),
    "surface, low ceiling": RuleForm(max_beta=4.0, kind=ENTROPY_AND_SIZE),
    "surface, floor of 2": RuleForm(0.1, 2.0, kind=ENTROPY_AND_SIZE),
}


def around(value):
    value = np.float32(value)
    return [np.nextafter(value, np.float32(-9)), value, np.nextafter(value, np.float32(9))]


def grid(rule, domain):
    """(H, n): entropies and sizes around every threshold, and far beyond; n is float32."""
    H = np.concatenate([*map(around, [rule.min_entropy, *domain[:2]]), np.linspace(0, 9, 30)])
    sizes = np.exp(np.float32(domain[2:]))
    n = np.concatenate([*map(around, sizes), [1, 2, 20, 1e3, 1e6]])
    return tuple(x.ravel() for x in np.meshgrid(H.astype(np.float32), n.astype(np.float32)))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_follow_the_rule_around_every_threshold(rule, backend):
    powers, domain = (SURFACE, SURFACE_DOMAIN) if rule.by_size else (POWERS, DOMAIN)
    H, n = grid(rule, domain)
    # The thresholds are float32 in JAX: give the reference the same ones.
    exact = rule._replace(min_entropy=float(np.float32(rule.min_entropy)))
    rounded = tuple(float(np.float32(x)) for x in domain)
    expected = reference.inverse_temperature(H.astype(float), powers, rounded, exact, n)
    actual = backend().inverse_temperature(H, Fit(rule, (Entry(powers, domain),)), n=n)
    np.testing.assert_allclose(actual, expected, rtol=2e-6)
    log_n = np.log(n.astype(float))
    in_numpy = beta_of(H.astype(float), log_n, powers, rounded, exact, np)
    np.testing.assert_allclose(in_numpy, expected, rtol=1e-14)
    for size in np.unique(log_n):  # as one number for all rows, too
        of_size = beta_of(H.astype(float), float(size), powers, rounded, exact, np)
        np.testing.assert_array_equal(of_size[log_n == size], in_numpy[log_n == size])
    assert len(set(np.round(expected, 6))) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_items_counts_as_one_item(backend):
    fit = Fit(RuleForm.log_size(), (Entry((1.0, 2.0), (0.0, 9.0)),))
    n = np.array([0, 1, 3], np.int32)
    beta = backend().inverse_temperature(np.zeros(3, np.float32), fit, n=n)
    np.testing.assert_allclose(beta, [2, 2, 2 + np.log(3)], rtol=1e-6)


def test_a_threshold_of_0_is_none_for_some_heads_too():
    rule = RuleForm(np.array([0.0, 0.5, 0.5]))
    beta = beta_of(np.array([0.0, 0.0, 0.6]), None, (0, 0, 0, 0, 3.0), (0.0, 9.0), rule, np)
    np.testing.assert_array_equal(beta, [3, 1, 3])


def test_beta_at_a_limit_has_no_slope():
    rule, line, domain = RuleForm(max_beta=2.0), (0.0, 0.0, 0.0, 1.0, 0.0), (0.6, 5.0)
    H = np.array([0.4, 0.7, 1.5, 3.0])
    beta = beta_of(H, None, line, domain, rule, np)
    np.testing.assert_array_equal(beta, [1, 1, 1.5, 2])
    np.testing.assert_array_equal(slope_of(H, None, beta, line, domain, rule, np), [0, 0, 1, 0])


@pytest.mark.parametrize("kind", ["clamp", "identity", "surface"])
def test_an_undefined_entropy_has_no_beta(kind):
    entry = Entry(SURFACE, SURFACE_DOMAIN) if kind == "surface" else Entry(POWERS, DOMAIN)
    fit = Fit(RULES[kind], (entry,))
    H, n = np.array([np.nan, 1.0], np.float32), np.array([20, 20])
    in_numpy = beta_of(H, np.log(n), fit.only.coefficients, fit.only.domain, fit.rule, np)
    for beta in (calibrate.inverse_temperature(H, fit, n=n), in_numpy):
        np.testing.assert_array_equal(np.isnan(beta), [True, False])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ((0.4, 0.1), [1.2, 1.2, 0.4 * np.log(16) + 0.1, 0.4 * np.log(1024) + 0.1, 5.0]),
        ((-0.4, 4.0), [3.2, 3.2, 4 - 0.4 * np.log(16), 2.8, 2.8]),
        ((0.0, 3.0), [3.0] * 5),
    ],
    ids=["rising", "falling", "constant"],
)
def test_beyond_its_sizes_a_line_in_log_n_rises_and_does_not_fall(line, expected):
    """A falling line must not switch itself off at large n, where dispersion is worst."""
    n = np.array([1, 2, 16, 1024, 10**9])
    domain, rule = (2.0, 3.0), RuleForm.log_size(1.2, 5.0)
    for H in (None, np.full(5, np.nan)):
        beta = beta_of(H, np.log(n), line, domain, rule, np)
        np.testing.assert_allclose(beta, expected, rtol=1e-14)
        by_reference = reference.inverse_temperature(H, line, domain, rule, n)
        np.testing.assert_allclose(by_reference, expected, rtol=1e-14)


def test_the_papers_polynomial_exceeds_1_only_between_0849_and_5945_nats(paper):
    """Coefficients reversed or in two decimals would fail: these move beta(4) to 1.57."""
    H = jnp.array([0.848, 0.850, 5.944, 5.946, np.log(16384), 4.0])
    beta = np.asarray(calibrate.inverse_temperature(H, paper))
    np.testing.assert_array_equal(beta > 1, [False, True, True, False, False, True])
    assert horner(np.log(16384), paper.only.coefficients) == pytest.approx(-59, abs=1)
    assert beta[-1] == pytest.approx(2.39, abs=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("b", "beta"), [(1.75, 1.75), (0.1, 0.5), (9.0, 4.0)])
def test_a_constant_looks_at_neither_entropy_nor_size(backend, b, beta):
    fit, backend = Fit(RuleForm.constant(0.5, 4.0), (Entry((b,)),)), backend()
    H, n = np.array([[0.0, np.nan], [3.0, np.inf]], np.float32), np.array([0, 1, 10**6])
    for entropy, size, shape in (
        (H, None, (2, 2)),
        (None, n, (3,)),
        (H, 7, (2, 2)),
        (None, None, ()),
    ):
        actual = np.asarray(backend.inverse_temperature(entropy, fit, n=size))
        assert (actual.shape, actual.dtype) == (shape, np.float32)
        np.testing.assert_array_equal(actual, np.full(shape, beta, np.float32))
        np.testing.assert_array_equal(
            fit.only.beta_at(entropy, size, fit.rule), np.full(shape, beta)
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_constants_of_heads_lie_along_the_axis_of_heads(backend):
    entries = (Entry((1.5,), head=0), Entry((3.0,), head=2))
    H = np.full((2, 4, 5), np.nan, np.float32)
    beta = backend().inverse_temperature(H, Fit(RuleForm.constant(1.0, 2.0), entries))
    expected = np.array([1.5, 1.0, 2.0, 1.0])[:, None]
    np.testing.assert_array_equal(beta, np.broadcast_to(expected, H.shape))


@pytest.mark.parametrize(
    ("kind", "coefficients", "text"),
    [
        ("constant", (1.5,), "1.5"),
        ("constant", (0.0,), "0"),
        ("log-size", (-1e-05, 2.0), "-1e-05 log n + 2"),
        ("polynomial", (0.0, 0.5, 0.0, -1.25, -0.0), "0.5 H^3 - 1.25 H"),
        ("entropy-and-size", (0, 0, 0, 0, 1, 2, -3, 4), "1 + 2 H log n - 3 (log n)^2 + 4 log n"),
    ],
)
def test_a_formula_has_the_terms_of_the_kind(kind, coefficients, text):
    assert formula(kind, coefficients) == text
    assert {kind for kind in KINDS if len(TERMS[kind]) == len(coefficients)} == {kind}
