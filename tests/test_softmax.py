"""The drop-in softmax against the float64 reference, jax.nn.softmax and the paper's snippet."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BY_BOTH
from cases import CASES, FITS
from jax.test_util import check_grads

import calibrate
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths import reference
from calibrate.maths.rule import Rule

KINDS = {name: FITS[name] for name in ("clamp", "log size", "entropy and size")}


def rows(n, scale, seed=0, count=16):
    rng = np.random.default_rng([seed, n])
    return (rng.standard_normal((count, n)) * scale).astype(np.float32)


def expected(logits, fit, where=None):
    entry = fit.only
    return reference.adaptive_softmax(
        logits, entry.coefficients, entry.domain, fit.rule, where=where
    )


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_agrees_with_the_reference(fit):
    for case in CASES:
        if fit not in KINDS.values() and case.logits.shape != (3, 300):
            continue  # other fits differ in what they do about their thresholds
        actual = calibrate.adaptive_softmax(case.logits, fit, where=case.where)
        exact = case.expected(fit)
        np.testing.assert_allclose(actual, exact, atol=1e-6, rtol=1e-5, err_msg=case.name)


@pytest.mark.parametrize(
    ("dtype", "fit"),
    [
        ("bfloat16", KINDS["clamp"]), ("float16", KINDS["log size"]),
        ("bfloat16", KINDS["entropy and size"]),
        pytest.param("float16", KINDS["clamp"], marks=pytest.mark.slow),
        pytest.param("bfloat16", KINDS["log size"], marks=pytest.mark.slow),
        pytest.param("float16", KINDS["entropy and size"], marks=pytest.mark.slow),
    ],
    ids=["bfloat16-entropy", "float16-size", "bfloat16-both", "float16-entropy", "bfloat16-size",
         "float16-both"],
)  # fmt: skip
def test_half_precision_is_within_2_ulp_of_the_reference(dtype, fit):
    """On the logits as they are rounded."""
    limits, n_cases = jnp.finfo(dtype), 0
    smallest = max(float(limits.smallest_subnormal), float(jnp.finfo("float32").tiny))
    for case in CASES:
        with np.errstate(over="ignore"):
            logits = case.logits.astype(limits.dtype)
        if not np.isfinite(logits.astype(float)[np.isfinite(case.logits)]).all():
            continue  # beyond this dtype
        actual = calibrate.adaptive_softmax(logits, fit, where=case.where)
        assert actual.dtype == dtype
        exact = case.expected(fit, logits.dtype)
        np.testing.assert_allclose(
            np.asarray(actual, float), exact, rtol=2 * float(limits.eps), atol=2 * smallest,
            err_msg=case.name,
        )  # fmt: skip
        n_cases += 1
    assert n_cases > 0.6 * len(CASES)


@pytest.mark.parametrize(
    "fit",
    [
        pytest.param(fit, id=kind, marks=pytest.mark.slow if kind == "clamp" else [])
        for kind, fit in KINDS.items()
    ],
)
def test_gradients_are_finite_and_leave_masked_items_alone(fit):
    @jax.jit
    @jax.grad
    def gradient_of(logits, where):
        probs = calibrate.adaptive_softmax(logits, fit, where=where)
        return (probs * jnp.cos(jnp.arange(logits.shape[-1]))).sum()

    for case in CASES:
        gradient = np.asarray(gradient_of(case.logits, case.where))
        assert np.isfinite(gradient).all(), case.name
        if case.where is not None:
            masked = ~np.broadcast_to(case.where, gradient.shape)
            assert (gradient[masked] == 0).all(), case.name


def test_the_feature_is_on(paper):
    """Trap 5: plain softmax must fail this."""
    logits = rows(256, 2.0)
    assert (np.asarray(calibrate.inverse_temperature(calibrate.entropy(logits), paper)) > 1).all()
    sharper = calibrate.adaptive_softmax(logits, paper).max(axis=1)
    assert (sharper > 1.5 * jax.nn.softmax(logits).max(axis=1)).all()


def size_fit(kappa=0.5, b=0.6, domain=(1.0, 8.0), **guards):
    """beta = kappa log n + b."""
    return Coefficients(Rule.log_size(**guards), (Entry((kappa, b), domain),), name="by-size")


def test_log_size_sharpens_by_the_number_of_items():
    """Every mask that is structural or -inf; a large negative number counts its items."""
    fit, logits, real = size_fit(), rows(200, 2.0), np.arange(200) < 150
    short = jax.nn.softmax(logits[:, :150] * (0.5 * np.log(150) + 0.6))
    np.testing.assert_allclose(
        calibrate.adaptive_softmax(logits[:, :150], fit), short, atol=1e-7, rtol=1e-5
    )
    hidden = np.where(real, logits, -np.inf)
    for masked in (
        calibrate.adaptive_softmax(np.where(real, logits, np.float32(1e4)), fit, where=real),
        calibrate.adaptive_softmax(hidden, fit),
        calibrate.adaptive_softmax(hidden, fit, where=np.arange(200) < 170),
        calibrate.adaptive_softmax(hidden.T, fit, axis=0).T,
    ):
        np.testing.assert_allclose(masked[:, :150], short, atol=1e-7, rtol=1e-5)
        assert (np.asarray(masked)[:, 150:] == 0).all()
    low = np.where(real, logits, np.finfo(np.float32).min)
    counted = calibrate.adaptive_softmax(low, fit)[:, :150]
    all_200 = jax.nn.softmax(logits[:, :150] * (0.5 * np.log(200) + 0.6))
    np.testing.assert_allclose(counted, all_200, atol=1e-7, rtol=1e-5)


def test_log_size_counts_each_row_and_all_its_axes():
    """On every way of counting, and under vmap."""
    fit = size_fit()
    where = np.arange(30) < np.array([[1], [7], [30], [0]])
    logits = rows(30, 2.0, count=4)
    probs = np.asarray(calibrate.adaptive_softmax(logits, fit, where=where))
    for i, n in enumerate((1, 7, 30)):
        beta = max(0.5 * np.log(n) + 0.6, 1)
        np.testing.assert_allclose(probs[i, :n], jax.nn.softmax(logits[i, :n] * beta), rtol=1e-5)
    assert (probs[3] == 0).all()
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


def test_the_beta_of_a_log_size_fit_needs_n():
    fit = size_fit()
    for H in (None, 2.0):
        with pytest.raises(calibrate.CoefficientsError, match="is of kind log-size; give n=, the"):
            calibrate.inverse_temperature(H, fit)
    n = np.array([0, 1, 16, 1024, 10**9])
    expected = np.clip(0.5 * np.log(np.maximum(n, 1)) + 0.6, 1, 64)
    for H in (None, np.full(5, np.nan)):
        beta = calibrate.inverse_temperature(H, fit, n=n)
        assert beta.dtype == jnp.float32
        np.testing.assert_allclose(beta, expected, rtol=1e-6)
    H = np.zeros((2, 3))
    spread = jax.jit(lambda H, n: calibrate.inverse_temperature(H, fit, n=n))(H, 100)
    np.testing.assert_allclose(spread, np.full((2, 3), 0.5 * np.log(100) + 0.6), rtol=1e-6)


def test_the_beta_of_a_fit_by_both_needs_both(by_both):
    error = partial(pytest.raises, calibrate.CoefficientsError)
    with error(match="is of kind entropy-and-size; give n=, the number of unmasked items"):
        calibrate.inverse_temperature(2.0, by_both)
    with error(match="is of kind entropy-and-size; give H, the entropy of the items$"):
        calibrate.inverse_temperature(None, by_both, n=3)
    with error(match="give H, .* and n=, the number"):
        calibrate.inverse_temperature(None, by_both)
    spread = calibrate.inverse_temperature(jnp.full((2, 3), 2.0, "bfloat16"), by_both, n=100)
    assert spread.dtype == jnp.float32
    exact = by_both.only.value_at(2.0, np.log(100))
    np.testing.assert_allclose(spread, np.full((2, 3), exact), rtol=1e-6)


def test_an_entropy_fit_does_not_look_at_n(paper):
    with_n = calibrate.inverse_temperature(3.0, paper, n=7)
    assert with_n == calibrate.inverse_temperature(3.0, paper)
    with pytest.raises(calibrate.CoefficientsError, match="of kind entropy-polynomial; give H"):
        calibrate.inverse_temperature(None, paper, n=7)


@pytest.mark.parametrize("by", ["size", "both"])
def test_a_fit_by_size_per_head(by, by_both):
    one, two = size_fit(), size_fit(-1.0, 4.0, (1.0, 1.5))  # it falls, and not beyond its sizes
    if by == "both":
        steep = Entry((0.0, 0.0, 0.0, -0.5, 3.0, 0.2, -0.1, 0.5), (0.5, 2.0, 1.0, 1.5))
        one, two = by_both, replace(by_both, entries=(steep,))
    fit = replace(one, entries=(replace(one.only, head=0), replace(two.only, head=2)))
    logits = np.random.default_rng(0).standard_normal((2, 4, 5, 30)).astype(np.float32) * 2
    where = np.arange(30) < np.arange(1, 6)[:, None]
    probs = np.asarray(calibrate.adaptive_softmax(logits, fit, where=where))
    for head, own in enumerate([one, calibrate.identity(), two, calibrate.identity()]):
        alone = calibrate.adaptive_softmax(logits[:, head], own, where=where)
        np.testing.assert_allclose(probs[:, head], alone, atol=1e-7, rtol=1e-5)
    n, H = where.sum(axis=1), np.asarray(calibrate.entropy(logits, where=where))
    beta = np.asarray(calibrate.inverse_temperature(H, fit, n=n))
    assert (beta[:, [1, 3]] == 1).all()
    for head, own in ((0, one.only), (2, two.only)):
        exact = reference.inverse_temperature(
            H[:, head], own.coefficients, own.domain, fit.rule, np.tile(n, (2, 1))
        )
        np.testing.assert_allclose(beta[:, head], exact, rtol=1e-5)
        assert np.ptp(exact) > 0.1


def test_no_gradient_flows_through_the_number_of_items():
    fit, z, weights = size_fit(), jnp.asarray(rows(20, 1.0, count=2)), jnp.arange(20.0) ** 2
    beta = 0.5 * np.log(20) + 0.6
    exact = jax.grad(lambda z: (jax.nn.softmax(z * beta) * weights).sum())(z)

    def value(z, flows):
        return (calibrate.adaptive_softmax(z, fit, entropy_gradient=flows) * weights).sum()

    for flows in (True, False):
        gradient = jax.jit(jax.grad(value), static_argnums=1)(z, flows)
        np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-4)


def published_procedure(logits):
    """The paper's published procedure (section 3), in words of this test: two softmax calls."""
    probs = jax.nn.softmax(logits)
    H = -(probs * jnp.log(probs + 1e-9)).sum(-1, keepdims=True)
    p = -0.037 * H**4 + 0.481 * H**3 - 2.3 * H**2 + 4.917 * H - 1.791
    return jax.nn.softmax(logits * jnp.where(H > 0.5, jnp.maximum(p, 1.0), 1.0))


