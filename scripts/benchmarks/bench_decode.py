"""Benchmark of a model's decoding and prefill through the runtime, against stock attention.

python scripts/benchmarks/bench_decode.py         # a table, on one core, two and all
python scripts/benchmarks/bench_decode.py --here  # the same on the device that a process finds

The model has the shape of SmolLM2-135M, and random weights: 30 layers of nine heads.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from timing import Row, answer_help, summarise

from calibrate.core.rule import CONSTANT, RuleForm
from calibrate.store.coefficient_fields import MAX_ENTROPY
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

LAYERS, HEADS, TOKENS = 30, 9, 512
DOMAIN = (0.0, MAX_ENTROPY)


def fits() -> dict[str, Fit]:
    """A rule of each kind for each head."""
    rng = np.random.default_rng(0)
    betas = rng.uniform(0.8, 1.2, (LAYERS, HEADS))

    def fit_for_heads(rule: RuleForm, *others: float) -> Fit:
        domain = () if rule.kind == CONSTANT else DOMAIN
        entries = [
            Entry((*others, float(betas[layer, head])), domain, layer, head)
            for layer in range(LAYERS)
            for head in range(HEADS)
        ]
        return Fit(rule, tuple(entries))

    return {
        "constants": fit_for_heads(RuleForm.constant(0.25, 16.0)),
        "log n": fit_for_heads(RuleForm.log_size(0.25, 16.0), 0.01),
        "polynomials": fit_for_heads(RuleForm(0.0, 0.5, 2.0), 0.0, 0.0, 0.0, 0.01),
    }


def model_and_tokens() -> tuple[Any, Any]:
    """The model, with random weights, and a prompt."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=64 * HEADS, intermediate_size=1536, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=3, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(device)
    return model, torch.arange(TOKENS, device=device)[None] % 1024


def rows_of_transformers() -> Iterator[Row]:
    import torch

    from calibrate.transformers import apply

    model, tokens = model_and_tokens()
    attentions = "sdpa", "calibrate"
    for name, fit in fits().items():
        apply(model, fit)
        with torch.no_grad():
            calls = (decoding(model, x, tokens) for x in attentions)
            yield Row(f"decoding, {name}", "sdpa", *calls)
    with torch.no_grad():  # by the last fit, of polynomials: the others cost nothing here
        reading = (partial(prefill, model, x, tokens) for x in attentions)
        yield Row(f"reading {TOKENS} tokens, {name}", "sdpa", *reading)


def prefill(model: Any, attention: str, tokens: Any) -> None:
    """A pass of all tokens."""
    model.config._attn_implementation = attention
    model(tokens, use_cache=False)
    wait(model)


def decoding(model: Any, attention: str, tokens: Any) -> Callable[[], None]:
    """A function that decodes one token after the others, again and again."""
    cache = model(tokens, use_cache=True).past_key_values

    def decode() -> None:
        model.config._attn_implementation = attention
        model(tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)
        wait(model)

    return decode


def wait(model: Any) -> None:
    """Waits for a GPU."""
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    answer_help(__doc__)
    summarise(rows_of_transformers, rounds=9)
