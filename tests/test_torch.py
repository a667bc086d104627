"""What only PyTorch asks of softmax and attention; the rest is in tests of these names."""

import itertools
import subprocess
import sys
from dataclasses import replace
from functools import partial
from inspect import signature

import numpy as np
import pytest
import reference
import torch
from attention_cases import ATTENTION_CASES, BY_BOTH, BY_SIZE, in_words_of_the_reference, qkv
from attention_cases import expected as expected_attention
from backends import Torch, set_blocks
from cases import FITS, HEAD_RULES, SMOOTH, SMOOTH_FITS, per_head
from torch.profiler import ProfilerActivity, profile

import calibrate
from calibrate.core.rule import RuleForm, beta_of, slope_of
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.torch import adaptive_softmax, entropy, inverse_temperature
from calibrate.torch import attention as attention_module
from calibrate.torch import query_blocks as blocks_module
from calibrate.torch import scaled_dot_product_attention as attend
from calibrate.torch import softmax_passes as softmax_module
from calibrate.torch.fused import compiled_flex_attention, kernel, kernel_of_flex
from calibrate.torch.softmax_passes import FEW_ROWS

BACKEND = Torch()
CONSTANT = Fit(RuleForm.constant(0.5), (Entry((1.3,)),))
attend_to_case, in_words_of_torch = BACKEND.attend, BACKEND.in_own_words
HALF = [torch.float16, torch.bfloat16]
# PyTorch's compiler warns of its own inside.
of_the_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def tensor(array, dtype=None):
    return None if array is None else torch.tensor(np.asarray(array), dtype=dtype)