@pytest.mark.parametrize("n", [4, 512, 16_384])
def test_the_papers_fit_equals_the_papers_procedure(n, paper):
    for scale in (0.3, 2.0, 6.0):
        logits = rows(n, scale, seed=1)
        actual = calibrate.adaptive_softmax(logits, paper)
        exact = published_procedure(logits)
        np.testing.assert_allclose(actual, exact, atol=1e-6, rtol=2e-4, err_msg=f"{scale=}")


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2), (0, 1, 2), None])
def test_identity_is_jax_softmax(axis):
    logits = np.random.default_rng(5).standard_normal((3, 4, 5)).astype(np.float32)
    actual = calibrate.adaptive_softmax(logits, calibrate.identity(), axis=axis)
    np.testing.assert_allclose(actual, jax.nn.softmax(logits, axis=axis), rtol=1e-6)


def test_masks_are_structural(paper):
    """Trap 3: any kind of mask gives softmax over the real items, and 0 elsewhere."""
    logits, where = rows(200, 2.0), np.arange(200) < 150
    short = np.asarray(calibrate.adaptive_softmax(logits[:, :150], paper))
    for mask in (-np.inf, np.finfo(np.float32).min, -1e9):
        masked = np.where(where, logits, np.float32(mask))
        actual = np.asarray(calibrate.adaptive_softmax(masked, paper))
        np.testing.assert_allclose(actual[:, :150], short, atol=1e-7, rtol=1e-5)
        assert (actual[:, 150:] == 0).all()
    hot = np.where(where, logits, np.float32(1e4))
    actual = np.asarray(calibrate.adaptive_softmax(hot, paper, where=where))
    np.testing.assert_allclose(actual[:, :150], short, atol=1e-7, rtol=1e-5)
    assert (actual[:, 150:] == 0).all()


