"""What only PyTorch asks of softmax: derivatives, transforms, blocks of rows, imports."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from backends import set_blocks
from cases import FITS, HEAD_RULES, SMOOTH_FITS, per_head
from torch_cases import normal, of_the_compiler

import calibrate
from calibrate.core.rule import beta_of, slope_of
from calibrate.torch import adaptive_softmax, entropy, inverse_temperature
from calibrate.torch import scaled_dot_product_attention as attend
from calibrate.torch import softmax_passes as softmax_module
from calibrate.torch.softmax_passes import FEW_ROWS


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


def test_logits_on_another_device_than_the_default(paper):
    """Multiplied by a beta of another device, they stayed as they were."""
    z = torch.linspace(0, 3, 64).expand(5, 64)
    exact, H = adaptive_softmax(z, paper), entropy(z)
    with torch.device("meta"):
        assert torch.equal(adaptive_softmax(z, paper), exact)
        assert inverse_temperature(H, paper).device == z.device


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
