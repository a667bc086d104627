"""Benchmark of adaptive_softmax, and of the paper's listing, against the stock softmax.

python scripts/benchmarks/bench_softmax.py          # a table, on one core, two and all
python scripts/benchmarks/bench_softmax.py --here   # the same on the devices that a process finds

A ratio is the median over logits of shapes (4096, 64), (512, 1024) and (64, 16384); in brackets
stand the three. Small calls have logits (64, 64).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from timing import Row, answer_help, summarise

import calibrate
from calibrate.evidence.baselines import one_constant

POLYNOMIAL, CONSTANT = calibrate.load("paper"), one_constant(2.0)
SHAPES = ((4096, 64), (512, 1024), (64, 16384))
SMALL = (64, 64)


def logits_of(shape: tuple[int, int]) -> np.ndarray:
    return (2 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def paper_in_jax(logits):
    """The paper's listing, written anew: two softmax calls, and their entropy."""
    import jax
    import jax.numpy as jnp

    probs = jax.nn.softmax(logits)
    H = -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1, keepdims=True)
    p = jnp.polyval(jnp.array(POLYNOMIAL.only.coefficients), H)
    return jax.nn.softmax(logits * jnp.where(H > 0.5, jnp.maximum(p, 1.0), 1.0))


def gradients_of_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient for logits, given one for probabilities."""
    import jax

    return lambda logits, direction: jax.vjp(function, logits)[1](direction)[0]


def rows_of_jax() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    stock = jax.nn.softmax
    ours, constant = (
        partial(calibrate.adaptive_softmax, coefficients=fit) for fit in (POLYNOMIAL, CONSTANT)
    )
    functions = {
        "softmax in JAX": ours,
        "the paper's listing": paper_in_jax,
        "softmax in JAX by a constant": constant,
    }
    for shape in SHAPES:
        logits = jnp.asarray(logits_of(shape))
        for what, function in functions.items():
            compiled = map(jax.jit, (stock, function))
            pair = (lambda f=f, z=logits: f(z).block_until_ready() for f in compiled)
            yield Row(what, "jax.nn.softmax", *pair)
            gradients = map(jax.jit, map(gradients_of_jax, (stock, function)))
            pair = (lambda f=f, z=logits: f(z, z).block_until_ready() for f in gradients)
            yield Row(f"{what}, gradient", "jax.nn.softmax", *pair)


def paper_in_torch(logits):
    """The paper's listing, written anew."""
    import torch

    probs = torch.softmax(logits, -1)
    H = -(probs * torch.log(probs + 1e-9)).sum(-1, keepdim=True)
    p = torch.zeros_like(H)
    for coefficient in POLYNOMIAL.only.coefficients:
        p = p * H + coefficient
    return torch.softmax(logits * torch.where(H > 0.5, p.clamp(min=1.0), 1.0), -1)


def wait(result: Any) -> None:
    """Waits for a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows_of_torch() -> Iterator[Row]:
    import torch

    from calibrate.torch import adaptive_softmax

    stock = partial(torch.softmax, dim=-1)
    ours = partial(adaptive_softmax, coefficients=POLYNOMIAL)
    functions = {
        "the paper's listing": paper_in_torch,
        "the same, compiled": torch.compile(paper_in_torch),
        "softmax in PyTorch": ours,
        "compiled": torch.compile(ours),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in (*SHAPES, SMALL):
        for title, function in functions.items():
            for dtype in (torch.float32, torch.bfloat16):
                torch.compiler.reset()  # of a function, it compiles eight variants at most
                size = ", small calls" if shape == SMALL else ""
                what = f"{title}, {str(dtype).removeprefix('torch.')}{size}"
                logits = torch.tensor(logits_of(shape), dtype=dtype, device=device)
                weights, leaf = torch.randn_like(logits), logits.clone().requires_grad_()
                pair = (lambda f=f, z=logits: wait(f(z)) for f in (stock, function))
                yield Row(what, "torch.softmax", *pair)
                both = (
                    lambda f=f, z=leaf, g=weights: wait(torch.autograd.grad(f(z), z, g))
                    for f in (stock, function)
                )
                yield Row(f"{what}, gradient", "torch.softmax", *both)


if __name__ == "__main__":
    answer_help(__doc__)
    summarise(rows_of_jax, rows_of_torch, rounds=20, calls=3)
