"""Random calls of our PyTorch attention, against torch.nn.functional's in float64.

Adaptive attention is stock attention with each query times its beta, and beta follows from the
logits: so every fit can be compared, with gradients.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from attention_cases import BY_SIZE
from torch.nn.attention import SDPBackend, sdpa_kernel

import calibrate
from calibrate.core.rule import ENTROPY_AND_SIZE, RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.torch import inverse_temperature
from calibrate.torch import scaled_dot_product_attention as attend

# No fit has a jump of beta at an entropy of 0, to which rounding takes rows of one item.
FITS = (
    calibrate.identity(),
    Fit(RuleForm.log_size(), (Entry((0.0, 1.7), (1.0, 8.0)),)),
    BY_SIZE,
    Fit(RuleForm(0.0), (Entry((0.01, -0.1, 0.2, 0.3, 1.0), (0.2, 5.0)),)),
    Fit(
        RuleForm(0.0, 0.5, kind=ENTROPY_AND_SIZE),
        (Entry((0.01, -0.1, 0.2, 0.3, 1.0, 0.06, -0.002, -0.012), (0.2, 5.0, 1.0, 4.0)),),
    ),
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LAYOUTS = (
    lambda x: x,
    lambda x: x.mT.contiguous().mT,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.repeat_interleave(2, -1)[..., ::2],
    lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    lambda x: x[..., :1].expand(x.shape),
)


class Call(NamedTuple):
    tensors: list  # query, key, value
    options: dict
    seen: torch.Tensor  # (B, N, T, S), the keys that each query sees
    fit: Fit


def random_call(rng) -> Call:
    B, K, group = rng.choice([0, 1, 2, 3], p=[0.02, 0.4, 0.4, 0.18]), *rng.integers(1, 4, 2)
    T, S = rng.choice([0, 1, 2, 7, 31, 33, 70, 600], 2, p=[0.03, *[0.11] * 4, 0.24, 0.24, 0.05])
    width, width_of_value = rng.choice([0, 1, 3, 8, 16], 2, p=[0.03, 0.1, 0.2, 0.47, 0.2])
    if rng.random() < 0.7:
        width_of_value = width
    dtype = DTYPES[rng.choice(4, p=[0.5, 0.2, 0.15, 0.15])]
    shapes = (B, K * group, T, width), (B, K, S, width), (B, K, S, width_of_value)
    q, k, v = (torch.tensor(rng.standard_normal(shape), dtype=dtype) for shape in shapes)
    k[..., :1] += rng.choice([0.0, 5.0])
    options = {"enable_gqa": bool(group > 1)}
    if rng.random() < 0.6:
        options["scale"] = rng.choice([-30.0, -1.3, -0.2, 0.0, 0.2, 1.3, 30.0])
    seen = torch.ones(B, K * group, T, S, dtype=bool)
    kind = rng.choice(["none", "causal", "bool", "bool and causal", "bias"])
    if "causal" in kind:
        seen = seen.tril()
        options["is_causal"] = True
    if "b" in kind:
        axes = [n if rng.random() < 0.6 else 1 for n in seen.shape]
        mask = torch.tensor(rng.random(axes) < rng.choice([0.3, 0.8, 0.97]))
        if kind == "bias":
            bias = torch.tensor(rng.standard_normal(axes), dtype=dtype)
            options["attn_mask"] = torch.where(mask, bias, -torch.inf)
        else:
            options["attn_mask"] = mask
        seen = seen & mask
    tensors = [LAYOUTS[rng.integers(len(LAYOUTS))](x) for x in (q, k, v)]
    return Call(tensors, options, seen, FITS[rng.integers(len(FITS))])


def expected(tensors, call):
    """Stock attention in float64, each query times the beta of its logits; and their size."""
    q, k, v = tensors
    mask, options = call.options.get("attn_mask"), call.options
    bias = torch.zeros((), dtype=torch.float64)
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.double()
    bias = torch.where(call.seen, bias, 0.0)
    scale = options.get("scale", max(1, q.shape[-1]) ** -0.5)
    z = scale * q @ k.repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1).mT + bias
    beta = _beta(z, call)
    masked_bias = torch.where(call.seen, beta * bias, -torch.inf)
    with sdpa_kernel(SDPBackend.MATH):
        exact = torch.nn.functional.scaled_dot_product_attention(
            q * beta, k, v, masked_bias, scale=scale, enable_gqa=options["enable_gqa"]
        )
    return exact, 1 + (z.detach().abs().max().item() if z.numel() else 0.0)


def _beta(z, call):
    none_seen = ~call.seen.any(-1, keepdim=True)
    p = torch.where(call.seen | none_seen, z, -torch.inf).softmax(-1)
    H = torch.special.entr(p.clamp(min=1e-300)).sum(-1, keepdim=True)
    return inverse_temperature(H, call.fit, n=call.seen.sum(-1, keepdim=True).double())


def check(seed):
    call = random_call(np.random.default_rng([19, seed]))
    exact_inputs = [x.double().requires_grad_() for x in call.tensors]
    exact, size = expected(exact_inputs, call)
    inputs = [x.detach().requires_grad_() for x in call.tensors]
    if seed % 5 == 0:  # one more axis in front
        actual = attend(*(x[None] for x in inputs), **call.options, coefficients=call.fit)[0]
    else:
        actual = attend(*inputs, **call.options, coefficients=call.fit)
    assert actual.dtype == inputs[0].dtype
    assert actual.shape == exact.shape
    rtol = 2 * torch.finfo(actual.dtype).eps
    # Logits err by their size times eps; gradients have them as factors once more, and are sums.
    eps = min(torch.finfo(actual.dtype).eps, torch.finfo(torch.float32).eps)
    close = partial(torch.testing.assert_close, rtol=rtol)
    close(actual.double(), exact, atol=8 * eps * size)
    weights = torch.arange(exact.numel()).reshape(exact.shape).remainder(7).double() - 3
    of_exact = torch.autograd.grad((exact * weights).sum(), exact_inputs)
    of_actual = torch.autograd.grad((actual.double() * weights).sum(), inputs)
    for x, y in zip(of_actual, of_exact, strict=True):
        close(x.double(), y, atol=32 * eps * (size**2 + exact.shape[2]))


@pytest.mark.parametrize("seeds", [(0, 60), pytest.param((60, 1_500), marks=pytest.mark.slow)])
def test_random_calls(seeds):
    for seed in range(*seeds):
        check(seed)
