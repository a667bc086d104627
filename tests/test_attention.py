"""Attention against the float64 reference and jax.nn.dot_product_attention, on every path."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ATTENTION_CASES as CASES
from attention_cases import BY_BOTH, BY_SIZE, allowed, expected, in_words_of_the_reference, qkv
from jax.test_util import check_grads

import calibrate
from calibrate import attention, query_blocks
from calibrate.attention import dot_product_attention
from calibrate.files.coefficients import Entry


def in_blocks(monkeypatch, many):
    """One block for a call, or many."""
    if many:
        monkeypatch.setattr(query_blocks, "BLOCK_LOGITS", 1)
        monkeypatch.setattr(query_blocks, "MIN_ROWS", 3)
        monkeypatch.setattr(query_blocks, "MAX_ROWS", 3)
        monkeypatch.setattr(query_blocks, "FEW_QUERIES", 3)
        monkeypatch.setattr(query_blocks, "CAUSAL_RUNS", 2)
    attention._attend.clear_cache()


@pytest.fixture
def one_block(monkeypatch):
    in_blocks(monkeypatch, many=False)


@pytest.fixture
def many_blocks(monkeypatch):
    in_blocks(monkeypatch, many=True)
    yield
    attention._attend.clear_cache()


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request):
    """The same results whether a call fits in one block or takes many."""
    request.getfixturevalue(request.param.replace(" ", "_"))


def check_against_reference(arrays, fit, case):
    actual = dot_product_attention(*arrays, coefficients=fit, **CASES[case])
    exact = expected(*arrays, fit, **in_words_of_the_reference(CASES[case]))
    np.testing.assert_allclose(actual, exact, atol=3e-6, rtol=1e-5, err_msg=case)


@pytest.mark.parametrize(
    "case", ["causal", "causal window", "mask", "mask of one column", "bias", "lengths", "all"]
)
@pytest.mark.usefixtures("many_blocks")
def test_agrees_with_the_reference(case, paper):
    check_against_reference(qkv(N=4, K=2), paper, case)


@pytest.mark.parametrize("case", ["plain", "causal window", "bias", "all"])
@pytest.mark.usefixtures("one_block")
def test_agrees_with_the_reference_in_one_block(case, paper):
    check_against_reference(qkv(N=4, K=2), paper, case)


@pytest.mark.parametrize("case", ["mask", "all"])
@pytest.mark.parametrize("n_key_heads", [4, 1])
@pytest.mark.usefixtures("many_blocks")
def test_any_number_of_key_heads(case, n_key_heads, paper):
    check_against_reference(qkv(N=4, K=n_key_heads), paper, case)


@pytest.mark.parametrize(
    ("case", "fit"),
    [
        ("causal", BY_SIZE), ("causal window", BY_BOTH), ("mask", BY_BOTH),
        ("additive -inf", BY_SIZE), ("query lengths", BY_SIZE), ("all", BY_BOTH),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("many_blocks")
def test_the_keys_that_a_query_sees_are_counted(case, fit):
    """From positions alone, or from masks."""
    check_against_reference(qkv(), fit, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n_key_heads", [4, 2, 1])
@pytest.mark.usefixtures("blocks")
def test_every_case_in_every_layout(case, n_key_heads, paper):
    for fit in (paper, BY_SIZE, BY_BOTH):
        check_against_reference(qkv(N=4, K=n_key_heads), fit, case)


def queries_with_keys(case):
    """(B, T, N) bool: queries that see a key."""
    words = in_words_of_the_reference(CASES[case])
    masks = {k: words[k] for k in ("is_causal", "window", "mask", "lengths") if k in words}
    return np.moveaxis(allowed((2, 4, 11, 11), **masks).any(-1), 1, 2)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_original_wherever_a_key_is_seen(case):
    """So that what agrees with the one agrees with the other."""
    arrays, sees = qkv(N=4, K=2), queries_with_keys(case)
    original = np.asarray(jax.nn.dot_product_attention(*arrays, **CASES[case]))
    exact = expected(*arrays, calibrate.identity(), **in_words_of_the_reference(CASES[case]))
    np.testing.assert_allclose(exact[sees], original[sees], atol=1e-5)


@pytest.mark.parametrize("case", ["plain", "window", "all"])
@pytest.mark.usefixtures("many_blocks")
def test_identity_is_the_original_wherever_a_key_is_seen(case):
    arrays, sees = qkv(N=4, K=2), queries_with_keys(case)
    original = np.asarray(jax.nn.dot_product_attention(*arrays, **CASES[case]))
    actual = dot_product_attention(*arrays, coefficients=calibrate.identity(), **CASES[case])
    actual = np.asarray(actual)
    np.testing.assert_allclose(actual[sees], original[sees], atol=1e-5)
    assert (actual[~sees] == 0).all()


@pytest.mark.parametrize(
    ("T", "S", "is_causal"),
    [(1, 11, False), (1, 1, True), (7, 11, True), (11, 7, True), (20, 3, False), (20, 3, True)],
)
@pytest.mark.usefixtures("many_blocks")
def test_any_number_of_queries_and_keys(T, S, is_causal, paper):
    arrays = qkv(T=T, S=S)
    actual = dot_product_attention(*arrays, is_causal=is_causal, coefficients=paper)
    np.testing.assert_allclose(
        actual, expected(*arrays, paper, is_causal=is_causal), atol=3e-6, rtol=1e-5
    )


@pytest.mark.slow
def test_long_sequences_in_their_own_blocks(paper):
    """As it runs outside of tests: runs, blocks and the last one filled up."""
    arrays = qkv(T=700, S=700, N=2, K=1, B=1)
    for fit, options in (
        (paper, {"is_causal": True}), (BY_SIZE, {"local_window_size": (100, 7)}),
        (BY_BOTH, {"is_causal": True}),
    ):  # fmt: skip
        actual = dot_product_attention(*arrays, coefficients=fit, **options)
        exact = expected(*arrays, fit, **in_words_of_the_reference(options))
        np.testing.assert_allclose(actual, exact, atol=3e-6, rtol=1e-5)


def test_the_feature_is_on(paper):
    """Trap 5: plain attention must fail this."""
    arrays = qkv(T=64, S=64, scale=4.0)
    sharpened = dot_product_attention(*arrays, coefficients=paper)
    assert np.abs(sharpened - jax.nn.dot_product_attention(*arrays)).max() > 0.1


def test_without_a_batch_axis(paper):
    q, k, v = (x[0] for x in qkv())
    actual = dot_product_attention(q, k, v, coefficients=paper)
    assert actual.shape == q.shape
    np.testing.assert_allclose(actual, expected(q[None], k[None], v[None], paper)[0], atol=3e-6)


def test_a_soft_cap(paper):
    arrays = qkv(scale=6.0)
    actual = dot_product_attention(*arrays, coefficients=paper, logits_soft_cap=3.0)
    np.testing.assert_allclose(actual, expected(*arrays, paper, cap=3.0), atol=3e-6, rtol=1e-5)


@pytest.mark.usefixtures("many_blocks")
def test_a_fit_per_head(make_fit):
    one, two = make_fit((0.0, 0.0, 0.0, 0.0, 3.0)), make_fit((0.0, 0.0, 0.0, 0.5, 1.0))
    heads = {0: one, 1: two, 3: two}  # 1 and 2 are of different key heads
    fit = replace(one, entries=tuple(replace(own.only, head=i) for i, own in heads.items()))
    q, k, v = qkv(N=4, K=2)
    actual = np.asarray(dot_product_attention(q, k, v, is_causal=True, coefficients=fit))
    identity = calibrate.identity()
    for head, own in enumerate((one, two, identity, two)):
        group = [head // 2]
        exact = expected(q[:, :, [head]], k[:, :, group], v[:, :, group], own, is_causal=True)
        np.testing.assert_allclose(actual[:, :, [head]], exact, atol=3e-6, rtol=1e-5)
    with pytest.raises(calibrate.CoefficientsError, match="for head 3, and there are 2 heads"):
        dot_product_attention(q[:, :, :2], k, v, coefficients=fit)


@pytest.mark.parametrize(
    ("of_all", "other"),
    [
        (BY_SIZE, Entry((0.0, 3.0), (1.0, 8.0))),
        (BY_BOTH, Entry((0.0, 0.0, 0.0, 0.3, 2.0, 0.1, 0.0, 0.2), (0.1, 2.0, 0.5, 1.5))),
    ],
    ids=["size", "both"],
)
@pytest.mark.usefixtures("many_blocks")
def test_a_fit_by_size_per_head(of_all, other):
    fit = replace(of_all, entries=(replace(of_all.only, head=0), replace(other, head=1)))
    q, k, v = qkv(N=4, K=2)
    actual = np.asarray(dot_product_attention(q, k, v, is_causal=True, coefficients=fit))
    identity, second = calibrate.identity(), replace(of_all, entries=(other,))
    for head, own in enumerate((of_all, second, identity, identity)):
        group = [head // 2]
        exact = expected(q[:, :, [head]], k[:, :, group], v[:, :, group], own, is_causal=True)
        np.testing.assert_allclose(actual[:, :, [head]], exact, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "by"), [("float16", "both"), ("bfloat16", "entropy")])
def test_half_precision_with_offset_keys(dtype, by, paper):
    """An offset of 100 in one key dimension moves all logits of a query alike."""
    q, k, v = qkv(T=32, S=512, N=2, K=2)
    k[..., 0] += 100
    q, k, v = (jnp.asarray(x).astype(dtype) for x in (q, k, v))
    fit = BY_BOTH if by == "both" else paper
    actual = dot_product_attention(q, k, v, coefficients=fit)
    assert actual.dtype == dtype
    exact = expected(q, k, v, fit)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(actual, float), exact, rtol=2 * eps, atol=2e-4)


@pytest.mark.parametrize(
    ("case", "by"),
    [("causal", "both")] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in
        (("all", "entropy"), ("plain", "entropy"), ("causal", "entropy"), ("window", "entropy"),
         ("bias", "entropy"), ("all", "size"), ("all", "both"), ("mask", "both"))
    ],
)  # fmt: skip
@pytest.mark.usefixtures("many_blocks")
def test_gradients(case, by, make_fit):
    """Of queries, keys, values and bias, through the entropy too."""
    fit = make_fit((0.01, -0.1, 0.2, 0.7, 0.6), (0.1, 5.0), min_entropy=0.0)
    fit = {"entropy": fit, "size": BY_SIZE, "both": BY_BOTH}[by]
    keywords = CASES[case] | {"bias": CASES["bias"]["bias"].astype(float)}
    bias = keywords.pop("bias")
    with jax.enable_x64(True):
        arrays = tuple(x.astype(np.float64) for x in qkv(scale=1.0))

        @jax.jit
        def function(q, k, v, bias):
            return dot_product_attention(q, k, v, bias, coefficients=fit, **keywords)

        check_grads(function, (*arrays, bias), order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_no_nan_in_gradients_of_queries_without_keys(paper):
    q, k, v = (jnp.asarray(x) for x in qkv())
    mask = jnp.ones((2, 1, 11, 11), bool).at[:, :, 4].set(False)

    def loss(q, k, v):
        return (dot_product_attention(q, k, v, mask=mask, coefficients=paper) ** 2).sum()

    for gradient in jax.grad(loss, argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("case", "by"),
    [
        pytest.param(*case, marks=pytest.mark.slow) for case in
        (("additive -inf", "both"), ("causal", "size"), ("causal", "entropy"), ("mask", "entropy"),
         ("window", "entropy"), ("additive mask", "entropy"), ("additive -inf", "size"),
         ("additive -inf", "entropy"), ("causal", "both"))
    ],
)  # fmt: skip
@pytest.mark.usefixtures("many_blocks")
def test_second_derivatives_are_not_nan(case, by, make_fit):
    fit = make_fit((0.01, -0.1, 0.2, 0.7, 0.6), (0.1, 5.0), min_entropy=0.0)
    fit = {"entropy": fit, "size": BY_SIZE, "both": BY_BOTH}[by]
    arrays = tuple(jnp.asarray(x) for x in qkv(N=2, K=1, B=1))
    of_one_sequence = {k: x[:1] if k in ("mask", "bias") else x for k, x in CASES[case].items()}

    def loss(q):
        out = dot_product_attention(q, *arrays[1:], coefficients=fit, **of_one_sequence)
        return (out**2).sum()

    q, gradient = arrays[0], jax.jit(jax.grad(loss))
    product = jax.jit(lambda q, direction: jax.jvp(gradient, (q,), (direction,))[1])
    of_gradient = jax.jit(jax.grad(lambda q: (gradient(q) ** 2).sum()))(q)
    np.testing.assert_allclose(of_gradient, 2 * product(q, gradient(q)), rtol=1e-3, atol=1e-4)
    assert np.isfinite(product(q, q)).all()
    assert np.isfinite(jax.jit(lambda q: jax.jvp(loss, (q,), (30 * q,))[1])(q))


def test_windows_without_an_end():
    arrays, fit = qkv(), calibrate.identity()
    for window in ((3, 2**31 - 1), (2**31 - 1, 2**31 - 1), np.array([3, 40])):
        exact = expected(*arrays, fit, window=tuple(map(int, window)))
        actual = dot_product_attention(*arrays, coefficients=fit, local_window_size=window)
        np.testing.assert_allclose(actual, exact, atol=3e-6)


def test_no_heads_and_no_width(paper):
    q, k, v = qkv()
    assert dot_product_attention(q[:, :, :0], k, v, coefficients=paper).shape == (2, 11, 0, 8)
    no_width = dot_product_attention(q[..., :0], k[..., :0], v[..., :0], coefficients=paper)
    assert no_width.shape == (2, 11, 4, 0)


def test_vmap_and_jit_change_nothing(paper):
    arrays = qkv()
    attend = partial(dot_product_attention, is_causal=True, coefficients=paper)
    plain = attend(*arrays)
    np.testing.assert_allclose(jax.jit(attend)(*arrays), plain, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(attend)(*arrays), plain, atol=1e-6)


def test_all_heads_at_once_as_on_an_accelerator(monkeypatch, paper):
    arrays = qkv()
    monkeypatch.setattr(attention, "_all_at_once", lambda: True)
    attention._attend.clear_cache()
    actual = dot_product_attention(*arrays, is_causal=True, coefficients=paper)
    attention._attend.clear_cache()
    np.testing.assert_allclose(actual, expected(*arrays, paper, is_causal=True), atol=3e-6)


def test_the_matrix_never_exists(monkeypatch):
    """No array of the compiled program has a number of queries and of keys."""
    monkeypatch.setattr(query_blocks, "CAUSAL_RUNS", 2)
    q = k = v = jax.ShapeDtypeStruct((1, 8_192, 1, 16), jnp.float32)
    attend = partial(dot_product_attention, is_causal=True, coefficients=calibrate.load("paper"))
    peaks = [
        jax.jit(function).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes
        for function in (attend, partial(jax.nn.dot_product_attention, is_causal=True))
    ]
    assert peaks[0] < peaks[1] / 10

    def loss(function):
        return jax.grad(lambda q, k, v: function(q, k, v).sum(), argnums=(0, 1, 2))

    backward = jax.jit(loss(attend)).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes
    assert backward < peaks[1] / 5


def test_empty_arrays(paper):
    q, k, v = qkv()
    assert dot_product_attention(q[:0], k[:0], v[:0], coefficients=paper).shape == (0, 11, 4, 8)
    assert dot_product_attention(q[:, :0], k, v, coefficients=paper).shape == (2, 0, 4, 8)
    assert (dot_product_attention(q, k[:, :0], v[:, :0], coefficients=paper) == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cudnn"}, "only 'xla' computes the entropy"),
        ({"return_residual": True}, "partial results cannot be combined"),
        ({"mask": np.ones((2, 1, 11, 11))}, "mask is float"),
        ({"mask": np.ones((3, 1, 1, 1), bool)}, r"mask is \(3, 1, 1, 1\)"),
        ({"bias": np.ones((2, 3, 11, 11))}, r"bias is \(2, 3, 11, 11\)"),
        ({"query_seq_lengths": np.ones(3, np.int32)}, "query_seq_lengths is"),
        ({"query_seq_lengths": np.ones(2, np.float32)}, "give 2 integers"),
        ({"scale": np.ones(8)}, "scale has shape"),
        ({"query": np.ones((2, 11, 3, 8), np.float32)}, "N a multiple of K"),
        ({"value": np.ones((2, 10, 2, 8), np.float32)}, "give the same B, S and K"),
        ({"value": np.ones((2, 11, 2, 8), np.float16)}, "give one dtype"),
    ],
)
def test_what_does_not_match_is_refused(change, message, paper):
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        dot_product_attention(**arguments, coefficients=paper)


def test_complex_arrays_are_refused(paper):
    q = np.ones((1, 5, 2, 4), np.complex64)
    with pytest.raises(TypeError, match="query is complex64; give real numbers"):
        dot_product_attention(q, q, q, coefficients=paper)


def test_what_is_no_fit_is_refused():
    with pytest.raises(calibrate.CoefficientsError, match="give a fit"):
        dot_product_attention(*qkv(), coefficients="paper")
