"""Attention of JAX and PyTorch against the float64 reference and the originals, on every path.

Tests with a `backend` run for both; what only PyTorch has is in test_torch_*.py.
"""

import itertools
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ATTENTION_CASES as CASES
from attention_cases import BY_BOTH, BY_SIZE, allowed, expected, in_words_of_the_reference, qkv
from backends import (
    BACKENDS,
    NO_TORCH,
    PATHS,
    Jax,
    Torch,
    dtype_of,
    forget_attention,
    kinds_and_backends,
    set_blocks,
    values,
)
from cases import SMOOTH, per_head

import calibrate
from calibrate.jax import query_blocks
from calibrate.jax.attention import dot_product_attention

SLOW = pytest.mark.slow


@pytest.fixture(params=PATHS)
def backend(request, monkeypatch):
    kind, path = request.param
    backend = kind()
    backend.take_path(path, monkeypatch)
    return backend


@pytest.fixture
def many_blocks(monkeypatch):
    Jax().take_path("many blocks", monkeypatch)


@pytest.fixture(autouse=True)
def forget():
    yield
    forget_attention()


def check(backend, arrays, fit, atol=3e-6, **case):
    actual = values(backend.attend(arrays, fit, **case))
    exact = expected(*arrays, fit, **in_words_of_the_reference(case))
    np.testing.assert_allclose(actual, exact, atol=atol, rtol=1e-5)


@pytest.mark.parametrize(
    ("T", "S", "is_causal"),
    [(1, 11, False), (1, 1, True), (7, 11, True), (11, 7, True), (20, 3, False), (20, 3, True)],
)
@pytest.mark.slow
def test_any_number_of_queries_and_keys(T, S, is_causal, paper, backend):
    for fit in (paper,) if isinstance(backend, Jax) else (paper, BY_SIZE, BY_BOTH):
        check(backend, qkv(T=T, S=S), fit, is_causal=is_causal)


def test_the_feature_is_on(paper, backend):
    """Trap 5: plain attention must fail this."""
    arrays = qkv(T=64, S=64, scale=4.0)
    sharpened = values(backend.attend(arrays, paper))
    plain = np.asarray(jax.nn.dot_product_attention(*arrays))
    assert np.abs(sharpened - plain).max() > 0.1
    identity = values(backend.attend(arrays, calibrate.identity()))
    np.testing.assert_allclose(identity, plain, atol=1e-5)


def test_a_soft_cap(paper, backend):
    check(backend, qkv(scale=6.0), paper, logits_soft_cap=3.0)


