"""What does adaptive_softmax cost? Against jax.nn.softmax, and against the paper's procedure.

python scripts/bench_softmax.py          # on one core and on two
python scripts/bench_softmax.py --here   # in this process, on what there is (a GPU, say)
"""

import time
from functools import partial

from on_cores import on_cores

SHAPES = ((4096, 64), (512, 1024), (64, 16384))
ROUNDS, CALLS = 60, 5


def measure() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import calibrate

    fit = calibrate.load("paper")

    def paper(logits):
        """The paper's procedure, in words of this script: two softmax calls, and their entropy."""
        probs = jax.nn.softmax(logits)
        H = -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1, keepdims=True)
        p = jnp.polyval(jnp.array(fit.only.coefficients), H)
        return jax.nn.softmax(logits * jnp.where(H > 0.5, jnp.maximum(p, 1.0), 1.0))

    functions = {
        "jax.nn.softmax": jax.jit(jax.nn.softmax),
        "the paper's": jax.jit(paper),
        "ours": jax.jit(partial(calibrate.adaptive_softmax, coefficients=fit)),
    }
    print(f"{jax.devices()[0].device_kind}; medians of {ROUNDS} rounds, float32")
    for shape in SHAPES:
        logits = jnp.asarray(2 * np.random.default_rng(0).standard_normal(shape), jnp.float32)
        took: dict[str, list[float]] = {name: [] for name in functions}
        for round_ in range(-1, ROUNDS):  # the first compiles
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    function(logits).block_until_ready()
                if round_ >= 0:
                    took[name].append((time.perf_counter() - start) / CALLS)
        stock, snippet, ours = (float(np.median(seconds)) for seconds in took.values())
        print(f"{shape!s:>12}: {ours * 1e6:6.0f} us, {ours / stock:.2f} times jax.nn.softmax, "
              f"{ours / snippet:.2f} times the paper's")  # fmt: skip


if __name__ == "__main__":
    on_cores(measure)
