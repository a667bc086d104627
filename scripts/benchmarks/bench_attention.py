"""Benchmark of adaptive attention against stock attention: time, compilation and memory.

And with a fit of entropy and size against one of entropy alone.

python scripts/benchmarks/bench_attention.py          # all runtimes, on one core and on two
python scripts/benchmarks/bench_attention.py --here   # in this process, on its devices
python scripts/benchmarks/bench_attention.py --here benchmark_torch
python scripts/benchmarks/bench_attention.py --summary # one table
python scripts/benchmarks/bench_attention.py --memory # peaks of memory at 16,384 tokens
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from example_rules import FITS
from peak_memory import ASKED, show_peaks
from timing import SUMMARY, Row, answer_help, medians, on_cores, summarise

HEADS, WIDTH = 8, 64
# Name, queries, keys, causal.
CALLS = (
    ("all keys", 2_048, 2_048, False),
    ("causal", 4_096, 4_096, True),
    ("decode", 1, 16_384, False),
)
GRADIENTS = ("causal, with gradients", 2_048, 2_048, True)
SHORT = ((64, 16, 4, 16), (64, 16, 8, 64))  # sequences, tokens, heads, width
LONG = 16_384
# Whose peaks of memory are measured in PyTorch, of one head.
OF_TORCH = (
    "causal", "causal, compiled", "causal, gradients", "causal, compiled, gradients",
    "a mask", "a mask, gradients", "a bias", "a bias, gradients", "a bias, compiled",
    "a bias, compiled, gradients",
)  # fmt: skip
ROUNDS = 9


def show(name: str, queries: int, keys: int, calls: dict[str, Callable[[], object]]) -> None:
    """Prints the times of stock attention, and of a fit by entropy, and by entropy and size.

    Two at a time, as stock attention slows down the call that follows it.
    """
    first, by_entropy, by_both = calls
    rounds = ROUNDS if queries * keys > 10_000 else 40 * ROUNDS
    took = medians({n: calls[n] for n in (first, by_entropy)}, rounds)
    alone, both = medians({n: calls[n] for n in (by_entropy, by_both)}, rounds).values()
    ratio = took[by_entropy] / took[first]
    print(f"{name:>22}, {queries:>5} queries, {keys:>6} keys: {took[by_entropy] * 1e3:7.1f} ms, "
          f"{ratio:.2f} times {first}'s; {both / alone:.2f} times that {by_both}")  # fmt: skip


def arrays(
    queries: int, keys: int, *, length_first: bool, batch=1, heads=HEADS, width=WIDTH
) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(batch, n, heads, width) for n in (queries, keys, keys)]
    qkv = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return qkv if length_first else [np.ascontiguousarray(x.swapaxes(1, 2)) for x in qkv]


def gradients(function, **options):
    """In JAX, of the sum of squares by queries, keys and values."""
    import jax

    return jax.grad(lambda *qkv: (function(*qkv, **options) ** 2).sum(), argnums=(0, 1, 2))


def benchmark_jax() -> None:
    import jax
    import jax.numpy as jnp

    from calibrate.jax.attention import dot_product_attention

    stock = jax.nn.dot_product_attention
    own = [partial(dot_product_attention, coefficients=fit) for fit in FITS.values()]

    def compare(name: str, queries: int, keys: int, is_causal: bool, wrap, **sizes: int) -> None:
        qkv = [jnp.asarray(x) for x in arrays(queries, keys, length_first=True, **sizes)]
        functions = {n: jax.jit(wrap(f, is_causal=is_causal))
                     for n, f in zip(("jax.nn", *FITS), (stock, *own), strict=True)}  # fmt: skip
        calls = {n: lambda f=f: jax.block_until_ready(f(*qkv)) for n, f in functions.items()}
        show(name, queries, keys, calls)

    def compile_times(queries: int, wrap) -> None:
        """CPU seconds from function to program; the first one of a process takes longer."""
        shapes = [jax.ShapeDtypeStruct((1, queries, HEADS, WIDTH), jnp.float32)] * 3
        took = []
        for function in (stock, own[0]):
            start = time.process_time()
            jax.jit(wrap(function, is_causal=True)).lower(*shapes).compile()
            took.append(time.process_time() - start)
        name = "gradients" if wrap is gradients else "forward"
        print(f"compiling, causal, {queries:>5} tokens, {name:>9}: {took[1]:.1f} s of CPU, "
              f"{took[1] / took[0]:.1f} times jax.nn's {took[0]:.1f} s")  # fmt: skip

    print(f"{jax.devices()[0].device_kind}; medians of {ROUNDS}, {HEADS} heads of {WIDTH}, float32")
    for call in CALLS:
        compare(*call, wrap=partial)
    compare(*GRADIENTS, wrap=gradients)
    for batch, tokens, heads, width in SHORT:
        for name, wrap in (("", partial), (", gradients", gradients)):
            name = f"{batch} of {heads} x {width}{name}"
            compare(name, tokens, tokens, False, wrap, batch=batch, heads=heads, width=width)
    for tokens in (512, 2_047):  # not one of the above: compiled anew
        for wrap in (partial, gradients):
            compile_times(tokens, wrap)


def call_in_torch(function, qkv, backward: bool, **given) -> None:
    """Calls it, perhaps with the gradients of the sum of squares; and waits for a GPU."""
    import torch

    out = function(*qkv, **given)
    if backward:
        torch.autograd.grad((out**2).sum(), qkv)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def benchmark_torch() -> None:
    import torch

    from calibrate.torch import scaled_dot_product_attention

    gpu = torch.cuda.is_available()
    where = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}
    stock = torch.nn.functional.scaled_dot_product_attention
    own = [partial(scaled_dot_product_attention, coefficients=fit) for fit in FITS.values()]

    def compare(name: str, queries: int, keys: int, is_causal: bool, backward=False) -> None:
        qkv = [torch.tensor(x, **where) for x in arrays(queries, keys, length_first=False)]
        qkv = [x.requires_grad_(backward) for x in qkv]
        calls = {n: partial(call_in_torch, f, qkv, backward, is_causal=is_causal)
                 for n, f in zip(("PyTorch", *FITS), (stock, *own), strict=True)}  # fmt: skip
        show(name, queries, keys, calls)

    threads = torch.get_num_threads()
    on = torch.cuda.get_device_name() + ", bfloat16" if gpu else f"{threads} threads, float32"
    print(f"PyTorch, {on}; medians of {ROUNDS}, {HEADS} heads of {WIDTH}")
    for row in CALLS:
        compare(*row)
    if gpu:
        compare("causal", LONG, LONG, True)
    compare(*GRADIENTS, backward=True)


def models_of_transformers() -> dict[str, Callable[[], None]]:
    """Forward passes of a small Llama by stock attention, and by each kind of rule."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrate.transformers import apply

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1_000, max_position_embeddings=4_096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokens = model.to(device), torch.randint(0, 1_000, (1, 2_048), device=device)

    models = {"sdpa": model}
    models |= {kind: apply(copy.deepcopy(model), fit) for kind, fit in FITS.items()}

    def forward(name):
        with torch.no_grad():
            models[name](tokens).logits[0, 0, 0].item()

    return {name: partial(forward, name) for name in models}


