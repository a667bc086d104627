"""Benchmark of growth: what calls, commands and passes cost against the size of their input.

Prints processor milliseconds on one core at each size, the slope on log axes (1 is linear), and
what one more costs between the two largest sizes. For a command it is a second run in one process,
so without compilation; a pass through a model keeps the input of each layer for its gradient.

    python scripts/bench_growth.py [runtime | commands | model]     # all of them, some minutes
    python scripts/bench_growth.py --memory                         # peaks of passes
"""

import os

os.environ["NPROC"] = "1"  # XLA's thread pool; read when JAX starts
os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_attention import arrays
from bench_scale import write_logits
from kinds import FITS
from peaks import ASKED, show_peaks
from timing import answer_help

SIZES: dict[str, Any] = {
    "commands": {"heads": (5, 25, 50), "rows": (500, 2_000, 32_000), "items": (64, 512, 4_096)},
    "model": {"layers": (2, 4, 8), "width": (256, 512, 1_024), "heads": (4, 8, 16)},
    "tokens": (256, 512, 1_024, 2_048),
    "softmax": (1_024, 4_096, 16_384),
    "attention": (1_024, 2_048, 4_096),
}
# What does not vary: rows of each head; a Llama's sizes.
GIVEN = {"heads": 5, "rows": 500, "items": 64}
TOKENS, LAYERS, WIDTH, VOCABULARY = 512, 4, 512, 1_000
KINDS = ("constant", "entropy-and-size")


def least(call: Callable[[], Any], rounds: int = 3) -> float:
    """Milliseconds of this process, after a call to warm up."""
    times = [time.process_time()]
    for _ in range(1 + rounds):
        call()
        times.append(time.process_time())
    return 1e3 * float(np.diff(times)[1:].min())


def show(name: str, unit: str, costs: dict[int, float]) -> None:
    sizes, cost = np.array([*costs]), np.array([*costs.values()])
    slope = np.polyfit(np.log(sizes), np.log(cost), 1)[0]
    more = (cost[-1] - cost[-2]) / (sizes[-1] - sizes[-2])
    each = ", ".join(f"{size:,}: {ms:,.3g}" for size, ms in costs.items())
    print(f"{name:>34}, {unit}  {each}; slope {slope:.2f}, one more {more:.2g} ms", flush=True)


def runtime() -> None:
    """Softmax of 64 rows against items, and one head of causal attention against tokens."""
    import jax
    import torch

    import calibrate.attention
    import calibrate.torch

    fit = {"coefficients": FITS["by entropy"]}
    functions: dict[str, Callable[..., Any]] = {
        "softmax, JAX, stock": jax.nn.softmax,
        "softmax, JAX, ours": partial(calibrate.adaptive_softmax, **fit),
        "softmax, PyTorch, stock": partial(torch.softmax, dim=-1),
        "softmax, PyTorch, ours": partial(calibrate.torch.adaptive_softmax, **fit),
        "attention, JAX, stock": jax.nn.dot_product_attention,
        "attention, JAX, ours": partial(calibrate.attention.dot_product_attention, **fit),
        "attention, PyTorch, stock": torch.nn.functional.scaled_dot_product_attention,
        "attention, PyTorch, ours": partial(calibrate.torch.scaled_dot_product_attention, **fit),
    }

    def prepared(name: str, n: int) -> Callable[[], Any]:
        function, in_jax = functions[name], "JAX" in name
        if name.startswith("softmax"):
            given = [np.random.default_rng(0).standard_normal((64, n)).astype(np.float32)]
        else:
            given = arrays(n, n, length_first=in_jax, heads=1)
            function = partial(function, is_causal=True)
        if not in_jax:
            return partial(function, *map(torch.from_numpy, given))
        compiled, inputs = jax.jit(function), [jax.device_put(x) for x in given]
        return lambda: jax.block_until_ready(compiled(*inputs))

    for name in functions:
        sizes = SIZES[name.split(",")[0]]
        show(name, "items or tokens", {n: least(prepared(name, n), 9) for n in sizes})


