"""Benchmark of training steps a second against a plain loop of the paper's code in Flax and optax.

The peer is what one writes first: the network of A.3 from stock layers, inputs of one-hot classes
and priorities, one jitted step, a batch made and moved for each. `train_heads` gives each seed
one core, so that on two cores two seeds train at its rate on one.

python scripts/bench_train.py          # on one core and on two
python scripts/bench_train.py --here   # in this process, on its devices
"""

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from timing import answer_help, medians, on_cores

from calibrate.rows import max_retrieval

ROUNDS, STEPS = 5, 1_000


class Network(nn.Module):
    """Appendix A.3, layer by layer."""

    @nn.compact
    def __call__(self, items: jax.Array, query: jax.Array) -> jax.Array:
        width = max_retrieval.N_FEATURES
        items = nn.Dense(width)(nn.gelu(nn.Dense(width)(items)))
        items = nn.gelu(items)
        query = nn.Dense(width)(nn.gelu(nn.Dense(width)(query)))
        attention = nn.MultiHeadDotProductAttention(num_heads=1, qkv_features=width)
        mixed = jnp.squeeze(attention(query, items), -2)
        return nn.Dense(max_retrieval.N_CLASSES)(nn.gelu(nn.Dense(width)(mixed)))


def inputs(batch: max_retrieval.Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    one_hot = jax.nn.one_hot(batch.category, max_retrieval.N_CLASSES)
    items = jnp.concatenate([jnp.asarray(batch.priority)[..., None], one_hot], axis=-1)
    return items, jnp.asarray(batch.query)[:, None, None], jnp.asarray(batch.label)


def peer() -> Any:
    """The next steps of the plain loop."""
    network, optimiser = Network(), optax.adam(training.LEARNING_RATE)
    items, query, _ = inputs(max_retrieval.sample(0, 16, training.BATCH))
    params = network.init(jax.random.key(0), items, query)
    state = optimiser.init(params)

    def loss(params: Any, items: jax.Array, query: jax.Array, label: jax.Array) -> jax.Array:
        logits = network.apply(params, items, query)
        fit = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
        kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
        return fit + training.L2 / 2 * sum(jnp.sum(kernel**2) for kernel in kernels)

    @jax.jit
    def update(params: Any, state: Any, *batch: jax.Array) -> tuple[Any, Any]:
        change, state = optimiser.update(jax.grad(loss)(params, *batch), state)
        return optax.apply_updates(params, change), state

    (low, high), numbers = training.SIZES, itertools.count()

    def steps() -> None:
        nonlocal params, state
        for step in itertools.islice(numbers, STEPS):
            size = int(np.random.default_rng([0, step]).integers(low, high + 1))
            batch = inputs(max_retrieval.sample([1, step], size, training.BATCH))
            params, state = update(params, state, *batch)
        jax.block_until_ready(params)

    return steps


def measure() -> None:
    loop, numbers = peer(), itertools.count()
    with TemporaryDirectory() as folder:

        def ours() -> None:
            training.train(0, STEPS, Path(folder) / str(next(numbers)), lambda progress: None)

        took = medians({"plain Flax and optax": loop, "train_heads": ours}, ROUNDS)
    for name, seconds in took.items():
        print(f"{name:>20}  {STEPS / seconds:6.0f} steps/s")
    print(f"ratio {took['plain Flax and optax'] / took['train_heads']:.2f}")


if __name__ == "__main__":
    answer_help(__doc__)
    on_cores(measure)
