"""The drop-in softmax of JAX and PyTorch, against the float64 reference and the originals.

Tests with a `backend` run for both; what only PyTorch has is in test_torch_*.py.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from attention_cases import BY_BOTH
from backends import BACKENDS, Jax, dtype_of, kinds_and_backends, values
from cases import CASES, FITS, HEAD_RULES, SMOOTH_FITS, per_head
from jax.test_util import check_grads

import calibrate
from calibrate.core.rule import bare_value

SLOW = pytest.mark.slow
BY_KIND = {"paper": calibrate.load("paper"), "log size": FITS["log size"], "both": BY_BOTH}
KINDS = {name: FITS[name] for name in ("clamp", "log size", "entropy and size")}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param()


def rows(n, scale, seed=0, count=16):
    rng = np.random.default_rng([seed, n])
    return (rng.standard_normal((count, n)) * scale).astype(np.float32)


def cases_of_few_shapes(backend):
    """JAX compiles each shape: only 3 and 300 items for it."""
    return [c for c in CASES if not isinstance(backend, Jax) or len(c.logits[0]) in (3, 300)]


def expected(logits, fit, where=None):
    entry = fit.only
    return reference.adaptive_softmax(
        logits, entry.coefficients, entry.domain, fit.rule, where=where
    )


def of_both(kinds, *quick):
    return pytest.mark.parametrize(
        ("kind", "backend"), kinds_and_backends(kinds, quick, BACKENDS), indirect=["backend"]
    )


@of_both(FITS, "identity outside", "falling, low ceiling", "entropy and size")
def test_agrees_with_the_reference(kind, backend):
    """Trap 3 too: masked items, whatever they hold and whatever masks them, have no part."""
    fit = FITS[kind]
    for case in CASES:
        if isinstance(backend, Jax) and fit not in KINDS.values() and (
            case.where is not None or len(case.logits[0]) != 300
        ):  # fmt: skip
            continue  # other fits differ in what they do about their thresholds
        actual = backend.softmax(case.logits, fit, where=case.where)
        assert dtype_of(actual) == "float32"
        exact, actual = case.expected(fit), values(actual)
        np.testing.assert_allclose(actual, exact, atol=1e-6, rtol=1e-5, err_msg=case.name)
        real = np.broadcast_to(True if case.where is None else case.where, actual.shape)
        assert (actual[~real | (case.logits < -1e3) & (exact == 0)] == 0).all(), case.name


@of_both(KINDS, "entropy and size")
def test_half_precision_is_within_2_ulp_of_the_reference(kind, backend):
    dtype = "float16" if kind == "log size" else "bfloat16"
    limits, n_cases, fit = jnp.finfo(dtype), 0, KINDS[kind]
    smallest = max(float(limits.smallest_subnormal), float(jnp.finfo("float32").tiny))
    cases = cases_of_few_shapes(backend)
    for case in cases:
        with np.errstate(over="ignore"):
            logits = backend.array(case.logits, dtype)
        rounded = values(logits)
        if not np.isfinite(rounded[np.isfinite(case.logits)]).all():
            continue  # beyond this dtype
        actual = backend.softmax(logits, fit, where=case.where)
        assert dtype_of(actual) == dtype
        exact = case._replace(logits=rounded).expected(fit, np.float64)
        np.testing.assert_allclose(
            values(actual), exact, rtol=2 * float(limits.eps), atol=2 * smallest, err_msg=case.name
        )
        n_cases += 1
    assert n_cases > 0.6 * len(cases)


@of_both(["log size", "entropy and size"], "entropy and size")
def test_gradients_are_finite_and_leave_masked_items_alone(kind, backend):
    gradient_of = backend.softmax_gradient(KINDS[kind])
    for case in cases_of_few_shapes(backend):
        weights = np.cos(np.arange(case.logits.shape[-1], dtype=np.float32))
        gradient = values(gradient_of(case.logits, case.where, weights))
        assert np.isfinite(gradient).all(), case.name
        if case.where is not None:
            masked = ~np.broadcast_to(case.where, gradient.shape)
            assert (gradient[masked] == 0).all(), case.name


def test_the_feature_is_on(paper, backend):
    """Trap 5: plain softmax must fail this."""
    logits = rows(256, 2.0)
    assert (values(backend.inverse_temperature(backend.entropy(logits), paper)) > 1).all()
    sharper, plain = (values(x) for x in (
        backend.softmax(logits, paper), backend.own_softmax(logits, -1)
    ))  # fmt: skip
    assert (sharper.max(axis=1) > 1.5 * plain.max(axis=1)).all()


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=SLOW)])
def test_any_axis(axis, paper, backend):
    logits = rows(60, 2.0, count=1).reshape(3, 4, 5)
    actual = backend.softmax(logits, calibrate.identity(), axis)
    np.testing.assert_allclose(actual, backend.own_softmax(logits, axis), rtol=1e-6)
    last = values(backend.softmax(np.moveaxis(logits, axis, -1), paper))
    actual = values(backend.softmax(logits, paper, axis))
    np.testing.assert_allclose(actual, np.moveaxis(last, -1, axis), rtol=1e-5)


@of_both(BY_KIND, "both")
def test_rows_without_items(kind, backend):
    """NaN as in the originals where nothing masks them, 0 where `where` does; empty arrays."""
    logits = np.array([[-np.inf] * 3, [1, 2, 3], [-np.inf, 0, 1]], np.float32)
    where = np.array([[False] * 3, [True] * 3, [False, True, True]])
    fit = BY_KIND[kind]
    probs = values(backend.softmax(logits, fit))
    assert np.isnan(probs[0]).all()
    assert np.isfinite(probs[1:]).all()
    assert (values(backend.softmax(logits, fit, where=where))[0] == 0).all()
    all_real = backend.softmax(logits, fit, where=np.ones((3, 3), bool))
    assert np.isnan(values(all_real)[0]).all()
    for shape in ((0, 4), (3, 0)):
        assert backend.softmax(np.zeros(shape, np.float32), fit).shape == shape
    assert np.isnan(values(backend.entropy(logits))[0])
    assert values(backend.entropy(logits, where=where))[0] == 0


@of_both(SMOOTH_FITS, "both")
def test_the_entropys_gradient_can_be_stopped(kind, backend):
    fit = SMOOTH_FITS[kind]
    z, weights = rows(20, 1.0, count=2), np.arange(20, dtype=np.float32) ** 2
    H = values(backend.entropy(z)).astype(np.float32)
    beta = values(backend.inverse_temperature(H, fit, n=20))[:, None]
    p = reference.softmax(z, beta=beta)
    constant = beta * p * (weights - (p * weights).sum(axis=1, keepdims=True))
    stopped, flowing = (
        values(backend.softmax_gradient(fit, entropy_gradient=flows)(z, None, weights))
        for flows in (False, True)
    )
    np.testing.assert_allclose(stopped, constant, rtol=1e-4, atol=1e-4)
    if fit.rule.by_entropy:
        assert np.abs(flowing - constant).max() > 0.1
    else:
        np.testing.assert_allclose(flowing, constant, rtol=1e-4, atol=1e-4)


@of_both(HEAD_RULES, "both")
def test_a_fit_per_head_applies_each_to_its_own(kind, backend):
    fit, alone = per_head(kind)
    logits = rows(1200, 2.0, count=1).reshape(2, 4, 5, 30)
    where = np.arange(30) < np.arange(5, 10)[:, None]
    probs = values(backend.softmax(logits, fit, where=where))
    unmasked = values(backend.softmax(logits, fit))[:, 2]  # as many items in each row
    n = np.tile(where.sum(axis=1), (2, 1))
    H = reference.entropy(logits, where=where).astype(np.float32)
    beta = values(backend.inverse_temperature(H, fit, n=np.tile(n[:, None], (1, 4, 1))))
    for head, own in enumerate(alone):
        exact = expected(logits[:, head], own, where)
        np.testing.assert_allclose(probs[:, head], exact, atol=1e-6, rtol=1e-5)
        entry = own.only
        exact = reference.inverse_temperature(
            H[:, head], entry.coefficients, entry.domain, own.rule, n
        )
        np.testing.assert_allclose(beta[:, head], exact, rtol=1e-5)
    np.testing.assert_allclose(unmasked, expected(logits[:, 2], alone[2]), atol=1e-6, rtol=1e-5)


@of_both(HEAD_RULES, "both")
def test_gradients_of_a_fit_per_head_are_those_of_each_alone(kind, backend):
    """By differences of the float64 reference."""
    fit, alone = per_head(kind)
    logits, weights = rows(30, 2.0, count=20).reshape(4, 5, 30), np.arange(30, dtype=np.float32)
    found = values(backend.softmax_gradient(fit)(logits, None, weights))
    nudges = 1e-5 * np.eye(30)
    for head, own in enumerate(alone):
        z = logits[head, :, None].astype(float)
        slopes = (expected(z + nudges, own) - expected(z - nudges, own)) @ weights / 2e-5
        np.testing.assert_allclose(found[head], slopes, rtol=1e-4, atol=1e-5)


def zeros(*shape):
    return np.zeros(shape, np.float32)


def test_what_does_not_fit_is_refused(paper, by_size, by_both, backend):
    heads, _ = per_head("polynomial")
    layered = replace(paper, entries=(replace(paper.only, layer=3),))
    beta, probs = backend.inverse_temperature, backend.softmax
    for call, message in (
        *((partial(f, zeros(4), fit), f"^coefficients .*{re.escape(repr(fit))};")
          for f in (beta, probs) for fit in (None, "max-retrieval", (1.0, 2.0))),
        (lambda: probs(zeros(4), heads), r"^unnamed@1 .*\(4,\) "),
        (lambda: beta(1.0, heads), r"^unnamed@1 .* \(\) "),
        (lambda: probs(zeros(4, 4, 4), heads, 0), rf"\b{backend.axis} .*\b0;.* {backend.axis}=-1"),
        (lambda: probs(zeros(2, 5, 9), heads), r"head 2\b.* 2 heads"),
        (lambda: probs(zeros(0, 2, 5, 9), heads), r"head 2\b.* 2 heads"),
        (lambda: beta(2.0, by_size), "log-size; .*n="),
        (lambda: beta(None, paper, n=3), r"polynomial; .*\bH\b"),
        (lambda: beta(2.0, by_both), "entropy-and-size; .*n="),
        (lambda: beta(None, by_both, n=3), r"entropy-and-size; .*\bH\b"),
        (lambda: beta(None, by_both), r"entropy-and-size; .*\bH\b"),
        (lambda: probs(zeros(4, 4, 4), layered), r"coefficients\.layer\(i\)"),
    ):  # fmt: skip
        with pytest.raises(calibrate.CoefficientsError, match=message):
            call()


def test_the_beta_of_fits_by_size(by_size, by_both, backend):
    """Any number of items, with H or without; the shape is H's, and half precision widens."""
    fit, n = by_size, np.array([0, 1, 16, 1024, 10**9])
    exact = np.clip(0.5 * np.log(np.maximum(n, 1)) + 0.6, 1, 64)
    for H in (None, np.full(5, np.nan, np.float32)):
        np.testing.assert_allclose(backend.inverse_temperature(H, fit, n=n), exact, rtol=1e-6)
    spread = backend.inverse_temperature(zeros(2, 3), fit, n=100)
    np.testing.assert_allclose(spread, np.full((2, 3), 0.5 * np.log(100) + 0.6), rtol=1e-6)
    half = backend.array(np.full((2, 3), 2.0), "bfloat16")
    spread = backend.inverse_temperature(half, by_both, n=100)
    assert dtype_of(spread) == "float32"
    exact = bare_value((2.0, np.log(100)), by_both.only.coefficients, by_both.rule.kind)
    np.testing.assert_allclose(values(spread), np.full((2, 3), exact), rtol=1e-6)