def commands() -> None:
    """Collect, fit, diagnose and evaluate logits on disk."""
    for unit, sizes in SIZES["commands"].items():
        costs = dict[str, dict[int, float]]()
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                write_logits(Path("logits"), *(GIVEN | {unit: size}).values())
                for name, ms in of_commands():
                    costs.setdefault(name, {})[size] = ms
        for name, found in costs.items():
            show(name, unit, found)


def of_commands() -> Iterator[tuple[str, float]]:
    """Each command's milliseconds, in a folder with logits."""
    from calibrate.cli.main import app

    for command in (
        "collect --logits logits --max-bytes 10000000000 --out run{}",
        "fit run0 --store fits --name fit{}",
        "diagnose run0 --out diagnosis{}",
        "evaluate --logits logits --store fits --fits fit0",
    ):
        numbers = iter("01")

        def call(command=command, numbers=numbers) -> None:
            words, quiet = command.format(next(numbers)), contextlib.redirect_stdout(io.StringIO())
            with quiet, contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    app(words.split(), standalone_mode=False)
                except SystemExit as failure:
                    sys.exit(f"{words}: exit {failure.code}\n{said.getvalue()}")

        yield command.split()[0], least(call, 1)


def prepared(
    what: str, kind: str = KINDS[0], tokens: int = TOKENS, layers: int = LAYERS,
    width: int = WIDTH, heads: int = WIDTH // 64, vocabulary: int = VOCABULARY, answer: int = 1,
) -> Callable[[], Any]:  # fmt: skip
    """A pass of one example through a model, as fits make it: for scores, or a gradient."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrate.files.examples import Cell, Example, ExampleSet
    from calibrate.model import passes
    from calibrate.model.forms import Form
    from calibrate.model.passes import Memo, Passes
    from calibrate.transformers.betas import head_betas

    passes.MOST_KEPT_BYTES = 0
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=vocabulary,
        max_position_embeddings=tokens,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    drawn = np.random.default_rng(0).integers(0, vocabulary, tokens).astype(np.int32)
    example = Example(drawn, max(1, tokens - answer), 0)
    of_one = ExampleSet((Cell("random", tokens, False),), (example,))
    form = Form(kind, "head", np.log(tokens) - 1, np.log(tokens))

    def call() -> Any:
        with head_betas(model) as found:
            passes, numbers = Passes(model, found, of_one, Memo(None)), form.zeros(found.heads)
            if what == "scores":
                return passes.scores(form, numbers, [0])
            return passes.gradient(form, numbers, [0], np.ones(1))

    return call


def model() -> None:
    """Passes through a Llama with random weights."""
    for what in ("scores", "gradient"):
        for unit, sizes in SIZES["model"].items():
            show(what, unit, {n: least(prepared(what, **{unit: n})) for n in sizes})
        for kind in KINDS:
            of_kind = {n: least(prepared(what, kind, n)) for n in SIZES["tokens"]}
            show(f"{what}, {kind}", "tokens", of_kind)


def memory() -> None:
    """Peaks of one pass: its answer is one token, or, as of text, all of them."""
    rows: dict[str, dict[str, Any]] = {}
    for what in ("scores", "gradient"):
        for kind in KINDS:
            rows[f"{what}, {kind}"] = {
                f"{n:,} tokens": partial(prepared, what, kind, n) for n in (512, 1_024, 2_048)
            }
        rows[f"{what}, text of 512 tokens"] = {
            f"of {v:,} words": partial(prepared, what, vocabulary=v, answer=TOKENS)
            for v in (1_000, 16_000, 64_000)
        }
    show_peaks(f"a Llama of {LAYERS} layers, width {WIDTH}, {WIDTH // 64} heads", rows)


if __name__ == "__main__":
    answer_help(__doc__)
    for word in sys.argv[1:2] or ["runtime", "commands", "model"]:
        {ASKED: memory, "runtime": runtime, "commands": commands, "model": model}[word]()