def benchmark_transformers() -> None:
    import torch

    calls = models_of_transformers()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"a Llama of 4 layers, width 256, 8 heads; {torch.get_num_threads()} threads, {device}")
    show("forward pass", 2_048, 2_048, calls)


def rows_of_jax() -> Iterator[Row]:
    import jax

    from calibrate.jax.attention import dot_product_attention

    own = partial(dot_product_attention, coefficients=FITS["by entropy"])
    qkv = jax.device_put(arrays(*CALLS[1][1:3], length_first=True))
    pair = [jax.jit(partial(f, is_causal=True)) for f in (jax.nn.dot_product_attention, own)]
    calls = (lambda f=f: jax.block_until_ready(f(*qkv)) for f in pair)
    yield "attention in JAX, 4,096 tokens", "jax.nn.dot_product_attention", *calls


def rows_of_torch() -> Iterator[Row]:
    import torch

    from calibrate.torch import scaled_dot_product_attention

    stock = torch.nn.functional.scaled_dot_product_attention
    own = partial(scaled_dot_product_attention, coefficients=FITS["by entropy"])
    qkv = [torch.tensor(x) for x in arrays(*CALLS[1][1:3], length_first=False)]
    calls = (partial(call_in_torch, f, qkv, False, is_causal=True) for f in (stock, own))
    yield "attention in PyTorch, 4,096 tokens", "scaled_dot_product_attention", *calls


