"""Compiled and exported softmax and attention: the same numbers, and few graphs."""

import itertools
from dataclasses import replace
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from attention_cases import BY_BOTH, qkv
from backends import Torch
from cases import HEAD_RULES, SMOOTH, SMOOTH_FITS, per_head
from torch_cases import normal, of_the_compiler

import calibrate
from calibrate.store.fit import Fit
from calibrate.torch import adaptive_softmax
from calibrate.torch import scaled_dot_product_attention as attend
from calibrate.torch.fused import compiled_flex_attention

in_words_of_torch = Torch().in_own_words


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