@pytest.mark.slow
def test_log_size_counts_each_row_and_all_its_axes(by_size):
    fit = by_size
    where = np.arange(30) < np.array([[1], [7], [30], [0]])
    logits = rows(30, 2.0, count=4)
    probs = np.asarray(calibrate.adaptive_softmax(logits, fit, where=where))
    hidden = np.where(where, logits, -np.inf)[:3]
    by_row = jax.vmap(lambda row: calibrate.adaptive_softmax(row, fit))
    for same in (
        calibrate.adaptive_softmax(hidden, fit),
        by_row(hidden),
        calibrate.adaptive_softmax(hidden.T, fit, axis=0).T,
        calibrate.adaptive_softmax(hidden.T[:, None], fit, axis=(0, 1))[:, 0].T,
        calibrate.adaptive_softmax(hidden[:, :, None], fit, axis=1)[..., 0],
    ):
        np.testing.assert_allclose(same, probs[:3], atol=1e-7, rtol=1e-5)
    np.testing.assert_allclose(by_row(logits), calibrate.adaptive_softmax(logits, fit), rtol=1e-6)
    both = calibrate.adaptive_softmax(logits, fit, axis=None)
    flat = calibrate.adaptive_softmax(logits.ravel(), fit)
    np.testing.assert_allclose(both.ravel(), flat, rtol=1e-6)