def test_empty_rows_as_in_jax(paper):
    logits = jnp.array([[-jnp.inf] * 3, [1.0, 2.0, 3.0], [-jnp.inf, 0.0, 1.0]])
    where = jnp.array([[True] * 3, [False] * 3, [True] * 3])
    for kwargs in ({}, {"where": where}):
        ours = calibrate.adaptive_softmax(logits, calibrate.identity(), **kwargs)
        np.testing.assert_allclose(ours, jax.nn.softmax(logits, **kwargs), rtol=1e-6)
    assert calibrate.adaptive_softmax(jnp.zeros((2, 0)), paper).shape == (2, 0)


def test_logits_at_the_ends_of_float32(paper):
    """The difference overflows; the probabilities are still 1 and 0."""
    logits = jnp.array([[3e38, -3e38, -3e38], [0.0, 0.0, -3e38]])
    probs = calibrate.adaptive_softmax(logits, paper)
    np.testing.assert_allclose(probs, [[1, 0, 0], [0.5, 0.5, 0]], atol=1e-6)
    assert np.isfinite(calibrate.entropy(logits)).all()


def test_no_nan_in_gradients_of_masked_rows(paper):
    logits = jnp.array([[1.0, -jnp.inf, 0.5, 2.0], [1.0, 1e4, 0.5, 2.0], [3.0, 1.0, 2.0, 0.0]])
    where = jnp.array([[True] * 4, [True, False, True, True], [False] * 4])

    def loss(z):
        return (calibrate.adaptive_softmax(z, paper, where=where) * jnp.arange(4.0)).sum()

    gradient = jax.jit(jax.grad(loss))(logits)
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~np.asarray(where)] == 0).all()


