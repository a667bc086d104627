"""What only PyTorch asks of attention; the rest is in test_attention.py."""

import numpy as np
import pytest
import reference
import torch
from attention_cases import ATTENTION_CASES, BY_BOTH, BY_SIZE, in_words_of_the_reference, qkv
from attention_cases import expected as expected_attention
from backends import Torch, set_blocks
from cases import SMOOTH
from torch.profiler import ProfilerActivity, profile
from torch_cases import normal, of_the_compiler, tensor

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.torch import adaptive_softmax, inverse_temperature
from calibrate.torch import attention as attention_module
from calibrate.torch import query_blocks as blocks_module
from calibrate.torch import scaled_dot_product_attention as attend
from calibrate.torch.fused import kernel, kernel_of_flex

BACKEND = Torch()
attend_to_case, in_words_of_torch = BACKEND.attend, BACKEND.in_own_words
CONSTANT = Fit(RuleForm.constant(0.5), (Entry((1.3,)),))
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(params=["two calls", "one block", "many blocks"])
def path(request, monkeypatch):
    BACKEND.take_path(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("fit", "calls"), [(calibrate.identity(), 1), (BY_SIZE, 1), (SMOOTH, 2), (BY_BOTH, 2)],
    ids=["identity", "log size", "polynomial", "both"],
)  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
def test_stock_attention_runs_no_more_often_than_it_must(fit, calls, masked):
    case = qkv(T=40, S=40)
    where = {"mask": np.tri(40, dtype=bool)[None, None]} if masked else {"is_causal": True}
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        attend_to_case(case, fit, **where)
    counted = {event.key: event.count for event in profiled.key_averages()}
    assert counted["aten::_scaled_dot_product_flash_attention_for_cpu"] == calls


@pytest.mark.parametrize("fit", [calibrate.identity(), BY_SIZE, CONSTANT])
def test_few_queries_go_to_stock_attention_unless_derivatives_are_asked_for(fit):
    arrays = qkv(T=1, S=300)
    tensors, _ = in_words_of_torch(arrays)

    def operations(*given):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            out = attend(*given, enable_gqa=True, coefficients=fit)
        exact = expected_attention(*arrays, fit)
        np.testing.assert_allclose(out.detach().transpose(1, 2), exact, atol=3e-6, rtol=1e-5)
        return {event.key for event in profiled.key_averages()}

    assert "aten::scaled_dot_product_attention" in operations(*tensors)
    query, *others = tensors
    assert "aten::scaled_dot_product_attention" not in operations(
        query.clone().requires_grad_(), *others
    )
    with torch.no_grad():
        assert "aten::scaled_dot_product_attention" in operations(query.requires_grad_(), *others)


def test_a_bias_reaches_beyond_the_keys_that_causality_leaves(paper):
    arrays, bias = qkv(T=3, S=11), np.linspace(-3, 3, 11, dtype=np.float32)[None, None, None]
    tensors, _ = in_words_of_torch(arrays)
    actual = attend(
        *tensors, tensor(bias), is_causal=True, enable_gqa=True, coefficients=paper
    ).transpose(1, 2)
    exact = expected_attention(*arrays, paper, bias=bias, is_causal=True)
    np.testing.assert_allclose(actual, exact, atol=3e-6, rtol=1e-5)