@jax.jit
def published_procedure(logits):
    """The paper's published procedure (section 3), in words of this test: two softmax calls."""
    probs = jax.nn.softmax(logits)
    H = -(probs * jnp.log(probs + 1e-9)).sum(-1, keepdims=True)
    p = -0.037 * H**4 + 0.481 * H**3 - 2.3 * H**2 + 4.917 * H - 1.791
    return jax.nn.softmax(logits * jnp.where(H > 0.5, jnp.maximum(p, 1.0), 1.0))


@pytest.mark.parametrize("n", [pytest.param(4, marks=SLOW), 512])
def test_the_papers_fit_equals_the_papers_procedure(n, paper):
    for scale in (0.3, 2.0, 6.0):
        logits = rows(n, scale, seed=1)
        actual = calibrate.adaptive_softmax(logits, paper)
        exact = published_procedure(logits)
        np.testing.assert_allclose(actual, exact, atol=1e-6, rtol=2e-4, err_msg=f"{scale=}")


@pytest.mark.parametrize(
    "kind", ["by_both", *(pytest.param(x, marks=SLOW) for x in ("paper", "beyond its sizes"))]
)
def test_gradient_flows_through_the_entropy(kind, paper, by_both):
    fit = {"paper": paper}.get(kind, by_both)
    if kind == "beyond its sizes":
        few = replace(by_both.only, domain=(0.2, 5.0, 1.0, 2.0), check=())
        fit = replace(by_both, entries=(few,))
    with jax.enable_x64(True):
        z = np.random.default_rng(6).standard_normal(40) * 2
        weights = np.arange(40.0)

        def value(logits):
            return (calibrate.adaptive_softmax(logits, fit) * weights).sum()

        gradient = jax.jit(jax.grad(value))(z)
        step = 1e-6
        for i in (0, 7, 39):
            nudge = step * (np.arange(40) == i)
            slope = (expected(z + nudge, fit) - expected(z - nudge, fit)) @ weights / 2 / step
            assert float(gradient[i]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("kind", ["entropy", *SMOOTH_FITS])
def test_derivatives_with_a_masked_item(kind, inner, outer):
    """As without it, in every order: 0 times what is infinite, or overflows, is NaN."""
    fit, real, weights = SMOOTH_FITS.get(kind), [0, 2, 3], np.float32([0, 1, 2, 3])

    def value(z, weights):
        return (calibrate.adaptive_softmax(z, fit) * weights).sum() if fit else calibrate.entropy(z)

    second = jax.jit(outer(inner(value)))
    first = jax.jit(lambda z, w: jax.jvp(lambda z: value(z, w), (z,), (30 * w,))[1])
    few = np.float32([1.0, 0.5, 2.0]), weights[real]
    with jax.enable_x64(True):
        wide = [x.astype(float) for x in few]
        check_grads(lambda z: value(z, wide[1]), wide[:1], order=2, atol=1e-6, rtol=1e-6)
    for mask in (-np.inf, np.finfo(np.float32).min, -1e4):
        z = np.float32([1.0, mask, 0.5, 2.0])
        curvature = np.asarray(second(z, weights))
        assert np.isfinite(curvature).all()
        if mask == -np.inf or kind not in ("log size", "both"):  # else counted: another beta
            np.testing.assert_allclose(first(z, weights), first(*few), rtol=1e-4, atol=1e-4)
            bends = second(*few)
            np.testing.assert_allclose(curvature[np.ix_(real, real)], bends, rtol=1e-3, atol=1e-4)
            assert not curvature[1].any(), mask
            assert not curvature[:, 1].any(), mask


@pytest.mark.parametrize("kind", ["heads", *(pytest.param(x, marks=SLOW) for x in BY_KIND)])
def test_strict_modes_of_jax(kind):
    fit = BY_KIND.get(kind) or per_head()[0]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        half = jnp.zeros((2, 4, 5, 6), "bfloat16")
        assert calibrate.adaptive_softmax(half, fit).dtype == "bfloat16"


def test_what_the_original_accepts(make_fit):
    """Several axes, masks with more axes, and narrow floats."""
    fit, logits = make_fit(), jnp.asarray(rows(6, 1.0, count=2))
    for axis in ([0, 1], (0, 1), None):
        both = calibrate.adaptive_softmax(logits, calibrate.identity(), axis=axis)
        np.testing.assert_allclose(both, jax.nn.softmax(logits, (0, 1)), rtol=1e-6)
        assert calibrate.entropy(logits, axis=axis).shape == ()
    where = jnp.ones((3, 2, 6), bool)
    assert calibrate.adaptive_softmax(logits, fit, where=where).shape == where.shape
    narrow = jnp.zeros((2, 4), "float8_e4m3fn")
    assert calibrate.adaptive_softmax(narrow, fit).dtype == narrow.dtype
    assert calibrate.adaptive_softmax(3.0, fit, axis=None) == 1
    integers = calibrate.adaptive_softmax(jnp.arange(5), fit)
    np.testing.assert_allclose(integers, expected(np.arange(5.0), fit), atol=1e-6)
    with pytest.raises(TypeError, match="logits .*complex64"):
        calibrate.adaptive_softmax(logits.astype("complex64"), fit)


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x == "both" else SLOW) for x in BY_KIND]
)
def test_gradients_keep_one_array_as_the_original_does(kind):
    logits, fit = jnp.asarray(rows(64, 1.0)), BY_KIND[kind]
    _, backward = jax.vjp(lambda z: calibrate.adaptive_softmax(z, fit), logits)
    shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert shapes.count(logits.shape) == 1
    assert set(shapes) <= {logits.shape, (16, 1), ()}


