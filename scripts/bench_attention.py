"""What does adaptive attention cost? Against jax.nn.dot_product_attention: time and memory.

python scripts/bench_attention.py          # on one core and on two
python scripts/bench_attention.py --here   # in this process, on what there is (a GPU, say)
"""

import time
from functools import partial

from on_cores import on_cores

HEADS, WIDTH = 8, 64
# What it is, queries, keys, causal.
CALLS = (
    ("all keys", 2_048, 2_048, False),
    ("causal", 4_096, 4_096, True),
    ("decode", 1, 16_384, False),
)
GRADIENTS = ("causal, with gradients", 2_048, 2_048, True)
LONG = 16_384
ROUNDS = 9


def measure() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import calibrate
    from calibrate.attention import dot_product_attention

    ours = partial(dot_product_attention, coefficients=calibrate.load("paper"))
    stock = jax.nn.dot_product_attention

    def arrays(queries: int, keys: int) -> list[jax.Array]:
        rng = np.random.default_rng(0)
        shapes = [(1, n, HEADS, WIDTH) for n in (queries, keys, keys)]
        return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def gradients(function, **options):
        def loss(q, k, v):
            return jnp.sum(function(q, k, v, **options) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))

    def compare(name: str, queries: int, keys: int, is_causal: bool, wrap) -> None:
        qkv = arrays(queries, keys)
        functions = [jax.jit(wrap(f, is_causal=is_causal)) for f in (stock, ours)]
        took: list[list[float]] = [[], []]
        for round_ in range(-1, ROUNDS):  # the first compiles
            for function, seconds in zip(functions, took, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(function(*qkv))
                if round_ >= 0:
                    seconds.append(time.perf_counter() - start)
        theirs, mine = (float(np.median(seconds)) for seconds in took)
        print(f"{name:>22}, {queries:>5} queries, {keys:>6} keys: {mine * 1e3:7.1f} ms, "
              f"{mine / theirs:.2f} times jax.nn's")  # fmt: skip

    print(f"{jax.devices()[0].device_kind}; medians of {ROUNDS}, {HEADS} heads of {WIDTH}, float32")
    for call in CALLS:
        compare(*call, wrap=partial)
    compare(*GRADIENTS, wrap=gradients)
    shapes = [jax.ShapeDtypeStruct((1, LONG, HEADS, WIDTH), jnp.float32)] * 3
    theirs, mine = (
        jax.jit(partial(f, is_causal=True)).lower(*shapes).compile()
        .memory_analysis().temp_size_in_bytes for f in (stock, ours)
    )  # fmt: skip
    print(f"memory, causal, {LONG} keys: {mine / 1e6:,.0f} MB beside arguments and result, "
          f"{mine / theirs:.3f} times jax.nn's {theirs / 1e6:,.0f} MB")  # fmt: skip


if __name__ == "__main__":
    on_cores(measure)