def normal(*shape, scale=2.0, seed=0, dtype=torch.float32):
    return tensor(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


@pytest.mark.parametrize("kind", HEAD_RULES)
def test_a_fit_that_was_used_in_float32_is_exact_in_float64(kind):
    used, fresh = per_head(kind)[0], per_head(kind)[0]
    q = normal(1, 4, 40, 8, dtype=torch.float64)
    for apply in (adaptive_softmax, lambda x, fit: attend(x, x, x, coefficients=fit)):
        apply(q.float(), used)
        assert torch.equal(apply(q, used), apply(q, fresh))


def test_what_the_original_takes(paper):
    assert adaptive_softmax(torch.tensor(3.0), paper) == 1
    assert entropy(torch.zeros(3, 0)).shape == (3,)
    assert inverse_temperature(3.0, paper) == inverse_temperature(torch.tensor(3.0), paper) > 1
    logits = normal(8, 64)
    before = logits.clone()
    wide = adaptive_softmax(logits.half(), paper, dtype=torch.float32)
    assert wide.dtype == torch.float32
    np.testing.assert_allclose(wide, adaptive_softmax(logits.half().float(), paper))
    view = adaptive_softmax(logits.T, paper, 0)
    np.testing.assert_allclose(view, adaptive_softmax(logits, paper).T, rtol=1e-5)
    assert (logits == before).all()
    assert adaptive_softmax(torch.arange(5), paper, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(TypeError, match="logits .*torch.int64"):
        adaptive_softmax(torch.arange(5), paper)
    with pytest.raises(TypeError, match="where .*torch.float32"):
        adaptive_softmax(logits, paper, where=torch.ones(64))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "layout", [torch.strided, pytest.param(torch.jagged, marks=pytest.mark.slow)]
)
def test_nested_tensors_and_other_arrays_are_refused(layout, paper):
    nested = torch.nested.nested_tensor([normal(3, 4), normal(5, 4)], layout=layout)
    for given in (nested, np.ones((3, 4), np.float32)):
        for call in (partial(adaptive_softmax, coefficients=paper), entropy):
            with pytest.raises(TypeError, match="where="):
                call(given)
        with pytest.raises(TypeError, match="attn_mask"):
            attend(given, given, given, coefficients=paper)


@pytest.mark.parametrize("fit", SMOOTH_FITS.values(), ids=SMOOTH_FITS)
def test_first_and_second_derivatives(fit):
    z = normal(3, 7, scale=1.0, dtype=torch.float64).requires_grad_()
    for function in (lambda z: adaptive_softmax(z, fit), entropy):
        assert torch.autograd.gradcheck(function, z)
        assert torch.autograd.gradgradcheck(function, z)
    masked = z.detach().clone()
    masked[:, 2] = -torch.inf
    masked.requires_grad_()
    (first,) = torch.autograd.grad(
        (adaptive_softmax(masked, fit) ** 2).sum(), masked, create_graph=True
    )
    (second,) = torch.autograd.grad((first**2).sum(), masked)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fit", SMOOTH_FITS.values(), ids=SMOOTH_FITS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_keep_what_the_caller_has(masked, fit, dtype):
    """As the original keeps its result: that, the logits, and beside them three numbers a row."""
    logits, where = normal(16, 64, dtype=dtype).requires_grad_(), torch.arange(64) < 50
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        probs = adaptive_softmax(logits, fit, where=where if masked else None)
    given = {x.data_ptr() for x in (logits, probs, where)}
    assert len(given & {x.data_ptr() for x in kept}) == 2 + masked
    assert sum(x.numel() for x in kept if x.data_ptr() not in given) <= 3 * 16


@pytest.mark.parametrize("fit", [fit for fit in FITS.values() if fit.rule.by_entropy])
def test_the_slope_of_beta_is_that_of_autograd(fit):
    entry, H = fit.only, torch.linspace(0.003, 9, 500, dtype=torch.float64, requires_grad=True)
    for log_n in (0.1, 3.0, 12.0, torch.linspace(0, 14, 500, dtype=torch.float64)):
        beta = beta_of(H, log_n, entry.coefficients, entry.domain, fit.rule, torch)
        (exact,) = torch.autograd.grad(beta.sum(), H) if beta.requires_grad else (0 * H,)
        slope = slope_of(H, log_n, beta, entry.coefficients, entry.domain, fit.rule, torch)
        torch.testing.assert_close(torch.as_tensor(slope), exact, rtol=1e-9, atol=1e-12)


def test_the_softmax_of_jax_names_that_of_torch():
    with pytest.raises(TypeError, match=r"calibrate\.torch\.adaptive_softmax"):
        calibrate.adaptive_softmax(normal(3, 4), calibrate.load("paper"))


@pytest.mark.parametrize("mask", ["none", "of items", "of rows", "of each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("kind", SMOOTH_FITS)
def test_blocks_of_rows_are_as_the_whole(kind, heads, dtype, mask, monkeypatch):
    """Five rows in blocks of two; a query's items are masked in some blocks and not in others."""
    fit = per_head(kind)[0] if heads else SMOOTH_FITS[kind]
    z, direction = (normal(2, 4, 5, 30, seed=i, dtype=dtype) for i in range(2))
    z[:, :, 0, 3:5] = -torch.inf
    where = {
        "none": None,
        "of items": torch.arange(30) < 20,
        "of rows": torch.arange(5)[:, None] < 3,
        "of each": torch.rand(2, 1, 5, 30, generator=torch.Generator().manual_seed(0)) < 0.7,
    }[mask]
    results = []
    for many in (1 << 21, 1):
        set_blocks(monkeypatch, softmax_module, "ROW_BLOCKS", items=2 * 2 * 4 * 30, many=many)
        logits = z.clone().requires_grad_()
        with torch.no_grad():
            alone = adaptive_softmax(logits, fit, where=where)
        probs = adaptive_softmax(logits, fit, where=where)
        assert torch.equal(alone, probs)
        results.append((probs, *torch.autograd.grad(probs, logits, direction)))
    tolerance = {} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(*results, equal_nan=True, **tolerance)


@pytest.mark.parametrize("kind", SMOOTH_FITS)
def test_many_rows_are_as_few(kind):
    few = normal(2, 4, 5, 30)
    copies = 1 + FEW_ROWS // few[..., 0].numel()
    for fit in (SMOOTH_FITS[kind], per_head(kind)[0]):
        results = []
        for z in (few, few.repeat(copies, 1, 1, 1)):
            z.requires_grad_()
            probs = adaptive_softmax(z, fit)
            (gradient,) = torch.autograd.grad((probs**2).sum(), z)
            results.append((probs[-2:], gradient[-2:]))
        torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


@of_the_compiler
@pytest.mark.parametrize("kind", SMOOTH_FITS)
def test_transforms_of_torch_func(kind):
    fit, (heads, _) = SMOOTH_FITS[kind], per_head(kind)
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-9)
    z = normal(3, 7, scale=1.0, dtype=torch.float64).requires_grad_()
    where = torch.arange(7) != 2
    for options in ({}, {"where": where}, {"dim": 0}, {"entropy_gradient": False}):
        softmax = partial(adaptive_softmax, coefficients=fit, **options)
        close(torch.func.jacfwd(softmax)(z), torch.func.jacrev(softmax)(z))
    square = lambda z: (adaptive_softmax(z, fit) ** 2).sum()  # noqa: E731
    close(torch.func.hessian(square)(z), torch.func.jacrev(torch.func.jacrev(square))(z))
    for row in (z.detach(), z.detach().masked_fill(~where, -torch.inf)):
        softmax = partial(adaptive_softmax, coefficients=fit)
        close(torch.func.vmap(softmax)(row), softmax(row))
        mapped = torch.func.vmap(torch.func.jacrev(softmax))(row)
        whole = torch.autograd.functional.jacobian(softmax, row)
        close(mapped, torch.einsum("ijik->ijk", whole))
    softmax = partial(adaptive_softmax, coefficients=heads)
    z = normal(4, 2, 6, dtype=torch.float64)
    close(torch.func.jacfwd(softmax)(z), torch.func.jacrev(softmax)(z))


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_transforms_take_the_gradient_of_entropy_or_leave_it_out(entropy_gradient, make_fit):
    options = {"coefficients": make_fit(), "entropy_gradient": entropy_gradient}
    square = lambda z: (adaptive_softmax(z, **options) ** 2).sum()  # noqa: E731
    z = normal(3, 7, scale=1.0, dtype=torch.float64).requires_grad_()
    (own,) = torch.autograd.grad(square(z), z)
    torch.testing.assert_close(torch.func.grad(square)(z), own)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("fit", SMOOTH_FITS.values(), ids=SMOOTH_FITS)
def test_what_looks_at_operations_sees_them(fit):
    softmax = partial(adaptive_softmax, coefficients=fit)
    z = normal(3, 7, scale=1.0, dtype=torch.float64)
    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    traced = torch.jit.trace(lambda z: softmax(z), z), make_fx(softmax)(z)
    for trace in traced:
        torch.testing.assert_close(trace(2 * z), softmax(2 * z))
    with torch._subclasses.FakeTensorMode() as mode:
        assert softmax(mode.from_tensor(z)).shape == z.shape
    z.requires_grad_()
    jacobian = torch.autograd.functional.jacobian(softmax, z)
    one_by_one = torch.autograd.functional.jacobian(softmax, z, vectorize=True)
    torch.testing.assert_close(one_by_one, jacobian)
    square = lambda z: (softmax(z) ** 2).sum()  # noqa: E731
    hessian = torch.autograd.functional.hessian(square, z)
    vectorized = torch.autograd.functional.hessian(square, z, vectorize=True)
    torch.testing.assert_close(vectorized, hessian)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(z, torch.ones_like(z).cumsum(1))
        (gradient,) = torch.autograd.grad(square(dual), dual)
        tangent = torch.autograd.forward_ad.unpack_dual(gradient).tangent
    torch.testing.assert_close(tangent, (hessian * torch.arange(1.0, 8)).sum((2, 3)))


def same_compiled(function, shapes, **options):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, **options)
    for shape in shapes:
        z, results = normal(*shape).requires_grad_(), []
        for softmax in (function, compiled):
            probs = softmax(z)
            results.append((probs, *torch.autograd.grad((probs**2).sum(), z)))
        torch.testing.assert_close(*results, atol=1e-6, rtol=1e-4)


# Tracing the graph is quick; generating code for it is not.
backends = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


@of_the_compiler
@backends
@pytest.mark.parametrize(
    "kind", ["paper", pytest.param("by_size", marks=pytest.mark.slow), "by_both"]
)
@pytest.mark.slow
def test_compiled_in_one_graph(kind, backend, request):
    fit, where = request.getfixturevalue(kind), torch.arange(40) < 30
    same_compiled(lambda z: adaptive_softmax(z, fit, where=where), [(6, 40)], backend=backend)


class AnyLength(torch.nn.Module):
    def __init__(self, fit, is_causal):
        super().__init__()
        self.options = {"coefficients": fit, "is_causal": is_causal}

    def forward(self, q, k, v, mask=None):
        return attend(q, k, v, mask, enable_gqa=True, **self.options)


@of_the_compiler
@pytest.mark.parametrize("has_mask", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fit", [BY_BOTH, pytest.param(SMOOTH, marks=pytest.mark.slow)], ids=["both", "polynomial"]
)
@pytest.mark.parametrize("length", [pytest.param(8, marks=pytest.mark.slow), 40])
def test_one_exported_program_for_any_batch_and_lengths(has_mask, fit, length):
    """With a mask, and causal: from few queries and from many; as PyTorch's own attention."""
    B, T, S = (torch.export.Dim(name, max=4096) for name in "bts")
    module = AnyLength(fit, is_causal=not has_mask)

    def inputs(b, t, s):
        mask = [torch.arange(s).expand(b, 1, t, s) != 1] if has_mask else []
        return normal(b, 4, t, 8), normal(b, 2, s, 8, seed=1), normal(b, 2, s, 8, seed=2), *mask

    axes = [{0: B, 2: T}, {0: B, 2: S}, {0: B, 2: S}, {0: B, 2: T, 3: S}][: 3 + has_mask]
    program = torch.export.export(module, inputs(2, length, 50), dynamic_shapes=tuple(axes))
    for sizes in ((3, 35, 20), (2, 5, 70)):
        given = inputs(*sizes)
        torch.testing.assert_close(program.module()(*given), module(*given), atol=1e-5, rtol=1e-4)


@of_the_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["both", "polynomial"])
def test_two_layers_compile_for_any_length(kind):
    """Numbers of the fit are inputs then, which both layers find."""
    heads, _ = per_head(kind)
    same_compiled(
        lambda z: adaptive_softmax(adaptive_softmax(z, heads), SMOOTH_FITS[kind]),
        [(4, 3, 7), (4, 3, 12)], dynamic=True, backend="aot_eager",
    )  # fmt: skip