def rows_of_transformers() -> Iterator[Row]:
    calls = models_of_transformers()
    yield "a Llama of 4 layers, 2,048 tokens", "sdpa", calls["sdpa"], calls["by entropy"]


def prepared_in_jax(wrap, heads: int, is_own: bool) -> Callable[[], object] | int:
    """A compiled call; of several heads, by which stock attention takes 17 GB, XLA's own figure."""
    import jax

    from calibrate.jax.attention import dot_product_attention

    own = partial(dot_product_attention, coefficients=FITS["by entropy"])
    function = wrap(own if is_own else jax.nn.dot_product_attention, is_causal=True)
    qkv = arrays(LONG, LONG, length_first=True, heads=heads)
    compiled = jax.jit(function).lower(*qkv).compile()
    if heads == 1:
        given = jax.device_put(qkv)
        return lambda: jax.block_until_ready(compiled(*given))
    sizes = compiled.memory_analysis()
    return int(sizes.temp_size_in_bytes + sizes.output_size_in_bytes)


def prepared_in_torch(options: str, is_own: bool) -> Callable[[], object]:
    """A call, after one to compile it, or a short one to warm up."""
    import torch

    from calibrate.torch import scaled_dot_product_attention

    own = partial(scaled_dot_product_attention, coefficients=FITS["by entropy"])
    function = own if is_own else torch.nn.functional.scaled_dot_product_attention
    function = torch.compile(function) if "compiled" in options else function
    backward = "gradients" in options

    def prepared(length: int) -> Callable[[], object]:
        qkv = [torch.tensor(x) for x in arrays(length, length, length_first=False, heads=1)]
        given = {"is_causal": True}
        if "mask" in options or "bias" in options:
            mask = torch.ones(length, length, dtype=torch.bool).tril_()
            given = {"attn_mask": mask}
        if "bias" in options:
            given = {"attn_mask": torch.zeros(length, length).masked_fill_(~mask, -torch.inf)}
        qkv = [x.requires_grad_(backward) for x in qkv]
        return partial(call_in_torch, function, qkv, backward, **given)

    prepared(LONG if "compiled" in options else 512)()
    return prepared(LONG)


def memory() -> None:
    prepare: dict[str, Callable[[bool], Any]] = {
        f"JAX, {name}, heads: {heads}": partial(prepared_in_jax, wrap, heads)
        for heads in (1, HEADS)
        for name, wrap in (("causal", partial), ("causal, gradients", gradients))
    }
    prepare |= {f"PyTorch, {name}": partial(prepared_in_torch, name) for name in OF_TORCH}
    show_peaks(
        f"{LONG:,} tokens, one head of {WIDTH} unless said",
        {row: {"stock": partial(p, False), "ours": partial(p, True)} for row, p in prepare.items()},
    )


if __name__ == "__main__":
    answer_help(__doc__)
    if SUMMARY in sys.argv:
        summarise(rows_of_jax, rows_of_torch, rows_of_transformers, rounds=7, calls=1)
    elif ASKED in sys.argv:
        memory()
    else:
        on_cores(benchmark_jax, benchmark_torch, benchmark_transformers)