@pytest.mark.parametrize(
    ("kind", "backend"), kinds_and_backends(["polynomial", "both"], ["both"], PATHS),
    indirect=["backend"],
)  # fmt: skip
def test_a_fit_per_head(kind, backend):
    fit, alone = per_head(kind)
    q, k, v = qkv(N=4, K=2)
    actual = values(backend.attend((q, k, v), fit, is_causal=True))
    for head, own in enumerate(alone):
        group = [head // 2]
        exact = expected(q[:, :, [head]], k[:, :, group], v[:, :, group], own, is_causal=True)
        np.testing.assert_allclose(actual[:, :, [head]], exact, atol=3e-6, rtol=1e-5)
    with pytest.raises(calibrate.CoefficientsError, match="head 2"):
        backend.attend((q[:, :, :2], k, v), fit)


@pytest.mark.parametrize(
    ("dtype", "backend"), kinds_and_backends(["float16", "bfloat16"], ["float16"], PATHS),
    indirect=["backend"],
)  # fmt: skip
def test_half_precision_with_offset_keys(dtype, backend, by_both, paper):
    """An offset of 100 in one key dimension moves all logits of a query alike."""
    q, k, v = qkv(T=32, S=512, N=2, K=2)
    k[..., 0] += 100
    arrays = [backend.array(x, dtype) for x in (q, k, v)]
    fit = by_both if dtype == "float16" else paper
    actual = backend.attend(arrays, fit)
    assert dtype_of(actual) == dtype
    exact, eps = expected(*map(values, arrays), fit), float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(values(actual), exact, rtol=2 * eps, atol=2e-4)


def test_queries_without_keys_give_0_and_keys_that_no_query_sees_change_nothing(paper, backend):
    """But the gradient of queries."""
    mask = np.ones((1, 1, 11, 11), bool)
    mask[:, :, 4] = False
    cases = [({"mask": mask}, paper)]
    if not isinstance(backend, Jax):  # each takes it seconds to compile
        bias = {"bias": np.where(mask, np.float32(0), -np.inf)}
        cases += [(case, fit) for case in (cases[0][0], bias) for fit in (paper, BY_SIZE, BY_BOTH)]
    for case, fit in cases:
        assert (values(backend.attend(qkv(), fit, **case))[:, 4] == 0).all()
        for gradient in backend.attention_gradients(qkv(), fit, **case):
            assert np.isfinite(values(gradient)).all()
    q, k, v = qkv()
    case = {"mask": np.broadcast_to(np.arange(11) < 8, mask.shape)}
    exact = values(backend.attend((q, k, v), paper, **case))
    finite = backend.attention_gradients((q, k, v), paper, **case)
    k = np.where(np.arange(11)[:, None, None] < 8, k, np.float32(np.nan))
    np.testing.assert_allclose(values(backend.attend((q, k, v), paper, **case)), exact, atol=3e-6)
    gradients = backend.attention_gradients((q, k, v), paper, **case)
    for x, y in zip(gradients[1:], finite[1:], strict=True):
        np.testing.assert_allclose(values(x), values(y), atol=2e-5)
        assert (values(x)[:, 8:] == 0).all()


def test_the_gradient_of_the_entropy_can_be_stopped(backend):
    flowing, stopped = (
        values(backend.attention_gradients(qkv(), BY_BOTH, entropy_gradient=flows)[0])
        for flows in (True, False)
    )
    assert np.abs(flowing - stopped).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS)
def test_long_sequences_in_their_own_blocks(kind, paper):
    """As it runs outside of tests: runs, blocks and the last one filled up."""
    backend, arrays = kind(), qkv(T=700, S=700, N=2, K=1, B=1)
    mask = (np.arange(700) >= 100)[None, None, None]  # padding first, and so are its queries
    # The stock kernel's exponentials are good to some 1e-6, and log Z - E[z] adds them up.
    atol = 3e-6 if kind is Jax else 2e-5
    for fit, case in (
        (paper, {"is_causal": True}), (BY_SIZE, {"local_window_size": (100, 7)}),
        (BY_BOTH, {"is_causal": True}), (paper, {"is_causal": True, "mask": mask}),
    ):  # fmt: skip
        check(backend, arrays, fit, atol, **case)


FIT = {"paper": calibrate.load("paper"), "size": BY_SIZE, "both": BY_BOTH}
# JAX compiles each for seconds. Keys are counted from positions alone, or from masks.
OF_JAX = [
    ("one block", 2, "paper", "all"), ("many blocks", 1, "paper", "all"),
    ("many blocks", 4, "both", "all"),
    *(("many blocks", 2, "paper", case) for case in ("mask of one column", "bias", "lengths")),
    *(("many blocks", 2, "size", case) for case in (
        "causal", "additive -inf", "query lengths", "causal lengths")),
    *(("many blocks", 2, "both", case) for case in ("causal window", "mask")),
]  # fmt: skip
QUICK = {OF_JAX[0], *(x for x in OF_JAX if x[2:] in {("both", "all"), ("size", "query lengths")})}
OF_TORCH = [
    pytest.param(Torch, *x, marks=NO_TORCH if x[1] == 2 or x[3] == "all" else [NO_TORCH, SLOW])
    for x in itertools.product(("two calls", "one block", "many blocks"), (4, 2, 1), FIT, CASES)
    if x[2] == "paper" or x[3] != "additive mask"  # in one with the bias, it is not counted alike
]