class Layer(torch.nn.Module):
    """Softmax and attention with a fit of its own."""

    def __init__(self, fit):
        super().__init__()
        self.fit, self.weight = fit, torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        q = self.weight * x
        probs = adaptive_softmax(q @ x.mT, self.fit)
        return probs @ x + attend(q, x, x, is_causal=True, coefficients=self.fit)


def of_layers(kind, heads, n):
    """A fit of n layers but the second, all different; the third of a fit per head names fewer."""
    rule, one, two = HEAD_RULES[kind]
    entries = []
    for i in {*range(n)} - {1}:
        for head, of in ((0, one), (2, two))[: 1 if i == 2 or not heads else 2]:
            powers = tuple(x + 0.01 * i for x in of.coefficients)
            entry = replace(of, coefficients=powers, check=(), layer=i)
            entries.append(replace(entry, head=head if heads else None))
    return Fit(rule, tuple(entries))


LAYERED = [("both", True, None)] + [
    pytest.param(kind, heads, dynamic, marks=pytest.mark.slow)
    for kind in HEAD_RULES for heads in (False, True) for dynamic in (None, True, False)
    if (kind, heads, dynamic) != ("both", True, None)
]  # fmt: skip


@of_the_compiler
@pytest.mark.parametrize(("kind", "heads", "dynamic"), LAYERED)
@pytest.mark.slow
def test_compiled_layers_of_a_fit_share_a_graph(kind, heads, dynamic):
    """Numbers of a fit are inputs; layers that it does not name, plain attention, have another."""
    torch.compiler.reset()
    graphs, fit, x = [], of_layers(kind, heads, 12), normal(2, 4, 40, 8, scale=1.0)

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    for i in range(12):
        layer, results = Layer(fit.layer(i)), []
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=keep)
        for function in (layer, compiled):
            out = function(x)
            results.append((out, *torch.autograd.grad((out**2).sum(), layer.weight)))
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    assert len(graphs) == 2