@pytest.mark.parametrize("kind", ["paper", "by_both", "beyond its sizes"])
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_dtype_follows_jax(dtype, paper):
    logits = jnp.asarray(rows(64, 3.0)).astype(dtype)
    actual = calibrate.adaptive_softmax(logits, paper)
    assert (
        actual.dtype == jax.nn.softmax(logits.astype(float) if dtype == "int32" else logits).dtype
    )
    exact = expected(np.asarray(logits, np.float64), paper)
    eps = float(jnp.finfo(actual.dtype).eps)
    np.testing.assert_allclose(np.asarray(actual, float), exact, atol=2e-6, rtol=2 * eps + 2e-5)


@pytest.mark.parametrize("fit", KINDS.values(), ids=KINDS)
def test_vmap_and_jit_change_nothing(fit):
    logits = rows(32, 2.0)
    plain = calibrate.adaptive_softmax(logits, fit)
    mapped = jax.vmap(lambda row: calibrate.adaptive_softmax(row, fit))(logits)
    jitted = jax.jit(calibrate.adaptive_softmax)(logits, fit)
    np.testing.assert_allclose(mapped, plain, rtol=1e-6)
    np.testing.assert_allclose(jitted, plain, rtol=1e-6)


@pytest.mark.parametrize("fit", [None, "max-retrieval", (1.0, 2.0)])
def test_what_is_no_fit_is_refused(fit):
    for function in (calibrate.adaptive_softmax, calibrate.inverse_temperature):
        with pytest.raises(calibrate.CoefficientsError, match="give a fit, such as calibrate.load"):
            function(jnp.zeros(4), fit)


def per_head(make_fit):
    """Heads 0 and 2 calibrated."""
    one, two = make_fit((0.0, 0.0, 0.0, 0.0, 3.0)), make_fit((0.0, 0.0, 0.0, 0.5, 1.0))
    return replace(one, entries=(replace(one.only, head=0), replace(two.only, head=2))), one, two


def test_a_fit_per_head_applies_each_to_its_own(make_fit):
    fit, one, two = per_head(make_fit)
    logits = np.random.default_rng(0).standard_normal((2, 4, 5, 30)).astype(np.float32) * 2
    probs = np.asarray(calibrate.adaptive_softmax(logits, fit))
    for head, own in enumerate([one, calibrate.identity(), two, calibrate.identity()]):
        alone = calibrate.adaptive_softmax(logits[:, head], own)
        np.testing.assert_allclose(probs[:, head], alone, rtol=1e-6)
    H = calibrate.entropy(logits)
    beta = np.asarray(calibrate.inverse_temperature(H, fit))
    assert (beta[:, 0] == 3).all()
    assert (beta[:, [1, 3]] == 1).all()
    np.testing.assert_allclose(beta[:, 2], calibrate.inverse_temperature(H[:, 2], two))
    masked = calibrate.adaptive_softmax(logits, fit, where=np.arange(30) < 20)
    shorter = calibrate.adaptive_softmax(logits[..., :20], fit)
    np.testing.assert_allclose(masked[..., :20], shorter, atol=1e-7)