@pytest.mark.parametrize(
    "kind", ["heads", *(pytest.param(x, marks=SLOW) for x in (*KINDS, "identity"))]
)
def test_a_program_for_any_number_of_rows_and_items_is_exported(kind):
    fit = {**KINDS, "identity": calibrate.identity(), "heads": per_head("both")[0]}[kind]
    sizes = jax.export.symbolic_shape("b, 4, 3, n")
    shape = jax.ShapeDtypeStruct(sizes, jnp.float32), jax.ShapeDtypeStruct(sizes, bool)
    z = jnp.asarray(rows(100, 1.0, count=24)).reshape(2, 4, 3, 100)
    softmax = jax.jit(lambda z, where: calibrate.adaptive_softmax(z, fit, where=where))
    exported = jax.export.export(softmax)(*shape)
    if kind in ("entropy and size", "heads"):
        np.testing.assert_allclose(exported.call(z, z < 1), softmax(z, z < 1), rtol=1e-5)
    of_all = jax.jit(partial(calibrate.adaptive_softmax, coefficients=fit))
    jax.export.export(of_all)(shape[0])


def test_traced_once_per_shape_and_fit(make_fit, by_size):
    from calibrate.jax import softmax

    program = softmax._adaptive_softmax
    program.clear_cache()
    for fit in (make_fit(), make_fit(name="another-name")):
        for shape in ((3, 8), (3, 8), (4, 8)):
            calibrate.adaptive_softmax(jnp.zeros(shape), fit)
    assert program._cache_size() == 2
    for fit in (make_fit(max_beta=3.0), by_size, replace(by_size), BY_BOTH, BY_BOTH):
        calibrate.adaptive_softmax(jnp.zeros((3, 8)), fit)
    assert program._cache_size() == 5


def test_tables_and_lists_are_read(paper):
    pandas = pytest.importorskip("pandas")
    logits = np.linspace(0, 4, 12, dtype=np.float32).reshape(3, 4)
    table, mask = pandas.DataFrame(logits), pandas.DataFrame(logits > 1)
    expected = calibrate.adaptive_softmax(logits, paper, where=logits > 1)
    for z, where in ((table, mask), (logits.tolist(), (logits > 1).tolist())):
        np.testing.assert_array_equal(calibrate.adaptive_softmax(z, paper, where=where), expected)
        np.testing.assert_array_equal(calibrate.entropy(z), calibrate.entropy(logits))
    H = pandas.Series([0.5, 1.0])
    beta = calibrate.inverse_temperature(H.to_numpy(), paper)
    np.testing.assert_array_equal(calibrate.inverse_temperature(H, paper), beta)


def test_the_entropy_agrees_with_the_reference(backend):
    for case in CASES:
        actual = values(backend.entropy(case.logits, where=case.where))
        exact = reference.entropy(case.logits.astype(np.float64), where=case.where)
        np.testing.assert_allclose(actual, exact, atol=1e-5, rtol=0, err_msg=case.name)
