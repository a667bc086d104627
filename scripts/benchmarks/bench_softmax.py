"""Benchmark of adaptive_softmax against the stock softmax and the paper's procedure.

And of fits of other kinds against one of the entropy, without masks and with two.

python scripts/benchmarks/bench_softmax.py          # JAX and PyTorch, on one core and on two
python scripts/benchmarks/bench_softmax.py --here   # in this process, on its devices
python scripts/benchmarks/bench_softmax.py --here benchmark_torch
python scripts/benchmarks/bench_softmax.py --summary # one table, at (512, 1024)
python scripts/benchmarks/bench_softmax.py --memory # peaks of memory, at the last of the shapes
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from example_rules import FITS
from peak_memory import ASKED, Prepared, show_peaks
from timing import SUMMARY, Row, answer_help, medians, on_cores, summarise

import calibrate

SHAPES = ((4096, 64), (512, 1024), (64, 16384))
OF_JAX = ("jax.nn.softmax", "the paper's", "ours")
OF_TORCH = ("torch.softmax", "the paper's", "the paper's compiled", "ours", "ours compiled")
ROUNDS, CALLS = 60, 5


def logits_of(shape: tuple[int, int]) -> np.ndarray:
    return (2 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def show(shape: tuple[int, int], took: dict[str, float]) -> None:
    """Prints the times of functions as multiples of the first, the stock softmax."""
    (stock, unit), *others = took.items()
    ratios = ", ".join(f"{name} {seconds / unit:.2f}" for name, seconds in others)
    print(f"{shape!s:>12}: {stock} {unit * 1e6:6.0f} us; times as long: {ratios}")


def masks_of(shape: tuple[int, int]) -> dict[str, np.ndarray | None]:
    """A mask that is the same for all rows, and one of each row."""
    return {
        "no mask": None,
        "padding": np.arange(shape[1]) < 3 * shape[1] // 4,
        "a mask of each row": np.random.default_rng(1).random(shape) < 0.75,
    }


def compare_kinds(shape: tuple[int, int], call_of: Callable[..., Any], name: str = "") -> None:
    """Prints the time with fits of other kinds, as multiples of that with one by entropy."""
    ratios: dict[str, list[str]] = {}
    for mask, where in masks_of(shape).items():
        calls = {kind: call_of(fit, where) for kind, fit in FITS.items()}
        by_entropy, *others = medians(calls, 4 * ROUNDS, CALLS).items()
        for kind, took in others:
            ratios.setdefault(kind, []).append(f"{took / by_entropy[1]:.2f} with {mask}")
    for kind, of_masks in ratios.items():
        print(f"{shape!s:>12}: {kind}{name}, times one by entropy: {', '.join(of_masks)}")


def functions_of_jax() -> dict[str, Callable[..., Any]]:
    """The functions that are compared, not compiled."""
    import jax
    import jax.numpy as jnp

    fit = calibrate.load("paper")

    def paper(logits):
        """The paper's procedure, written anew: two softmax calls, and their entropy."""
        probs = jax.nn.softmax(logits)
        H = -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1, keepdims=True)
        p = jnp.polyval(jnp.array(fit.only.coefficients), H)
        return jax.nn.softmax(logits * jnp.where(H > 0.5, jnp.maximum(p, 1.0), 1.0))

    ours = partial(calibrate.adaptive_softmax, coefficients=fit)
    return dict(zip(OF_JAX, (jax.nn.softmax, paper, ours), strict=True))


def gradients_of_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient for logits, given one for probabilities."""
    import jax

    return lambda logits, direction: jax.vjp(function, logits)[1](direction)[0]


def benchmark_jax() -> None:
    import jax
    import jax.numpy as jnp

    fit = calibrate.load("paper")
    bare = functions_of_jax()
    functions = {name: jax.jit(function) for name, function in bare.items()}
    stopped = partial(calibrate.adaptive_softmax, coefficients=fit, entropy_gradient=False)
    gradients = {
        f"gradients of {name}": jax.jit(gradients_of_jax(function))
        for name, function in (bare | {"ours, entropy_gradient=False": stopped}).items()
    }
    print(f"{jax.devices()[0].device_kind}; medians of {ROUNDS} rounds, float32")
    for shape in SHAPES:
        logits = jnp.asarray(logits_of(shape))
        calls = {
            name: lambda f=f, z=logits: f(z).block_until_ready() for name, f in functions.items()
        }
        show(shape, medians(calls, ROUNDS, CALLS))
        direction = jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32)
        calls = {
            name: lambda f=f, z=logits, d=direction: f(z, d).block_until_ready()
            for name, f in gradients.items()
        }
        show(shape, medians(calls, ROUNDS, CALLS))

        def call_of(fit, where, logits=logits):
            softmax = jax.jit(partial(calibrate.adaptive_softmax, coefficients=fit))
            where = None if where is None else jnp.asarray(where)
            return lambda: softmax(logits, where=where).block_until_ready()

        compare_kinds(shape, call_of)


def paper_of_torch(fit):
    """The paper's procedure, written anew."""
    import torch

    def paper(logits):
        probs = torch.softmax(logits, -1)
        H = -(probs * torch.log(probs + 1e-9)).sum(-1, keepdim=True)
        p = torch.zeros_like(H)
        for coefficient in fit.only.coefficients:
            p = p * H + coefficient
        return torch.softmax(logits * torch.where(H > 0.5, p.clamp(min=1.0), 1.0), -1)

    return paper