def test_half_precision_as_the_default_dtype(paper):
    (q, k, v), _ = in_words_of_torch(qkv(T=40, S=1024, N=1, K=1, B=1))
    exact, beta = attend(q, k, v, coefficients=paper), inverse_temperature(2.3456, paper)
    torch.set_default_dtype(torch.bfloat16)
    try:
        np.testing.assert_allclose(attend(q, k, v, coefficients=paper), exact, atol=3e-6)
        assert inverse_temperature(2.3456, paper) == beta
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("each_query", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("path")
def test_a_sink_is_an_item_without_a_value(is_causal, each_query, paper):
    q, k, v = (tensor(x, torch.float64).transpose(1, 2) for x in qkv(K=4))
    sinks = normal(4) if not each_query else normal(2, 4, 11, 1)
    z = q @ k.mT * 8**-0.5
    z = torch.cat([z, (sinks if each_query else sinks[:, None, None]).expand(2, 4, 11, 1)], -1)
    real = torch.ones(11, 12, dtype=bool)
    if is_causal:
        real[:, :11].tril_()
    for fit in (paper, BY_SIZE, BY_BOTH):
        entry = fit.only
        weights = reference.adaptive_softmax(
            z, entry.coefficients, entry.domain, fit.rule, where=np.asarray(real)
        )
        actual = attend(q, k, v, is_causal=is_causal, sinks=sinks, coefficients=fit)
        np.testing.assert_allclose(actual, tensor(weights[..., :-1]) @ v, atol=3e-6, rtol=1e-5)


@pytest.mark.usefixtures("path")
def test_dropout_comes_after_the_entropy(paper):
    q, k = normal(1, 2, 40, 8), normal(1, 2, 400, 8, seed=1)
    v = torch.ones(1, 2, 400, 1)
    torch.manual_seed(0)
    dropped = attend(q, k, v, dropout_p=0.5, coefficients=paper)
    assert dropped.std() > 0.01
    assert dropped.mean() == pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(attend(q, k, v, dropout_p=1.0, coefficients=paper), 0)


@pytest.mark.usefixtures("path")
def test_leading_axes(paper):
    q, k, v = normal(3, 2, 4, 11, 8), normal(1, 2, 4, 11, 8, seed=1), normal(2, 4, 11, 5, seed=2)
    mask = normal(3, 1, 1, 11, 11, seed=3) < 1
    mask[..., 0] = True
    sinks = normal(3, 2, 4, 1, 1, seed=4)
    for more, of_one in (({}, {}), ({"sinks": sinks}, {"sinks": sinks[2, 1]})):
        out = attend(q, k, v, mask, coefficients=paper, **more)
        assert out.shape == (3, 2, 4, 11, 5)
        one = attend(q[2, 1], k[0, 1], v[1], mask[2, 0], coefficients=paper, **of_one)
        np.testing.assert_allclose(one, out[2, 1], atol=2e-6)
    no_heads = attend(q[2, 1, 3], k[0, 1, 3], v[1, 3], mask[2, 0, 0], coefficients=paper)
    exact = attend(q, k, v, mask, coefficients=paper)[2, 1, 3]
    np.testing.assert_allclose(no_heads, exact, atol=2e-6)


ODD = [1e6, 1e38, torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("first", [39, 15], ids=["one key", "most keys"])
@pytest.mark.parametrize("masked", ["causal", "mask", "mask of all", "bias"])
@pytest.mark.usefixtures("path")
def test_odd_keys_leave_queries_that_do_not_see_them_alone(masked, first, odd, paper):
    q, k, v = (normal(1, 2, 40, 8, seed=i) for i in range(3))
    seen = torch.ones(40, 40, dtype=bool)
    seen[: 40 if masked == "mask of all" else first, first:] = False
    bias = torch.zeros(40, 40).masked_fill(~seen, -torch.inf)
    options = {"attn_mask": bias if masked == "bias" else seen}
    if masked == "causal":
        options = {"is_causal": True}
    exact = attend(*(x.double() for x in (q, k, v)), coefficients=paper, **options)
    k[:, :, first:] = odd
    actual = attend(q, k, v, coefficients=paper, **options)
    np.testing.assert_allclose(actual[:, :, :first], exact[:, :, :first], atol=1e-5)
    if odd != odd and masked != "mask of all":  # nor is it silently masked for who sees it
        assert actual[:, :, first:].isnan().all()


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.usefixtures("path")
def test_under_autocast(dtype, given, paper):
    """Inputs are cast, but for float64, as in the original; logits are not."""
    q, k, v = (normal(1, 2, 40, 8, seed=i, dtype=given) for i in range(3))
    k[..., 0] += 30
    cast = dtype if given == torch.float32 else given
    exact = attend(*(x.to(cast) for x in (q, k, v)), coefficients=paper)
    with torch.autocast("cpu", dtype):
        actual = attend(q, k, v.to(cast), coefficients=paper)
        original = torch.nn.functional.scaled_dot_product_attention(q, k, v.to(cast))
    assert actual.dtype == original.dtype == cast
    assert (actual == exact).all()


@pytest.mark.parametrize("length", [5, 64])
def test_tensors_without_numbers(length, paper):
    x = torch.zeros(2, 4, length, 8, device="meta", requires_grad=True)
    mask = torch.ones(length, length, dtype=bool, device="meta")
    out = attend(x, x, x[..., :5], mask, is_causal=True, coefficients=paper)
    assert out.is_meta
    assert out.shape == (2, 4, length, 5)
    assert torch.autograd.grad(out.sum(), x)[0].shape == adaptive_softmax(x, paper).shape


@of_the_compiler
@pytest.mark.parametrize("length", [5, 64])
def test_derivatives_without_a_fused_kernel(length):
    """Forward-mode and second ones, where the original has them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (normal(1, 2, length, 3, seed=i, dtype=torch.float64) for i in range(3))

    def loss(q):
        return (attend(q, k, v, coefficients=SMOOTH, is_causal=True) ** 2).sum()

    with sdpa_kernel(SDPBackend.MATH):
        _, forward = torch.func.jvp(torch.func.grad(loss), (q,), (k,))
        q.requires_grad_()
        (first,) = torch.autograd.grad(loss(q), q, create_graph=True)
        (reverse,) = torch.autograd.grad((first * k).sum(), q)
    torch.testing.assert_close(forward, reverse, atol=1e-12, rtol=1e-9)  # Hessians are symmetric


@pytest.mark.usefixtures("path")
def test_gradients_under_dropout_are_of_the_weights_that_were_dropped(paper):
    """Against differences: each call draws the same weights."""
    q, k, v, change = (normal(1, 2, 11, 8, seed=i, dtype=torch.float64) for i in range(4))

    def loss(q):
        torch.manual_seed(0)
        return (attend(q, k, v, dropout_p=0.5, coefficients=SMOOTH) ** 2).sum()

    (gradient,) = torch.autograd.grad(loss(q.requires_grad_()), q)
    with torch.no_grad():
        difference = (loss(q + 1e-5 * change) - loss(q - 1e-5 * change)) / 2e-5
    torch.testing.assert_close((gradient * change).sum(), difference, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("fit", [SMOOTH, BY_SIZE, BY_BOTH], ids=["polynomial", "log size", "both"])
def test_both_sides_of_each_bound(fit, monkeypatch):
    """32 queries, with which blocks end; 64 keys, of which a typical one is; rows of a block."""
    assert (blocks_module.QUERY_BLOCKS.few_queries, attention_module.TYPICAL_KEYS) == (32, 64)
    sizes = [(T, S) for T in (32, 33) for S in (1, 2, 32, 33, 63, 64, 65)]
    for T, S, is_causal in (*((*size, False) for size in sizes), (33, 33, True), (65, 65, True)):
        arrays = qkv(T=T, S=S, B=1)
        exact = expected_attention(*arrays, fit, is_causal=is_causal)
        actual = attend_to_case(arrays, fit, is_causal=is_causal)
        np.testing.assert_allclose(actual, exact, atol=1e-5, rtol=1e-5)
    set_blocks(monkeypatch, blocks_module, logits=1)
    for T in (blocks_module.QUERY_BLOCKS.min_rows, blocks_module.QUERY_BLOCKS.min_rows + 1):
        arrays = qkv(T=T, S=20, B=1)
        exact = expected_attention(*arrays, fit, is_causal=True)
        actual = attend_to_case(arrays, fit, is_causal=True)
        np.testing.assert_allclose(actual, exact, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [3, 40])
def test_a_mask_wider_than_the_logits_is_refused_by_name(length, paper):
    q, mask = normal(1, 2, length, 8), torch.zeros(length, length, dtype=torch.float64)
    for given, cast in (("float32", False), ("bfloat16", True)):
        message = f"attn_mask .*torch.float64 .*query .*torch.{given};"
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=cast)
        with autocast, pytest.raises(ValueError, match=message):
            attend(q, q, q, mask, coefficients=paper)
    exact = attend(q, q, q, mask.float(), coefficients=paper)
    for dtype in HALF:
        np.testing.assert_allclose(attend(q, q, q, mask.to(dtype), coefficients=paper), exact)
    wide = attend(*[q.double()] * 3, mask, coefficients=paper)
    np.testing.assert_allclose(wide, exact, atol=1e-5)


def test_gradients_in_blocks_keep_no_matrix(paper, monkeypatch):
    set_blocks(monkeypatch, blocks_module, logits=1 << 12)
    q, k, v = (normal(1, 1, 256, 4, seed=i).requires_grad_() for i in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        out = attend(q, k, v, torch.zeros(256), coefficients=paper)
    assert out.requires_grad
    assert sum(kept) < 256 * 256 / 2


def test_the_private_kernel_is_as_it_was():
    """If this fails, PyTorch has changed it: attention goes on in blocks until fused.py is new."""
    (q, k, v), _ = in_words_of_torch(qkv(B=1))
    for mask, is_causal in ((None, False), (None, True), (torch.rand(1, 4, 11, 11) < 0.7, False)):
        stock = kernel(q, k, v, mask, is_causal, 0.3)
        assert stock is not None
        out, log_normaliser = stock(q, k, v)
        z = 0.3 * q @ k.repeat_interleave(2, 1).mT
        real = torch.ones(11, 11, dtype=bool).tril() if is_causal else mask
        z = z if real is None else z.masked_fill(~real, -torch.inf)
        np.testing.assert_allclose(log_normaliser, z.logsumexp(-1), atol=1e-6, rtol=1e-6)
        exact = z.softmax(-1) @ v.repeat_interleave(2, 1)
        np.testing.assert_allclose(out, exact, atol=1e-6)


def test_without_the_private_kernel_it_goes_on_in_blocks(monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", object())
    assert kernel(*(tensor(x) for x in qkv()), None, True, 1.0) is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "mask of one row", "causal window"])
def test_the_kernel_of_accelerators(case, paper, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    def of_flex(q, k, v, mask, is_causal, scale):
        return kernel_of_flex(q, k, mask, is_causal, scale, flex_attention)

    monkeypatch.setattr(attention_module, "kernel", of_flex)
    set_blocks(monkeypatch, blocks_module, few_queries=0)
    arrays = qkv(H=16)
    words = in_words_of_the_reference(ATTENTION_CASES[case])
    for fit in (paper, BY_SIZE, BY_BOTH):
        actual = attend_to_case(arrays, fit, **ATTENTION_CASES[case])
        exact = expected_attention(*arrays, fit, **words)
        np.testing.assert_allclose(actual, exact, atol=3e-6, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "causal", "window"])
def test_on_a_gpu(case, dtype, paper):
    words = in_words_of_the_reference(ATTENTION_CASES[case])
    arrays = qkv(T=300, S=300, H=32)
    tensors, options = in_words_of_torch(arrays, **ATTENTION_CASES[case])
    tensors = [x.to("cuda", dtype) for x in tensors]
    options = {name: x.cuda() if torch.is_tensor(x) else x for name, x in options.items()}
    actual = attend(*tensors, coefficients=paper, **options)
    exact = expected_attention(*(x.double().cpu().transpose(1, 2) for x in tensors), paper, **words)
    atol = 2e-5 if dtype == torch.float32 else 0.1
    np.testing.assert_allclose(actual.double().cpu().transpose(1, 2), exact, atol=atol)
    logits = normal(64, 512).to("cuda", dtype)
    probs = adaptive_softmax(logits, paper).double().cpu()
    exact = adaptive_softmax(logits.double().cpu(), paper)
    np.testing.assert_allclose(probs, exact, rtol=0.02, atol=1e-6)
