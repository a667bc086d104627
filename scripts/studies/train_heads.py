#!/usr/bin/env python
"""Trains max-retrieval heads as in appendix A.4 of the paper.

scripts/studies/train_heads.py --seeds 0 1 2 3 --steps 100000 --jobs 2

The same command continues from the last checkpoint; the weights are the same bytes. A seed takes
about five minutes of one core. Needs optax.

A batch holds 128 sets of one size drawn from 5..16: each size has a step function of its own, so
there is no padding. Adam at 1e-3, cross-entropy plus weight decay.

The paper does not define its L2 term of lambda = 0.001. Here it is lambda/2 * |W|^2 over the weight
matrices without the biases: of the three definitions tried, the one that comes closest to the
paper's baseline accuracy of 53.8 % at n = 1,024. It gives 54.3 % over ten seeds.

Each seed is trained in a process of its own on one thread, because the number of threads
changes the order of float32 sums: a seed's bytes depend on nothing but the seed.
"""

import argparse
import functools
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from calibrate.errors import CalibrateError
from calibrate.parallel import Jobs, run
from calibrate.rows import max_retrieval as head
from calibrate.storage.atomic_io import remove_leftovers
from calibrate.storage.npz import read_arrays, write_arrays

BATCH = 128
LEARNING_RATE = 1e-3
L2 = 1e-3
STEPS_PER_LOG_ROW = 1_000
ROWS_PER_CHECKPOINT = 5  # at the end of a row, so that no row is cut in two
SECONDS_PER_REPORT = 5.0


class _State(NamedTuple):
    """All that the next step depends on, and the log so far: one checkpoint."""

    step: int
    params: head.Params
    optimiser: Any
    log: list[tuple[float, ...]]  # (step, cross-entropy, accuracy, squared norm of the kernels)


def weights_path(folder: Path, seed: int) -> Path:
    """Where the weights of a seed are."""
    return folder / f"max-retrieval-{seed}.npz"


def print_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train_seeds(
    seeds: Sequence[int],
    steps: int,
    folder: Path,
    jobs: int,
    report: Callable[[str], None] = print_on_stderr,
) -> list[Path]:
    """Trains heads, `jobs` at a time, and returns the paths of their weights.

    Args:
      seeds: one head each; its weights do not depend on the others.
      steps: gradient steps; a finished head of fewer steps is carried on from its checkpoint.
      folder: of the weights, max-retrieval-SEED.npz, and their checkpoints.
      report: called with a line in the worker process every few seconds.
    Raises:
      CalibrateError: optax is absent, a file cannot be read or written, a finished head would be
        overwritten, or a worker process died.
    """
    _optimiser()
    tasks = [partial(train, seed, steps, folder.absolute(), report) for seed in seeds]
    run(tasks, Jobs(jobs, threads=1))
    return [weights_path(folder, seed) for seed in seeds]


def training_batch(seed: int, step: int) -> head.Batch:
    """The sets of a step, all of one size."""
    least, most = head.TRAINED_SIZES
    size = int(np.random.default_rng([seed, step, 0]).integers(least, most + 1))
    return head.sample([seed, step, 1], size, BATCH)


def train(
    seed: int,
    steps: int,
    folder: Path,
    report: Callable[[str], None],
    batch_at: Callable[[int, int], head.Batch] = training_batch,
    steps_per_log_row: int = STEPS_PER_LOG_ROW,
) -> None:
    """Trains one head in this process, from its checkpoint if there is one.

    `batch_at` is called with the seed and the step, from 0.
    """
    final = weights_path(folder, seed)
    checkpoint = final.with_suffix(".checkpoint.npz")
    for path in (final, checkpoint):
        remove_leftovers(path.parent, re.escape(path.name))
    done = _steps_done(final)
    if done == steps:
        return
    if checkpoint.exists():
        state = _restore(checkpoint)
    else:
        params = initial_params(seed)
        state = _State(0, params, _optimiser().init(params), [])
    if done > state.step or max(done, state.step) > steps:
        raise CalibrateError(
            f"{folder} has seed {seed} with {max(done, state.step)} steps, which {steps} steps "
            f"would overwrite; choose another folder"
        )
    state = _continue(state, seed, steps, checkpoint, report, batch_at, steps_per_log_row)
    write_arrays(final, {**head.flatten(state.params), **_log_arrays(state)})


def _continue(
    state: _State,
    seed: int,
    steps: int,
    checkpoint: Path,
    report: Callable[[str], None],
    batch_at: Callable[[int, int], head.Batch],
    steps_per_log_row: int,
) -> _State:
    update = _update_function()
    params, optimiser, log = state.params, state.optimiser, state.log
    pending: list[jax.Array] = []
    reported_at, reported_step = time.monotonic(), state.step
    for step in range(state.step, steps):
        params, optimiser, measured = update(params, optimiser, batch_at(seed, step))
        pending.append(measured)
        done = step + 1
        if done % steps_per_log_row == 0:
            log.append((done, *_mean(pending), float(_kernel_norm(params))))
            pending = []
        if done % (ROWS_PER_CHECKPOINT * steps_per_log_row) == 0:
            _save_checkpoint(checkpoint, _State(done, params, optimiser, log))
        elapsed = time.monotonic() - reported_at
        if elapsed > SECONDS_PER_REPORT or done == steps:
            loss, accuracy = _mean(pending) if pending else log[-1][1:3]
            rate = (done - reported_step) / max(elapsed, 1e-6)  # a clock may stand still
            report(
                f"seed {seed}  step {done:,}/{steps:,}  loss {loss:.4f}  "
                f"accuracy {accuracy:.2%}  {rate:.0f} steps/s"
            )
            reported_at, reported_step = time.monotonic(), done
    return _State(steps, params, optimiser, log)