@pytest.mark.parametrize(
    ("kind", "path", "n_key_heads", "by", "case"),
    [*(pytest.param(Jax, *x, marks=() if x in QUICK else SLOW) for x in OF_JAX), *OF_TORCH],
)
def test_agrees_with_the_reference(kind, path, n_key_heads, by, case, monkeypatch):
    backend = kind()
    backend.take_path(path, monkeypatch)
    check(backend, qkv(N=4, K=n_key_heads), FIT[by], **CASES[case])


@pytest.mark.parametrize(
    "case",
    ["all", "query lengths", *(pytest.param(x, marks=SLOW) for x in (
        "window", "narrow window", "mask of one column", "additive -inf", "causal lengths"))],
)  # fmt: skip
def test_the_reference_is_the_original_wherever_a_key_is_seen(case):
    arrays, words = qkv(N=4, K=2), in_words_of_the_reference(CASES[case])
    masks = {k: words[k] for k in ("is_causal", "window", "mask", "lengths") if k in words}
    sees = np.moveaxis(allowed((2, 4, 11, 11), **masks).any(-1), 1, 2)
    original = np.asarray(jax.nn.dot_product_attention(*arrays, **CASES[case]))
    exact = expected(*arrays, calibrate.identity(), **words)
    np.testing.assert_allclose(exact[sees], original[sees], atol=1e-5)


def test_no_batch_axis_no_heads_no_width_and_no_items(paper):
    attend = partial(dot_product_attention, coefficients=paper)
    q, k, v = qkv()
    one = attend(q[0], k[0], v[0])
    np.testing.assert_allclose(one, expected(q[:1], k[:1], v[:1], paper)[0], atol=3e-6)
    assert attend(q[:, :, :0], k, v).shape == (2, 11, 0, 8)
    assert attend(q[..., :0], k[..., :0], v[..., :0]).shape == (2, 11, 4, 0)
    assert attend(q[:0], k[:0], v[:0]).shape == (0, 11, 4, 8)
    assert attend(q[:, :0], k, v).shape == (2, 0, 4, 8)
    assert (attend(q, k[:, :0], v[:, :0]) == 0).all()


@pytest.mark.parametrize(
    ("case", "by"),
    [("causal", "both"), *(pytest.param(*x, marks=pytest.mark.slow) for x in itertools.product(
        ("all", "window", "mask"), ("entropy", "size", "both")))],
)  # fmt: skip
@pytest.mark.usefixtures("many_blocks")
def test_gradients(case, by):
    """Queries, keys, values and bias have them, through the entropy too: the reference's slope."""
    fit = {"entropy": SMOOTH, "size": BY_SIZE, "both": BY_BOTH}[by]
    keywords = CASES[case] | {"bias": CASES["bias"]["bias"].astype(float)}
    arrays = [x.astype(np.float64) for x in (*qkv(scale=1.0), keywords.pop("bias"))]
    rng, words = np.random.default_rng(5), in_words_of_the_reference(keywords)
    weights = rng.standard_normal(arrays[0].shape)

    @jax.jit
    @partial(jax.grad, argnums=(0, 1, 2, 3))
    def gradients(*arrays):
        return (dot_product_attention(*arrays, coefficients=fit, **keywords) * weights).sum()

    with jax.enable_x64(True):
        found = [np.asarray(x) for x in gradients(*arrays)]
    for i, gradient in enumerate(found):
        step = 1e-6 * rng.standard_normal(gradient.shape)
        above, below = (
            expected(*q_k_v, fit, bias=bias, **words)
            for *q_k_v, bias in (
                [x + sign * step if i == j else x for j, x in enumerate(arrays)] for sign in (1, -1)
            )
        )
        slope = ((above - below) * weights).sum() / 2e-6
        np.testing.assert_allclose((gradient * step).sum() / 1e-6, slope, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["entropy", "size", "both"])