def test_a_fit_per_head_needs_an_axis_of_heads(make_fit):
    fit, _, _ = per_head(make_fit)
    for call, message in (
        (lambda: calibrate.adaptive_softmax(jnp.zeros(4), fit), "no axis of heads"),
        (lambda: calibrate.adaptive_softmax(jnp.zeros((4, 4, 4)), fit, 0), "axis is 0"),
        (lambda: calibrate.adaptive_softmax(jnp.zeros((2, 5, 9)), fit), "for head 2, .* 2 heads"),
        (lambda: calibrate.inverse_temperature(1.0, fit), "no axis of heads"),
    ):
        with pytest.raises(calibrate.CoefficientsError, match=message):
            call()


def test_a_layer_is_chosen_before_it_is_applied(make_fit):
    fit, one, two = per_head(make_fit)
    entries = (replace(one.only, layer=3), replace(two.only, layer=5, head=1))
    layered = replace(fit, entries=entries)
    with pytest.raises(calibrate.CoefficientsError, match=r"choose one: coefficients.layer\(i\)"):
        calibrate.adaptive_softmax(jnp.zeros((4, 4, 4)), layered)
    assert layered.layer(3) == one
    assert layered.layer(5).entries == (replace(two.only, head=1),)
    assert layered.layer(4) == calibrate.identity()
    assert one.layer(9) == one


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_every_kind_agree_with_differences(kind, make_fit):
    """Forward, reverse and second derivatives of the full path."""
    smooth = make_fit((0.01, -0.1, 0.2, 0.7, 0.6), (0.2, 5.0))
    fit = {"clamp": smooth, "log size": size_fit(), "entropy and size": BY_BOTH}[kind]
    with jax.enable_x64(True):
        z = np.random.default_rng(1).standard_normal((3, 7))
        check_grads(
            lambda x: calibrate.adaptive_softmax(x, fit), (z,), order=2, atol=1e-6, rtol=1e-6
        )
        if kind == "clamp":
            check_grads(calibrate.entropy, (z,), order=2, atol=1e-6, rtol=1e-6)


def slopes_and_bends(value, z, step=1e-4):
    """First and second derivatives of a function of one row by differences in float64."""
    nudges = step * np.eye(len(z))
    at = np.vectorize(lambda *x: float(value(np.array(x))))
    pairs = [[[at(*(z + s * a + t * b)) for t in (1, -1) for s in (1, -1)] for a in nudges]
             for b in nudges]  # fmt: skip
    second = np.array(pairs) @ [1, -1, -1, 1] / (4 * step**2)
    first = np.array([at(*(z + a)) - at(*(z - a)) for a in nudges]) / (2 * step)
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize(
    "kind",
    ["both"]
    + [pytest.param(k, marks=pytest.mark.slow) for k in ("entropy", "polynomial", "log size")],
)
def test_derivatives_with_a_masked_item(kind, inner, outer, make_fit):
    """In every order of forward and reverse: 0 times what is infinite, or overflows, is NaN."""
    fit = make_fit((0.01, -0.1, 0.2, 0.7, 0.6), (0.2, 5.0), min_entropy=0.0)
    fit = {"log size": size_fit(), "both": BY_BOTH}.get(kind, fit)
    real, weights = [0, 2, 3], np.arange(4.0)

    def value(z):
        if kind == "entropy":
            return calibrate.entropy(z)
        return (calibrate.adaptive_softmax(z, fit) * weights).sum()

    def exact(z):
        if kind == "entropy":
            return reference.entropy(z)
        return expected(z, fit) @ weights[real]

    second = jax.jit(outer(inner(value)))
    first = jax.jit(lambda z: jax.jvp(value, (z,), (30 * weights.astype(np.float32),))[1])
    slopes, bends = slopes_and_bends(exact, np.array([1.0, 0.5, 2.0]))
    for mask in (-np.inf, np.finfo(np.float32).min, -1e4):
        if mask > -np.inf and kind in ("log size", "both"):  # counted: another beta
            assert np.isfinite(second(np.float32([1.0, mask, 0.5, 2.0]))).all()
            continue
        z = np.float32([1.0, mask, 0.5, 2.0])
        np.testing.assert_allclose(first(z), 30 * slopes @ weights[real], rtol=1e-4, atol=1e-4)
        curvature = np.asarray(second(z))
        np.testing.assert_allclose(curvature[np.ix_(real, real)], bends, rtol=1e-3, atol=1e-4)
        assert (curvature[1] == 0).all(), mask
        assert (curvature[:, 1] == 0).all(), mask


