#!/usr/bin/env python
"""Comparison of llama.cpp with our own runtime, on SmolLM2 with a fitted rule.

scripts/studies/smollm2_serving.py smollm2 --store runs/smollm2/fits    # a fit of smollm2.py
scripts/studies/smollm2_serving.py                                      # two made-up fits

Needs the step `get` of smollm2.py, and the extra `engines`. Exports the fit, and asks for greedy
answers to retrieval prompts: our runtime, and llama.cpp with the same weights in float32 and its
plain arithmetic. With --packed, llama.cpp has the 4-bit file that the weights come from and its
default arithmetic, which rounds activations to 8 bits: then answers differ without a fit too.
Prints a line of JSON for each fit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import torch
from llama_cpp import LlamaCpp
from smollm2_files import MODEL, RUNS

import calibrate
from calibrate.core.rule import Rule
from calibrate.datasets.examples import Example
from calibrate.prompts.make_examples import ExampleSpec, make_examples
from calibrate.storage.atomic_io import new_file
from calibrate.store.entry import MAX_ENTROPY, Entry
from calibrate.store.fit import Fit
from calibrate.store.publishing import publish
from calibrate.transformers import apply
from calibrate.transformers.folders import ModelFolder

TEMPLATES = ("json", "list", "questions", "phones")  # held out from its fit
HEADS = {(layer, head): 0.5 + (5 * layer + 3 * head) % 7 / 4 for layer in range(6, 24, 3)
         for head in range(9)}  # fmt: skip
MADE_UP = {"constants": 0.0, "by-log-n": 0.06}  # kappa / b


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    wanted = ExampleSpec(
        templates=TEMPLATES, lengths=(options.length,), count=options.examples, seed=options.seed
    )
    examples = make_examples(wanted, ModelFolder(MODEL))[0].examples
    right = [example.tokens[example.start :].tolist() for example in examples]
    file = packed_file() if options.packed else plain_file()
    found = {
        "ours": our_answers(None, examples),
        "llama.cpp": engine_answers(file, examples, options.packed),
    }
    print(json.dumps({
        "fit": None, "file": file.name, "xllamacpp": version("xllamacpp"), **counts(found, right),
    }))  # fmt: skip
    original = found["llama.cpp"]
    with tempfile.TemporaryDirectory() as folder:
        store = options.store if options.fit else Path(folder)
        for name in [options.fit] if options.fit else [made_up(name, store) for name in MADE_UP]:
            fit, out = calibrate.load(name, store), Path(folder) / "exported.gguf"
            export(fit.reference, store, file, out)
            found = {
                "ours": our_answers(fit, examples),
                "llama.cpp": engine_answers(out, examples, options.packed),
            }
            out.unlink()
            changed = len(examples) - matching(found["llama.cpp"], original)
            said = {"fit": fit.reference, **counts(found, right), "changed by the fit": changed}
            print(json.dumps(said))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fit", nargs="?", help="NAME or NAME@VERSION")
    parser.add_argument("--store", type=Path, default=RUNS / "fits")
    parser.add_argument("--examples", type=int, default=5, help="of each of the four templates")
    parser.add_argument("--length", type=int, default=250, help="of prompts, in tokens")
    parser.add_argument("--packed", action="store_true", help="serve the 4-bit file")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; 0 is that of the fit")
    return parser.parse_args()


def counts(found: dict[str, list[list[int]]], right: list[list[int]]) -> dict[str, object]:
    return {
        "prompts": len(right),
        "same": {name: matching(answers, found["ours"]) for name, answers in found.items()},
        "right": {name: matching(answers, right) for name, answers in found.items()},
    }  # fmt: skip


def matching(first: list[list[int]], second: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))


def packed_file() -> Path:
    (file,) = (RUNS / "package" / "unpacked").glob("*.gguf")
    return file


def plain_file() -> Path:
    """The weights of the packed file in float32, which are those of the folder."""
    out = RUNS / f"{MODEL.name}.F32.gguf"
    if out.exists():
        return out
    packed = gguf.GGUFReader(packed_file())
    with new_file(out) as path:
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in packed.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)
        for tensor in packed.tensors:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return out


def made_up(name: str, store: Path) -> str:
    """The reference of a fit that sharpens some heads and blunts others, good for nothing."""
    ratio = MADE_UP[name]
    of_head = {(layer, head): HEADS.get((layer, head), 1.0) for layer in range(30)
               for head in range(9)}  # fmt: skip
    entries = [
        Entry((ratio * b, b), (0.0, MAX_ENTROPY), layer, head)
        for (layer, head), b in of_head.items()
    ]
    fit = Fit(Rule.log_size(0.05, 64.0), tuple(entries), name=name)
    return publish(fit, store)[0].reference


def export(reference: str, store: Path, model: Path, out: Path) -> None:
    words = ["export", reference, "--store", store, "--model", model, "--out", out, "--any-model"]
    subprocess.run(
        [sys.executable, "-m", "calibrate", *map(str, words)], check=True, stdout=sys.stderr
    )


def our_answers(fit: Fit | None, examples: list[Example]) -> list[list[int]]:
    """Greedy ones; without a fit, of the model as it is."""
    model = ModelFolder(MODEL).load("float32")
    if fit:
        apply(model, fit)
    return answers_of(model, examples)


def answers_of(model: Any, examples: list[Example]) -> list[list[int]]:
    answers = []
    for example in examples:
        prompt = torch.from_numpy(example.tokens[: example.start]).long()[None]
        count = len(example.tokens) - example.start
        found = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
            min_new_tokens=count, do_sample=False,
        )  # fmt: skip
        answers.append(found[0, example.start :].tolist())
    return answers


def engine_answers(file: Path, examples: list[Example], fast: bool) -> list[list[int]]:
    context = max(len(example.tokens) for example in examples) + 16
    engine = LlamaCpp(file, context, fast)
    return [
        engine.continued(example.tokens[: example.start], len(example.tokens) - example.start)
        for example in examples
    ]


if __name__ == "__main__":
    main()
