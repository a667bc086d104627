#!/usr/bin/env python
"""The rule on output logits: perplexity of SmolLM2-135M-Instruct on text, before and after a fit.

scripts/studies/smollm2.py get       # the model
scripts/studies/output_logits.py     # writes scripts/results/output-logits.json, prints its table

Rows are next-token logits over the vocabulary. The rule is fitted to one half of Python's
documentation and evaluated on the other half and on docstrings of NumPy, which are another domain.
"""

import json
import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from smollm2 import prose
from smollm2_files import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

import calibrate
from calibrate.transformers.output_logits import AdaptiveTemperature

OUT = Path(__file__).parents[1] / "results" / "output-logits.json"
N_PARAGRAPHS, N_TOKENS = 24, 64  # of a set of rows; tokens of a paragraph, at most
KINDS = ("constant", "polynomial")


def logits_of(model, tokenizer, paragraphs):
    """Next-token logits (rows, vocabulary), targets, and the number of each row's paragraph."""
    logits, targets, groups = [], [], []
    for i, text in enumerate(paragraphs[:N_PARAGRAPHS]):
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : N_TOKENS + 1]
        with torch.no_grad():
            logits.append(model(ids).logits[0, :-1].float().numpy())
        targets.append(ids[0, 1:].numpy())
        groups.append(np.full(len(targets[-1]), i))
    return np.concatenate(logits), np.concatenate(targets), np.concatenate(groups)


def nll(logits, target, processor=None):
    """(rows,) nats."""
    z = torch.tensor(logits)
    z = z if processor is None else processor(None, z)
    return -torch.log_softmax(z, -1)[torch.arange(len(z)), torch.tensor(target)].numpy()


def gain(before, after, groups):
    """The mean gain in nats, and its standard error over paragraphs."""
    gains = before - after
    sums = np.bincount(groups, gains - gains.mean())
    return float(gains.mean()), float(np.sqrt((sums**2).sum()) / len(gains))


def main():
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    topics = pydoc_data.topics.topics
    fitted, held_out = (prose([topics[k] for k in sorted(topics)[i::2]]) for i in range(2))
    held_out = [text for text in held_out if text not in set(fitted)]
    functions = prose([d for x in sorted(vars(np)) if isinstance(d := getattr(np, x).__doc__, str)])
    z, target, group = logits_of(model, tokenizer, fitted)
    record = {"rows": len(z), "vocabulary": z.shape[1], "fits": {}}
    tests = {
        "documentation": logits_of(model, tokenizer, held_out),
        "docstrings of NumPy": logits_of(model, tokenizer, functions),
    }
    for kind in KINDS:
        fit = calibrate.fit(z, target, group=group, kind=kind, name=f"output-{kind}")
        of_kind = {"coefficients": fit.coefficients, "verdict": fit.verdict}
        for name, (logits, right, groups) in tests.items():
            before, after = nll(logits, right), nll(logits, right, AdaptiveTemperature(fit))
            mean, error = gain(before, after, groups)
            of_kind[name] = {
                "rows": len(right),
                "perplexity_before": float(np.exp(before.mean())),
                "perplexity_after": float(np.exp(after.mean())),
                "gain": mean,
                "standard_error": error,
            }
            print(kind, name, of_kind[name])
        record["fits"][kind] = of_kind
    OUT.write_text(json.dumps(record, indent=1, default=list) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