def test_what_the_original_accepts(make_fit):
    """Lists of axes, masks with more axes, narrow floats, and JAX's strict modes."""
    fit, logits = make_fit(), jnp.asarray(rows(6, 1.0, count=2))
    both = calibrate.adaptive_softmax(logits, fit, axis=[0, 1])
    np.testing.assert_allclose(both, calibrate.adaptive_softmax(logits, fit, axis=(0, 1)))
    assert calibrate.entropy(logits, axis=[0, 1]).shape == ()
    assert calibrate.adaptive_softmax(logits, fit, where=jnp.ones((3, 2, 6), bool)).shape == (
        3,
        2,
        6,
    )
    narrow = jnp.zeros((2, 4), "float8_e4m3fn")
    assert calibrate.adaptive_softmax(narrow, fit).dtype == narrow.dtype
    with jax.numpy_dtype_promotion("strict"):
        assert calibrate.adaptive_softmax(logits.astype("bfloat16"), fit).dtype == "bfloat16"
        calibrate.adaptive_softmax(logits.astype("bfloat16"), size_fit())
        calibrate.adaptive_softmax(logits.astype("bfloat16"), BY_BOTH)
    heads, _, _ = per_head(make_fit)
    with jax.numpy_rank_promotion("raise"):
        calibrate.adaptive_softmax(jnp.zeros((2, 4, 5, 6)), heads)
        calibrate.adaptive_softmax(jnp.zeros((2, 4, 5, 6)), size_fit())
        calibrate.adaptive_softmax(jnp.zeros((2, 4, 5, 6)), BY_BOTH)
    with pytest.raises(TypeError, match="logits are complex64; give real ones"):
        calibrate.adaptive_softmax(logits.astype("complex64"), fit)


@pytest.mark.parametrize("by", ["entropy", "both"])
def test_the_entropys_gradient_can_be_stopped(by, make_fit):
    fit = make_fit((0.0, 0.0, 0.0, 1.0, 1.0), (0.2, 5.0)) if by == "entropy" else BY_BOTH
    z = jnp.asarray(rows(20, 1.0, count=2))
    beta = calibrate.inverse_temperature(calibrate.entropy(z), fit, n=20)[:, None]
    weights = jnp.arange(20.0) ** 2

    def gradient(softmax):
        return jax.jit(jax.grad(lambda z: (softmax(z) * weights).sum()))(z)

    stopped = gradient(lambda z: calibrate.adaptive_softmax(z, fit, entropy_gradient=False))
    constant = gradient(lambda z: jax.nn.softmax(z * beta))
    np.testing.assert_allclose(stopped, constant, rtol=1e-4, atol=1e-6)
    flowing = gradient(lambda z: calibrate.adaptive_softmax(z, fit))
    assert np.abs(flowing - constant).max() > 0.1


def test_gradients_keep_one_array_as_the_original_does(paper):
    logits = jnp.asarray(rows(64, 1.0))
    for softmax in (
        jax.nn.softmax,
        lambda z: calibrate.adaptive_softmax(z, paper),
        lambda z: calibrate.adaptive_softmax(z, size_fit()),
        lambda z: calibrate.adaptive_softmax(z, BY_BOTH),
    ):
        _, backward = jax.vjp(softmax, logits)
        shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
        assert shapes.count(logits.shape) == 1
        assert set(shapes) <= {logits.shape, (16, 1), ()}


def test_traced_once_per_shape_and_fit(make_fit):
    from calibrate import softmax

    softmax._adaptive_softmax.clear_cache()
    for fit in (make_fit(), make_fit(name="another-name")):
        for shape in ((3, 8), (3, 8), (4, 8)):
            calibrate.adaptive_softmax(jnp.zeros(shape), fit)
    assert softmax._adaptive_softmax._cache_size() == 2
    for fit in (make_fit(max_beta=3.0), size_fit(), size_fit(), BY_BOTH, BY_BOTH):
        calibrate.adaptive_softmax(jnp.zeros((3, 8)), fit)
    assert softmax._adaptive_softmax._cache_size() == 5
