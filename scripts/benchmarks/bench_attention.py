"""Benchmark of adaptive attention by a polynomial against stock attention: time and memory.

python scripts/benchmarks/bench_attention.py          # a table, on one core, two and all
python scripts/benchmarks/bench_attention.py --here   # the same on the devices that a process finds
python scripts/benchmarks/bench_attention.py --memory # peaks of memory at 16,384 tokens

A peak is over what there was before a call, its result included, in a process of its own on one
core; Linux only.
"""

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from timing import Row, answer_help, summarise

import calibrate


class Call(NamedTuple):
    """The shapes of a call."""

    name: str
    queries: int
    keys: int
    causal: bool
    with_gradients: bool = False
    batch: int = 1
    heads: int = 8
    width: int = 64


POLYNOMIAL = calibrate.load("paper")
LONG = 16_384
CALLS = (
    Call("2,048 tokens, causal", 2_048, 2_048, True, with_gradients=True),
    Call("4,096 tokens, causal", 4_096, 4_096, True),
    Call("one query, 16,384 keys", 1, LONG, False),
    Call("64 sequences of 16 tokens", 16, 16, False, with_gradients=True, batch=64),
)
# Whose peaks of memory are measured in PyTorch, of one head.
OF_TORCH = (
    "causal", "causal, compiled", "causal, gradients", "causal, compiled, gradients",
    "a mask", "a mask, gradients", "a bias", "a bias, gradients", "a bias, compiled",
    "a bias, compiled, gradients",
)  # fmt: skip


ON_ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "NPROC": "1",
    # What is freed goes back to the system, so that resident memory is what is in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
}


def arrays(call: Call, *, length_first: bool) -> list[np.ndarray]:
    """Queries, keys and values; heads before tokens unless `length_first`."""
    rng = np.random.default_rng(0)
    shapes = [(call.batch, n, call.heads, call.width) for n in (call.queries, call.keys, call.keys)]
    qkv = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return qkv if length_first else [np.ascontiguousarray(x.swapaxes(1, 2)) for x in qkv]


def gradients(function, **options):
    """In JAX, of the sum of squares by queries, keys and values."""
    import jax

    return jax.grad(lambda *qkv: (function(*qkv, **options) ** 2).sum(), argnums=(0, 1, 2))


def rows_of_jax() -> Iterator[Row]:
    import jax

    from calibrate.jax.attention import dot_product_attention

    own = partial(dot_product_attention, coefficients=POLYNOMIAL)
    for call in CALLS:
        kinds = (("", partial), (", with gradients", gradients))
        for what, wrap in kinds[: 1 + call.with_gradients]:
            qkv = jax.device_put(arrays(call, length_first=True))
            pair = [
                jax.jit(wrap(f, is_causal=call.causal)) for f in (jax.nn.dot_product_attention, own)
            ]
            calls = (lambda f=f, qkv=qkv: jax.block_until_ready(f(*qkv)) for f in pair)
            yield Row(f"JAX, {call.name}{what}", "jax.nn.dot_product_attention", *calls)


def call_in_torch(function, qkv, backward: bool, **given) -> None:
    """Calls it, perhaps with the gradients of the sum of squares; and waits for a GPU."""
    import torch

    out = function(*qkv, **given)
    if backward:
        torch.autograd.grad((out**2).sum(), qkv)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows_of_torch() -> Iterator[Row]:
    import torch

    from calibrate.torch import scaled_dot_product_attention

    stock = torch.nn.functional.scaled_dot_product_attention
    own = partial(scaled_dot_product_attention, coefficients=POLYNOMIAL)
    gpu = {"device": "cuda", "dtype": torch.bfloat16} if torch.cuda.is_available() else {}
    for call in CALLS:
        for what, backward in (("", False), (", with gradients", True))[: 1 + call.with_gradients]:
            qkv = [torch.tensor(x, **gpu) for x in arrays(call, length_first=False)]
            qkv = [x.requires_grad_(backward) for x in qkv]
            calls = (
                partial(call_in_torch, f, qkv, backward, is_causal=call.causal)
                for f in (stock, own)
            )
            yield Row(f"PyTorch, {call.name}{what}", "scaled_dot_product_attention", *calls)


def rows_of_transformers() -> Iterator[Row]:
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

    def forward(model):
        with torch.no_grad():
            model(tokens).logits[0, 0, 0].item()

    own = apply(copy.deepcopy(model), POLYNOMIAL)
    yield Row(
        "a Llama of 4 layers, 2,048 tokens", "sdpa", *(partial(forward, m) for m in (model, own))
    )


def prepared_in_jax(wrap, heads: int, is_own: bool) -> Callable[[], object] | int:
    """A compiled call; of several heads, by which stock attention takes 17 GB, XLA's own figure."""
    import jax

    from calibrate.jax.attention import dot_product_attention

    own = partial(dot_product_attention, coefficients=POLYNOMIAL)
    function = wrap(own if is_own else jax.nn.dot_product_attention, is_causal=True)
    qkv = arrays(Call("", LONG, LONG, True, heads=heads), length_first=True)
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

    own = partial(scaled_dot_product_attention, coefficients=POLYNOMIAL)
    function = own if is_own else torch.nn.functional.scaled_dot_product_attention
    function = torch.compile(function) if "compiled" in options else function
    backward = "gradients" in options

    def prepared(length: int) -> Callable[[], object]:
        qkv = [
            torch.tensor(x)
            for x in arrays(Call("", length, length, True, heads=1), length_first=False)
        ]
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
    """Prints the peaks, or that of a row and column that the last words name."""
    rows: dict[str, Callable[[bool], Any]] = {
        f"JAX, {name}, heads: {heads}": partial(prepared_in_jax, wrap, heads)
        for heads in (1, 8)
        for name, wrap in (("causal", partial), ("causal, gradients", gradients))
    }
    rows |= {f"PyTorch, {name}": partial(prepared_in_torch, name) for name in OF_TORCH}
    if sys.argv[-1] in ("stock", "ours"):
        row, column = sys.argv[-2:]
        prepared = rows[row](column == "ours")
        print(prepared if isinstance(prepared, int) else peak_bytes(prepared))
        return
    for row in rows:
        stock, ours = (measured(row, column) / 1e6 for column in ("stock", "ours"))
        print(f"{row:>40}: stock {stock:,.1f} MB; ours {ours:,.1f} MB, {ours / stock:.2g} times",
              flush=True)  # fmt: skip


def measured(row: str, column: str) -> int:
    ended = subprocess.run(
        [sys.executable, __file__, "--memory", row, column], env=os.environ | ON_ONE_CORE,
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return int(ended.stdout.splitlines()[-1])


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most resident memory during a call, over what there was before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    call()
    return 1024 * (kib("VmHWM") - before)


def kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    answer_help(__doc__)
    if "--memory" in sys.argv:
        memory()
    else:
        summarise(rows_of_jax, rows_of_torch, rows_of_transformers, rounds=5)
