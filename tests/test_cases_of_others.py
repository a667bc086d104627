"""The cases that JAX's softmax and attention tests and Flax's attention tests cover, on ours.

Read were, of JAX (August 2026), tests/nn_test.py, and what concerns softmax in
tests/lax_scipy_special_functions_test.py and tests/xla_metadata_test.py; of Flax (July 2026),
tests/nnx/nn/attention_test.py and tests/linen/linen_attention_test.py. No line of theirs is here.
Tests of JAX's cases without a file are in this one, of Flax's in test_cases_of_flax.py; `x.py: y`
is a test in tests/test_x.py. Names are shortened.

| case of theirs                          | ours, or "refused" and why |
| --------------------------------------- | --- |
| JAX: softmax                            | |
| SoftmaxEmptyArray                       | any_shape_and_axis |
| SoftmaxEmptyMask                        | softmax.py: rows_without_items |
| SoftmaxWhereMask, WhereGrad, Grad       | a_mask_gives_softmax_of_the_rest, with 2nd derivatives |
| SoftmaxGradResiduals                    | softmax.py: gradients_keep_one_array |
| SoftmaxGradFlag                         | refused: jax_softmax_custom_jvp changes jax.nn alone |
| log_softmax, in all of these            | refused: there is none; take the logarithm |
| DtypeMatchesInput                       | softmax.py: half_precision_is_within_2_ulp |
| EluMemory, HardTanhMemory               | tracing_allocates_nothing |
| CustomJVPLeak, CustomJVPLeak2           | no_tracer_leaks |
| LogMeanExp (axes, masks, keepdims)      | entropy_of_any_shape_axis_and_mask; refused: keepdims, |
|                                         | which our entropy does not have |
| scipy.special.softmax                   | any_shape_and_axis |
| xla_metadata: softmax                   | metadata_reach_the_program |
| JAX: attention                          | |
| DotProductAttention (groups, vmap)      | groups_in_half_precision |
| the same with return_residual           | refused: attention.py: what_does_not_match_is_refused |
| DotProductAttentionMask                 | masks_in_half_precision; attention.py: jax_agrees_... |
| Float64MaskDebugInfs                    | float64_with_a_mask_under_debug_infs |
| BiasGradient                            | gradient_of_a_bias; cuDNN's own refusal has no like |
| localWindowSizeWithoutMask              | attention.py: jax_agrees_with_the_reference |
| implementation="cudnn"                  | refused: attention.py: what_does_not_match_is_refused |
| ScaledMatmul, ScaledDotGeneral, other   | refused: neither softmax nor attention |
| activations, standardize, initializers  | |
| Flax: nnx                               | |
| basic, KVFeatures                       | widths_of_inputs_and_outputs_may_differ |
| sow_attention_weights                   | only_the_layers_that_are_asked_sow |
| autoregressive_decode_with_x64          | decoding_in_float64 |
| keep_rngs                               | dropout_keys_come_from_the_module_or_the_call |
| causal_mask_equivalence                 | causality_and_padding_with_two_batch_axes |
| LinenConsistency                        | nnx_and_linen_agree |
| GQADotProductAttention                  | grouped_heads_in_nnx; flax.py: shapes_that_do_... |
| DotProductAttentionValidation           | flax.py: shapes_that_do_not_match_are_refused |
| Flax: linen                             | |
| self_attention, kv_args, encoder_...    | any_batch_axes_and_lengths |
| mask_warning, out_initializers          | refused: warnings and initial values of modules, |
| alias_*, inputs_kv                      | and their names, which our function does not see |
| dtype_infer (complex64)                 | refused: flax.py: complex_arrays_are_refused |
| dropout, explicit and disabled          | dropout_keys_come_from_linens_rngs_or_the_call; |
|                                         | flax.py: dropout_comes_after_the_entropy |
| causal_mask_1d                          | refused: make_causal_mask is Flax's; used below |
| decoding                                | decoding_in_linen |
| receptive_field_1d                      | gradients_reach_earlier_tokens_only |
| sow_attention_weights, decode_with_x64  | as of nnx |
| mixed_precision                         | flax.py: softmax_in_float32_can_be_forced |
| precision_and_einsum_override           | refused: flax.py: an_einsum_of_your_own_is_refused |
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from cases import FITS
from jax.experimental.xla_metadata import set_xla_metadata
from jax.test_util import check_grads

import calibrate
from calibrate.attention import dot_product_attention
from calibrate.maths import reference

pytestmark = pytest.mark.slow
IDENTITY, BY_SIZE, BY_BOTH = calibrate.identity(), FITS["log size"], FITS["entropy and size"]
KINDS = {name: FITS[name] for name in ("clamp", "falling, low ceiling", "both, low ceiling")}
ROW, REAL = np.array([5.5, 1.3, -4.2, 0.9]), np.array([True, False, True, True])
SHAPES = [(), (4,), (3, 4), (3, 1), (1, 4), (2, 1, 4), (2, 3, 4), (0,), (0, 4), (3, 0)]


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def softmax_under(fit):
    return lambda z, **options: calibrate.adaptive_softmax(z, fit, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_any_shape_and_axis(dtype, paper):
    for shape in SHAPES:
        for axis in (None, *range(-1 if shape else 0, len(shape))):
            z = normal(1, *shape, dtype=dtype)
            exact = np.asarray(z, np.float64)
            expected = scipy.special.softmax(exact, axis) if z.size else exact
            np.testing.assert_allclose(
                np.asarray(calibrate.adaptive_softmax(z, IDENTITY, axis), float),
                expected,
                rtol=2 * float(jnp.finfo(dtype).eps),
                atol=1e-7,
            )
            for fit in (paper, BY_SIZE, BY_BOTH):
                probs = calibrate.adaptive_softmax(z, fit, axis)
                assert (probs.shape, probs.dtype) == (z.shape, z.dtype)
                total = np.asarray(probs, float).sum(axis)
                np.testing.assert_allclose(total, np.asarray(expected).sum(axis), atol=2e-2)


@pytest.mark.parametrize("fit", KINDS.values(), ids=KINDS)
def test_a_mask_gives_softmax_of_the_rest(fit):
    softmax = softmax_under(fit)
    with jax.enable_x64():
        masked = np.asarray(softmax(ROW, where=REAL))
        np.testing.assert_allclose(masked[REAL], softmax(ROW[REAL]), rtol=1e-12)
        assert masked.sum() == pytest.approx(1)
        for where in (None, REAL):
            check_grads(lambda z, w=where: softmax(z, where=w), (ROW,), order=2, rtol=1e-5)
    far = jnp.array([36.0, 10_000.0])
    gradient = jax.grad(lambda z: softmax(z, where=far < 1_000)[0])(far)
    np.testing.assert_array_equal(gradient, [0, 0])


@pytest.mark.parametrize("fit", KINDS.values(), ids=KINDS)
def test_tracing_allocates_nothing(fit):
    shape = (10**12,)
    traced = jax.eval_shape(softmax_under(fit), jax.ShapeDtypeStruct(shape, "float32"))
    assert traced.shape == shape
    jaxpr = jax.make_jaxpr(lambda: softmax_under(fit)(jnp.ones(shape)))()
    assert "1000000000000" in str(jaxpr)


@pytest.mark.parametrize("fit", KINDS.values(), ids=KINDS)
def test_no_tracer_leaks(fit):
    def twice(a):
        def step(z, _):
            return softmax_under(fit)(z * a), None

        return jax.lax.scan(step, jnp.asarray(ROW), None, length=2)[0]

    expected = softmax_under(fit)(2 * softmax_under(fit)(2 * jnp.asarray(ROW)))
    with jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(twice)(2.0), expected, rtol=1e-5)
        assert np.isfinite(jax.jit(jax.jacfwd(twice))(2.0)).all()
        assert np.isfinite(jax.jit(jax.jacrev(twice))(2.0)).all()


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_entropy_of_any_shape_axis_and_mask(shape):
    rng = np.random.default_rng(len(shape))
    for axis, masked in itertools.product(range(len(shape)), (False, True)):
        z = rng.uniform(-1, 1, shape).astype(np.float32)
        where = rng.random(shape) < 0.5 if masked else None
        expected = reference.entropy(z, axis, where)
        np.testing.assert_allclose(calibrate.entropy(z, axis, where), expected, atol=1e-6)


def test_metadata_reach_the_program(paper):
    @jax.jit
    def tagged(z):
        with set_xla_metadata(a="b"):
            return calibrate.adaptive_softmax(z, paper)

    assert 'mhlo.frontend_attributes = {a = "b"}' in tagged.lower(jnp.arange(5.0)).as_text()


def with_gradients(attend, arrays, seed=9):
    """The output, and the gradients of all arrays, in float64."""
    out, backward = jax.vjp(attend, *arrays)
    gradient = normal(seed, *out.shape, dtype=out.dtype)
    return [np.asarray(x, np.float64) for x in (out, *backward(gradient))]


def check_close(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mapped", [False, True], ids=["batch", "vmap"])
def test_groups_in_half_precision(dtype, groups, mapped, paper):
    """Forward and backward as in float32; identity as the original on repeated keys."""
    q = normal(0, 2, 128, 4, 32, dtype=dtype)
    k, v = (normal(seed, 2, 128, 4 // groups, 32, dtype=dtype) for seed in (1, 2))
    wide = [x.astype(np.float32) for x in (q, k, v)]

    def repeated(q, k, v):
        k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v)

    for fit in (IDENTITY, paper, BY_SIZE, BY_BOTH):
        attend = partial(dot_product_attention, coefficients=fit)
        exact = with_gradients(repeated if fit is IDENTITY else attend, wide)
        check_close(with_gradients(jax.vmap(attend) if mapped else attend, (q, k, v)), exact, 0.02)


MASKS = ["bias", "causal", "padding", "custom", "causal padding", "custom padding", "bias causal",
         "causal window"]  # fmt: skip


@pytest.mark.parametrize("masks", MASKS)
def test_masks_in_half_precision(masks, paper):
    B, T, N, H = 2, 128, 4, 32
    options = {"is_causal": "causal" in masks}
    if "padding" in masks:
        options["query_seq_lengths"] = jnp.array([T // 2, T // 4], np.int32)
        options["key_value_seq_lengths"] = jnp.array([T // 4, T // 2], np.int32)
    if "custom" in masks:
        options["mask"] = jnp.tril(jnp.ones((1, 1, T, T), bool))
    if "window" in masks:
        options["local_window_size"] = (3, 2)
    arrays = [normal(seed, B, T, N, H, dtype="bfloat16") for seed in range(3)]
    if "bias" in masks:
        arrays.append(normal(3, 1, N, T, T, dtype="bfloat16"))
    wide = [x.astype(np.float32) for x in arrays]
    for fit in (IDENTITY, paper, BY_SIZE, BY_BOTH):
        attend = partial(dot_product_attention, coefficients=fit, **options)
        original = partial(jax.nn.dot_product_attention, **options)
        exact = with_gradients(original if fit is IDENTITY else attend, wide)
        check_close(with_gradients(attend, arrays), exact, 0.02)


def test_float64_with_a_mask_under_debug_infs(paper):
    with jax.enable_x64(), jax.debug_infs(True):
        q, k = jnp.zeros((5, 6, 11)), jnp.zeros((7, 3, 11))
        for fit in (IDENTITY, paper, BY_SIZE, BY_BOTH):
            out = dot_product_attention(q, k, k, mask=jnp.arange(7) <= 3, coefficients=fit)
            assert out.dtype == np.float64
            np.testing.assert_array_equal(out, np.zeros((5, 6, 11)))


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("mapped", [False, True], ids=["batch", "vmap"])
def test_gradient_of_a_bias(batch, mapped, paper):
    x = normal(0, batch, 32, 4, 8, dtype="bfloat16")
    bias = normal(1, batch, 4, 32, 32, dtype="bfloat16")
    wide = [a.astype(np.float32) for a in (x, bias)]

    def attend(x, bias, attention):
        return attention(x, x, x, bias=bias, mask=jnp.ones((1, 1, 32), bool))

    def original(x, bias):
        return attend(x, bias, jax.nn.dot_product_attention)

    for fit in (IDENTITY, paper, BY_SIZE, BY_BOTH):
        ours = partial(attend, attention=partial(dot_product_attention, coefficients=fit))
        exact = with_gradients(original if fit is IDENTITY else ours, wide)
        actual = with_gradients(jax.jit(jax.vmap(ours) if mapped else ours), (x, bias))
        check_close(actual, exact, 0.02)