@pytest.mark.parametrize("case", ["additive -inf", "causal", "mask"])
@pytest.mark.usefixtures("many_blocks")
def test_second_derivatives_are_not_nan(case, by):
    fit = {"entropy": SMOOTH, "size": BY_SIZE, "both": BY_BOTH}[by]
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


@pytest.mark.parametrize("by", ["both", *(pytest.param(x, marks=SLOW) for x in ("size", "heads"))])
def test_one_program_for_any_batch_and_lengths(by):
    """As jax.export makes of jax.nn.dot_product_attention."""
    fit = {**FIT, "heads": per_head("both")[0]}[by]
    B, T, S = jax.export.symbolic_shape("b, t, s")
    shapes = ((B, T, 4, 8), (B, S, 2, 8), (B, S, 2, 8), (B, 1, T, S))
    of_all = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[:3]]
    of_all.append(jax.ShapeDtypeStruct(shapes[3], bool))

    @jax.jit
    def attend(q, k, v, mask):
        return dot_product_attention(q, k, v, mask=mask, is_causal=True, coefficients=fit)

    program = jax.export.export(attend)(*of_all)
    if by == "both":
        for lengths in ((11, 11), (5, 20)):
            arrays, mask = qkv(*lengths, N=4, K=2), np.ones((2, 1, *lengths), bool)
            mask[..., 1] = False
            exact = expected(*arrays, fit, is_causal=True, mask=mask)
            np.testing.assert_allclose(program.call(*arrays, mask), exact, atol=3e-6, rtol=1e-5)


def test_a_window_without_an_end():
    arrays, fit, window = qkv(), calibrate.identity(), np.array([3, 2**31 - 1])
    exact = expected(*arrays, fit, window=tuple(map(int, window)))
    actual = dot_product_attention(*arrays, coefficients=fit, local_window_size=window)
    np.testing.assert_allclose(actual, exact, atol=3e-6)


@pytest.mark.usefixtures("many_blocks")
def test_all_heads_at_once_as_on_an_accelerator(monkeypatch, paper):
    arrays = qkv()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    forget_attention()
    attend = partial(dot_product_attention, is_causal=True, coefficients=paper)
    actual = attend(*arrays)
    np.testing.assert_allclose(jax.vmap(attend)(*arrays), actual, atol=1e-6)
    forget_attention()
    np.testing.assert_allclose(actual, expected(*arrays, paper, is_causal=True), atol=3e-6)


@pytest.mark.parametrize("T", [pytest.param(512, marks=SLOW), 513])
def test_causal_queries_in_one_part_and_in_several(T):
    """A mask of queries alone, (B, N, T, 1), is that of all their keys."""
    assert query_blocks.QUERY_BLOCKS.few_queries == 512
    mask = np.random.default_rng(T).random((1, 1, T, 1)) < 0.7
    arrays, case = qkv(T=T, S=T, N=1, K=1, B=1, H=4), {"is_causal": True, "mask": mask}
    check(Jax(), arrays, BY_SIZE, **case)


@pytest.mark.parametrize("more", [pytest.param(0, marks=SLOW), 1])
def test_heads_at_once_and_one_by_one(more, monkeypatch):
    """As many logits as a block may have, and one more."""
    arrays = qkv(T=5, S=5, N=2, K=1, B=1)
    set_blocks(monkeypatch, query_blocks, logits=2 * 5 * 5 - more, min_rows=4)
    check(Jax(), arrays, BY_SIZE, is_causal=True)


@pytest.mark.slow
def test_the_matrix_never_exists(monkeypatch):
    """No array of the compiled program has a number of queries and of keys."""
    set_blocks(monkeypatch, query_blocks, causal_parts=2)
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