def functions_of_torch() -> dict[str, Callable[..., Any]]:
    """The functions that are compared."""
    import torch

    from calibrate.torch import adaptive_softmax

    fit = calibrate.load("paper")
    paper, adaptive = paper_of_torch(fit), partial(adaptive_softmax, coefficients=fit)
    of_each = (partial(torch.softmax, dim=-1), paper, torch.compile(paper), adaptive)
    return dict(zip(OF_TORCH, (*of_each, torch.compile(adaptive)), strict=True))


def done(result: Any) -> Any:
    """The result, computed."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def benchmark_torch() -> None:
    """Prints times of both dtypes: forward, and with the gradient."""
    import torch

    device, functions = "cuda" if torch.cuda.is_available() else "cpu", functions_of_torch()
    print(f"PyTorch on {device}, {torch.get_num_threads()} threads; medians of {ROUNDS} rounds")
    # One thread's own time is free of what else the machine does.
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    for shape in ((64, 64), *SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            torch.compiler.reset()  # of a function, it compiles eight variants at most
            logits = torch.tensor(logits_of(shape), device=device, dtype=dtype)
            weights, leaf = torch.randn_like(logits), logits.clone().requires_grad_()
            forward = {name: lambda f=f, z=logits: done(f(z)) for name, f in functions.items()}
            both = {
                name: lambda f=f, z=leaf, g=weights: done(torch.autograd.grad(f(z), z, g))
                for name, f in functions.items()
            }
            print(f"{dtype}, forward; and with the gradient")
            for calls in (forward, both):
                show(shape, medians(calls, ROUNDS, CALLS, clock))


def kinds_of_torch() -> None:
    """Fits of other kinds against one by entropy."""
    import torch

    from calibrate.torch import adaptive_softmax

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in SHAPES:
        logits = torch.tensor(logits_of(shape), device=device)

        def call_of(fit, where, logits=logits, compiled=False):
            def softmax(logits, where):
                return adaptive_softmax(logits, fit, where=where)

            softmax = torch.compile(softmax) if compiled else softmax
            where = None if where is None else torch.tensor(where, device=device)
            return lambda: done(softmax(logits, where))

        compare_kinds(shape, call_of)
        torch.compiler.reset()
        compare_kinds(shape, partial(call_of, compiled=True), " compiled")


def rows_of_jax() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    logits = jnp.asarray(logits_of(SHAPES[1]))
    constant = partial(calibrate.adaptive_softmax, coefficients=FITS["constant"])
    functions = functions_of_jax()
    stock, ours = functions[OF_JAX[0]], functions[OF_JAX[-1]]
    gradients = gradients_of_jax(stock), gradients_of_jax(ours)
    for what, pair, given in (
        ("softmax in JAX", (stock, ours), (logits,)),
        ("the same with its gradient", gradients, (logits, logits)),
        ("the same by a constant", (stock, constant), (logits,)),
    ):
        compiled = map(jax.jit, pair)
        yield what, OF_JAX[0], *(lambda f=f, x=given: f(*x).block_until_ready() for f in compiled)


def rows_of_torch() -> Iterator[Row]:
    import torch

    functions = functions_of_torch()
    stock = functions[OF_TORCH[0]]
    for what, name in (("softmax in PyTorch", "ours"), ("compiled", "ours compiled")):
        for dtype in (torch.float32, torch.bfloat16):
            pair = stock, functions[name]
            logits = torch.tensor(logits_of(SHAPES[1]), dtype=dtype)
            weights, leaf = torch.randn_like(logits), logits.clone().requires_grad_()
            title = f"{what}, {str(dtype).removeprefix('torch.')}"
            yield title, OF_TORCH[0], *(partial(f, logits) for f in pair)
            both = (lambda f=f, z=leaf, g=weights: torch.autograd.grad(f(z), z, g) for f in pair)
            yield f"{title}, with its gradient", OF_TORCH[0], *both


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
    if SUMMARY in sys.argv:
        summarise(rows_of_jax, rows_of_torch)
    elif ASKED in sys.argv:
        memory()
    else:
        on_cores(benchmark_jax, benchmark_torch, kinds_of_torch)
