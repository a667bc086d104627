"""Benchmark of adaptive_softmax, and of the paper's listing, against the stock softmax.

python scripts/benchmarks/bench_softmax.py          # a table, on one core, two and all
python scripts/benchmarks/bench_softmax.py --here   # the same on the devices that a process finds
python scripts/benchmarks/bench_softmax.py --memory # peaks of memory, at the last of the shapes

A ratio is the median over logits of shapes (4096, 64), (512, 1024) and (64, 16384); in brackets
stand the three. Small calls have logits (64, 64).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from peak_memory import ASKED, Prepared, show_peaks
from timing import Row, answer_help, summarise

import calibrate
from calibrate.evidence.baselines import one_constant

POLYNOMIAL, CONSTANT = calibrate.load("paper"), one_constant(2.0)
SHAPES = ((4096, 64), (512, 1024), (64, 16384))
SMALL = (64, 64)
OF_JAX = ("jax.nn.softmax", "the paper's", "ours")
OF_TORCH = ("torch.softmax", "the paper's", "the paper's compiled", "ours", "ours compiled")


def logits_of(shape: tuple[int, int]) -> np.ndarray:
    return (2 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def functions_of_jax() -> dict[str, Callable[..., Any]]:
    """The functions that are compared, not compiled."""
    import jax
    import jax.numpy as jnp

    def paper(logits):
        """The paper's listing, written anew: two softmax calls, and their entropy."""
        probs = jax.nn.softmax(logits)
        H = -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1, keepdims=True)
        p = jnp.polyval(jnp.array(POLYNOMIAL.only.coefficients), H)
        return jax.nn.softmax(logits * jnp.where(H > 0.5, jnp.maximum(p, 1.0), 1.0))

    ours = partial(calibrate.adaptive_softmax, coefficients=POLYNOMIAL)
    return dict(zip(OF_JAX, (jax.nn.softmax, paper, ours), strict=True))


def gradients_of_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient for logits, given one for probabilities."""
    import jax

    return lambda logits, direction: jax.vjp(function, logits)[1](direction)[0]


def rows_of_jax() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    stock, paper, ours = functions_of_jax().values()
    constant = partial(calibrate.adaptive_softmax, coefficients=CONSTANT)
    gradients = gradients_of_jax(stock)
    for shape in SHAPES:
        logits = jnp.asarray(logits_of(shape))
        for what, peer, function, given in (
            ("softmax in JAX", stock, ours, (logits,)),
            ("the paper's listing", stock, paper, (logits,)),
            ("softmax in JAX by a constant", stock, constant, (logits,)),
            ("softmax in JAX, gradient", gradients, gradients_of_jax(ours), (logits, logits)),
            ("the paper's listing, gradient", gradients, gradients_of_jax(paper), (logits, logits)),
        ):
            compiled = map(jax.jit, (peer, function))
            calls = (lambda f=f, x=given: f(*x).block_until_ready() for f in compiled)
            yield Row(what, OF_JAX[0], *calls)


def functions_of_torch() -> dict[str, Callable[..., Any]]:
    """The functions that are compared."""
    import torch

    from calibrate.torch import adaptive_softmax

    def paper(logits):
        """The paper's listing, written anew."""
        probs = torch.softmax(logits, -1)
        H = -(probs * torch.log(probs + 1e-9)).sum(-1, keepdim=True)
        p = torch.zeros_like(H)
        for coefficient in POLYNOMIAL.only.coefficients:
            p = p * H + coefficient
        return torch.softmax(logits * torch.where(H > 0.5, p.clamp(min=1.0), 1.0), -1)

    adaptive = partial(adaptive_softmax, coefficients=POLYNOMIAL)
    of_each = (partial(torch.softmax, dim=-1), paper, torch.compile(paper), adaptive)
    return dict(zip(OF_TORCH, (*of_each, torch.compile(adaptive)), strict=True))


def wait(result: Any) -> None:
    """Waits for a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows_of_torch() -> Iterator[Row]:
    import torch

    stock, *others = functions_of_torch().values()
    titles = ("the paper's listing", "the same, compiled", "softmax in PyTorch", "compiled")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in (*SHAPES, SMALL):
        for title, function in zip(titles, others, strict=True):
            for dtype in (torch.float32, torch.bfloat16):
                torch.compiler.reset()  # of a function, it compiles eight variants at most
                size = ", small calls" if shape == SMALL else ""
                what = f"{title}, {str(dtype).removeprefix('torch.')}{size}"
                logits = torch.tensor(logits_of(shape), dtype=dtype, device=device)
                weights, leaf = torch.randn_like(logits), logits.clone().requires_grad_()
                pair = (lambda f=f, z=logits: wait(f(z)) for f in (stock, function))
                yield Row(what, OF_TORCH[0], *pair)
                both = (
                    lambda f=f, z=leaf, g=weights: wait(torch.autograd.grad(f(z), z, g))
                    for f in (stock, function)
                )
                yield Row(f"{what}, gradient", OF_TORCH[0], *both)


def prepared_in_jax(name: str, backward: bool) -> Callable[[], Any]:
    """A compiled call at the last of the shapes."""
    import jax
    import jax.numpy as jnp

    function = functions_of_jax()[name]
    function = gradients_of_jax(function) if backward else function
    given = [jnp.asarray(logits_of(SHAPES[-1])) + i for i in range(1 + backward)]
    compiled = jax.jit(function).lower(*given).compile()
    return lambda: compiled(*given).block_until_ready()


def prepared_in_torch(name: str, dtype: str, backward: bool) -> Callable[[], Any]:
    """A call at the last of the shapes, after one to warm up."""
    import torch

    function = functions_of_torch()[name]
    logits = torch.tensor(logits_of(SHAPES[-1]), dtype=getattr(torch, dtype))
    weights, leaf = torch.randn_like(logits), logits.clone().requires_grad_()

    def call() -> Any:
        return torch.autograd.grad(function(leaf), leaf, weights) if backward else function(logits)

    call()
    return call


def memory() -> None:
    rows: dict[str, dict[str, Prepared]] = {}
    for part, backward in (("forward", False), ("with the gradient", True)):
        rows[f"JAX, {part}"] = {name: partial(prepared_in_jax, name, backward) for name in OF_JAX}
        for dtype in ("float32", "bfloat16"):
            rows[f"PyTorch, {dtype}, {part}"] = {
                name: partial(prepared_in_torch, name, dtype, backward) for name in OF_TORCH
            }
    show_peaks(f"logits {SHAPES[-1]}", rows)


if __name__ == "__main__":
    answer_help(__doc__)
    if ASKED in sys.argv:
        memory()
    else:
        summarise(rows_of_jax, rows_of_torch, rounds=20, calls=3)