@pytest.mark.slow
@of_the_compiler
@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_the_numbers_of_its_fit(strict):
    x = normal(2, 4, 40, 8, scale=1.0)
    for kind in SMOOTH_FITS:
        for fit in (SMOOTH_FITS[kind], per_head(kind)[0]):
            layer = Layer(fit)
            program = torch.export.export(layer, (x,), strict=strict).module()
            torch.testing.assert_close(program(x), layer(x))


def run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_loads_no_other_framework(tmp_path):
    others = {"jax", "transformers", "scipy", "sklearn", "matplotlib", "typer", "flax"}
    others |= {"torch._dynamo"}  # as long to load as PyTorch
    loaded = f"import sys; print(sorted({others} & set(sys.modules)))"
    work = "calibrate.torch.adaptive_softmax(torch.zeros(3), calibrate.load('paper'))"
    assert run(f"import calibrate, torch, calibrate.torch; {work}; {loaded}", tmp_path) == "[]"


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_says_what_to_install(module, tmp_path):
    without = f"sys.modules['torch'] = types.ModuleType('torch'); sys.modules[{module!r}] = None"
    message = run(f"import sys, types; {without}; import calibrate.{module}", tmp_path)
    assert message.startswith(f"ImportError: calibrate.{module} needs PyTorch")
    assert message.endswith(f": pip install -e '.[{module}]' in a clone of calibrate")


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