def initial_params(seed: int) -> head.Params:
    """Flax's defaults: LeCun-normal kernels (truncated at two deviations), zero biases."""
    keys = jax.random.split(jax.random.key(seed), len(head.LAYERS))
    kernel = jax.nn.initializers.lecun_normal()
    return {
        layer: {"kernel": kernel(key, shape), "bias": jnp.zeros(shape[1])}
        for key, (layer, shape) in zip(keys, head.LAYERS.items(), strict=True)
    }


def _loss(params: head.Params, batch: head.Batch) -> tuple[jax.Array, jax.Array]:
    """Objective, and (cross-entropy, accuracy) of the batch."""
    attended = head.attention_logits(params, batch)
    scores = head.answer(params, attended, jax.nn.softmax(attended.logits))
    log_probs = jax.nn.log_softmax(scores)
    label = jnp.asarray(batch.label, jnp.int32)
    cross_entropy = -jnp.take_along_axis(log_probs, label[:, None], axis=1).mean()
    accuracy = (scores.argmax(axis=1) == label).mean()
    objective = cross_entropy + L2 / 2 * _kernel_norm(params)
    return objective, jnp.stack([cross_entropy, accuracy])


def _kernel_norm(params: head.Params) -> jax.Array:
    return sum((jnp.sum(layer["kernel"] ** 2) for layer in params.values()), jnp.zeros(()))


@functools.cache
def _update_function() -> Callable[..., tuple[head.Params, Any, jax.Array]]:
    optimiser = _optimiser()

    @jax.jit
    def update(
        params: head.Params, state: Any, batch: head.Batch
    ) -> tuple[head.Params, Any, jax.Array]:
        gradient, measured = jax.grad(_loss, has_aux=True)(params, batch)
        change, state = optimiser.update(gradient, state)
        return jax.tree.map(jnp.add, params, change), state, measured

    return update


def _optimiser() -> Any:
    try:
        import optax
    except ImportError:
        raise CalibrateError("optax is not installed; pip install optax") from None
    return optax.adam(LEARNING_RATE)


def _mean(pending: list[jax.Array]) -> tuple[float, float]:
    loss, accuracy = np.mean(np.asarray(pending, np.float64), axis=0)
    return float(loss), float(accuracy)


def _log_arrays(state: _State) -> dict[str, ArrayLike]:
    rows = np.asarray(state.log, np.float64).reshape(-1, 4)
    return {
        "steps": np.int64(state.step),
        "log/step": rows[:, 0].astype(np.int64),
        "log/cross_entropy": rows[:, 1],
        "log/accuracy": rows[:, 2],
        "log/kernel_squared_norm": rows[:, 3],
    }


def _save_checkpoint(path: Path, state: _State) -> None:
    leaves = jax.tree.leaves(state.optimiser)
    moments = {f"optimiser/{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    write_arrays(path, {**head.flatten(state.params), **_log_arrays(state), **moments})


def _restore(path: Path) -> _State:
    arrays = read_arrays(path)
    params = head.unflatten(arrays, path)
    fresh = _optimiser().init(params)
    leaves, structure = jax.tree.flatten(fresh)
    try:
        saved = [
            jnp.asarray(arrays[f"optimiser/{i}"].reshape(leaf.shape), leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        columns = ("step", "cross_entropy", "accuracy", "kernel_squared_norm")
        log = list(zip(*(arrays[f"log/{c}"].tolist() for c in columns), strict=True))
        step = int(arrays["steps"])
    except (KeyError, ValueError) as failure:
        raise CalibrateError(
            f"{path} is not a checkpoint ({failure}); delete it to start again"
        ) from None
    return _State(step, params, jax.tree.unflatten(structure, saved), log)


def _steps_done(path: Path) -> int:
    """Steps behind a weights file; 0 if there is none."""
    return int(read_arrays(path).get("steps", 0)) if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a head per seed")
    parser.add_argument("--steps", type=positive, default=100_000, help="gradient steps")
    parser.add_argument("--out", type=Path, default=Path("runs/train"),
                        help="folder of the weights and checkpoints")  # fmt: skip
    parser.add_argument("--jobs", type=positive, default=1, help="heads trained at once")
    options = parser.parse_args()
    print(f"training {options.steps:,} steps each; compiling first", file=sys.stderr, flush=True)
    try:
        paths = train_seeds(options.seeds, options.steps, options.out, options.jobs)
    except CalibrateError as failure:
        sys.exit(f"train_heads: {failure}")
    except KeyboardInterrupt:
        sys.exit("train_heads: interrupted; the same command continues")
    print(*paths, sep="\n")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


if __name__ == "__main__":
    main()
