"""Benchmark of adaptive attention against stock attention: time, memory and compilation.

And with a fit of entropy and size against one of entropy alone.

python scripts/bench_attention.py          # JAX, PyTorch and Transformers, on one core and on two
python scripts/bench_attention.py --here   # in this process, on its devices (such as a GPU)
python scripts/bench_attention.py --here of_torch
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from kinds import FITS
from timing import medians, on_cores

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


def of_jax() -> None:
    import jax
    import jax.numpy as jnp

    from calibrate.attention import dot_product_attention

    stock = jax.nn.dot_product_attention
    own = [partial(dot_product_attention, coefficients=fit) for fit in FITS.values()]

    def gradients(function, **options):
        def loss(q, k, v):
            return jnp.sum(function(q, k, v, **options) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))

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
    shapes = [jax.ShapeDtypeStruct((1, LONG, HEADS, WIDTH), jnp.float32)] * 3
    stock_size, own_size = (
        jax.jit(partial(f, is_causal=True)).lower(*shapes).compile()
        .memory_analysis().temp_size_in_bytes for f in (stock, own[0])
    )  # fmt: skip
    print(f"memory, causal, {LONG} keys: {own_size / 1e6:,.0f} MB beside arguments and result, "
          f"{own_size / stock_size:.3f} times jax.nn's {stock_size / 1e6:,.0f} MB")  # fmt: skip


def of_torch() -> None:
    import torch

    from calibrate.torch import scaled_dot_product_attention

    gpu = torch.cuda.is_available()
    where = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}
    stock = torch.nn.functional.scaled_dot_product_attention
    own = [partial(scaled_dot_product_attention, coefficients=fit) for fit in FITS.values()]

    def call(function, qkv, is_causal, backward):
        out = function(*qkv, is_causal=is_causal)
        if backward:
            torch.autograd.grad((out**2).sum(), qkv)
        if gpu:
            torch.cuda.synchronize()

    def compare(name: str, queries: int, keys: int, is_causal: bool, backward=False) -> None:
        qkv = [torch.tensor(x, **where) for x in arrays(queries, keys, length_first=False)]
        qkv = [x.requires_grad_(backward) for x in qkv]
        calls = {n: partial(call, f, qkv, is_causal, backward)
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


def of_transformers() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrate.transformers import register

    names = [kind.replace(" ", "-") for kind in FITS]
    for name, fit in zip(names, FITS.values(), strict=True):
        register(name, fit)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1_000, max_position_embeddings=4_096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokens = model.to(device), torch.randint(0, 1_000, (1, 2_048), device=device)

    def forward(attention):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model(tokens).logits[0, 0, 0].item()

    calls = {name: partial(forward, name) for name in ("sdpa", *names)}
    print(f"a Llama of 4 layers, width 256, 8 heads; {torch.get_num_threads()} threads, {device}")
    show("forward pass", 2_048, 2_048, calls)


if __name__ == "__main__":
    on_cores(of_jax, of_torch, of_transformers)