def test_logits_on_another_device_than_the_default(paper):
    """Multiplied by a beta of another device, they stayed as they were."""
    z = torch.linspace(0, 3, 64).expand(5, 64)
    exact, H = adaptive_softmax(z, paper), entropy(z)
    with torch.device("meta"):
        assert torch.equal(adaptive_softmax(z, paper), exact)
        assert inverse_temperature(H, paper).device == z.device


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


@pytest.mark.slow
@pytest.mark.skipif(
    "isolate_recompiles" not in signature(torch.compile).parameters, reason="needs PyTorch 2.13"
)
def test_variants_of_the_accelerators_kernel_do_not_count_for_one_another():
    """PyTorch would go on without its compiler after so many; here after one of each."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    q = torch.randn(1, 2, 16, 16)
    limits = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        for dtype in (*dtypes, *dtypes):
            compiled_flex_attention(("test", dtype), "eager")(*[q.to(dtype)] * 3)
        shared = compiled_flex_attention(("test", "of all"), "eager")
        shared(q, q, q)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            shared(*[q.double()] * 3)


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


@pytest.mark.slow
@of_the_compiler
@backends
@pytest.mark.parametrize(
    ("case", "kind"),
    [("plain", "paper"), ("causal", "paper"), ("causal", "by_both"), ("padding", "paper"),
     ("padding", "by_both")],
)  # fmt: skip
def test_attention_compiled_in_one_graph(case, kind, backend, request):
    """Padding may hold anything."""
    torch.compiler.reset()
    (q, k, v), options = in_words_of_torch(qkv(T=64, S=64, K=4))
    if case == "causal":
        options |= {"is_causal": True, "scale": -0.3}
    elif case == "padding":
        k[:, :, 50:] = torch.nan
        options["attn_mask"] = torch.arange(64) < 50
    function = partial(attend, coefficients=request.getfixturevalue(kind), **options)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for arguments in ((q, k, v), (q[:, :, :5], k, v)):  # two calls, and a block
        fast = compiled(*arguments)
        assert fast.isfinite().all()
        np.testing.assert_allclose(fast, function(*arguments), atol=3e-6)


def graphs_of(function, sizes, dynamic, masked):
    """How many graphs serve all of these numbers (queries, keys)."""
    torch.compiler.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=keep)
    for T, S in sizes:
        q, (k, v) = normal(2, 4, T, 8), normal(2, 2, 4, S, 8, seed=1)
        mask = torch.arange(S).expand(2, 1, T, S) < max(1, S - 2) if masked == "mask" else None
        arguments = (q, k, v, mask, 0.0, masked == "causal")
        actual = compiled(*arguments)
        if function is not torch.nn.functional.scaled_dot_product_attention:
            torch.testing.assert_close(actual, function(*arguments), atol=1e-5, rtol=1e-4)
    return len(graphs)


LENGTHS = {
    "two calls": [(n, n) for n in (33, 40, 48, 64)],
    "any": [(n, n) for n in (*range(1, 71), 255, 256, 257)],
    "keys": [(40, n) for n in (*range(1, 81, 3), 39, 40, 41, 63, 64, 65)],
    "queries": [(n, 50) for n in (2, 31, 32, 33, 40, 49, 50, 51, 64, 70)],
    "decoding": [(40, 40), *((1, n) for n in range(41, 70)), (50, 50), (1, 51), (1, 64)],
}
FITS_BY_ENTROPY = {"paper": calibrate.load("paper"), "both": BY_BOTH, "heads": per_head("both")[0]}
# Each graph takes a second and more.
QUICK_RUN = ("two calls", "both", None, "causal")
SLOW_RUNS = [
    *itertools.product(("any", "decoding"), FITS_BY_ENTROPY, (None, True), ("causal",)),
    *itertools.product(("any", "decoding"), ("both",), (None,), ("no mask", "mask")),
    *itertools.product(("keys", "queries"), ("both",), (None, True), ("causal", "mask")),
]
RUNS_OF_LENGTHS = [QUICK_RUN] + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_RUNS]


@of_the_compiler
@pytest.mark.parametrize(("lengths", "kind", "dynamic", "masked"), RUNS_OF_LENGTHS)
@pytest.mark.slow
def test_compiled_for_any_length_in_one_graph_more_than_the_original(
    lengths, kind, dynamic, masked
):
    ours = partial(attend, coefficients=FITS_BY_ENTROPY[kind])
    sizes, original = LENGTHS[lengths], torch.nn.functional.scaled_dot_product_attention
    most = 1 + graphs_of(original, sizes, dynamic, masked)
    assert graphs_of(ours, sizes, dynamic, masked) <= most


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
