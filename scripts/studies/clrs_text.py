#!/usr/bin/env python
"""The paper's CLRS-Text experiment in small: prompts longer than those of training.

scripts/studies/clrs_text.py             # all steps below, in this order
scripts/studies/clrs_text.py get         # the samplers of dm-clrs, from PyPI, into runs/clrs-text
scripts/studies/clrs_text.py train       # seven models, into scripts/weights
scripts/studies/clrs_text.py calibrate   # collects prompts, and fits through each model
scripts/studies/clrs_text.py tune        # trains further, with the fit and without
scripts/studies/clrs_text.py measure     # scripts/results/clrs-text.json and its figure
scripts/studies/clrs_text.py --markdown  # prints the tables of its page from the record

Existing results are kept, and interrupted training is resumed.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from clrs_text_results import LABELS, draw_record, gathered, markdown
from clrs_text_task import (
    TASKS,
    TRAINED_LENGTHS,
    WHEELS,
    draw,
    draw_even,
    new_model,
    scores,
    train_into,
)
from small_models import load_model, on_all_cores
from study import RESULTS, RUNS, WEIGHTS, download, kept, parse, run_calibrate, write_record
from transformers import LlamaForCausalLM

import calibrate
from calibrate.evidence.baselines import log_size_rule, one_constant
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit
from calibrate.transformers import apply

RESULT = RESULTS / "clrs-text.json"
RUN = RUNS / "clrs-text"
PACKAGES = ("dm-clrs==2.0.3", "chex==0.1.92", "toolz==1.2.0")  # Apache-2.0, Apache-2.0, BSD
SEEDS = (0, 1, 2)
STEPS, RATE = 3_000, 3e-3
TUNING_STEPS, TUNING_RATE = STEPS // 8, 5e-4
TRAINED_TOKENS = 98  # of the longest prompt with its answer in training
CALIBRATION_LENGTHS = (8, 16, 24, 32)  # up to twice the trained length
CALIBRATION_PROMPTS = 20  # of each task and length
KIND, FIT_STEPS = "log-size", 15  # lines in log n; steps of each form
OCTAVE = 128  # `--trained-up-to` counts tokens by powers of two
CONSTANTS = (1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3)
LENGTHS = (4, 8, 16, 24, 32, 48, 64)
PROMPTS = 100  # of each task, length and seed
# Of each arm: the model that it takes, and the rule in it.
ARMS = {
    "plain": ("plain", "plain"),
    "paper": ("plain", "paper"),
    "constant": ("plain", "constant"),
    "log-n": ("plain", "log-n"),
    "own": ("plain", "own"),
    "trained-paper": ("trained-paper", "paper"),
    "tuned": ("tuned", "plain"),
    "tuned-own": ("tuned-own", "own"),
    "rope": ("rope", "plain"),
}
TRAINED = {"plain": "plain", "trained-paper": "paper", "rope": "plain"}  # model: rule in training
TUNED = {"tuned": "plain", "tuned-own": "own"}
ONCE = ("rope",)  # of the first seed alone


def main() -> None:
    for name in parse(__doc__, markdown, RESULT, ["get", *STEPS]):
        if name == "get":
            download(WHEELS, *PACKAGES)
        else:
            on_all_cores(STEPS[name], trials(name))
        if name == "measure":
            write_result()


class Trial(NamedTuple):
    """One arm, or one model, of one seed."""

    seed: int
    arm: str

    @property
    def name(self) -> str:
        return f"clrs-text-{self.seed}-{self.arm}"

    @property
    def weights(self) -> Path:
        return WEIGHTS / self.name

    def kept(self, what: str) -> Path:
        """The file of a measurement."""
        return RUN / f"{self.name}-{what}.json"

    @property
    def plain(self) -> "Trial":
        return Trial(self.seed, "plain")


def trials(step: str) -> list[Trial]:
    arms = {"train": TRAINED, "calibrate": ["plain"], "tune": TUNED, "measure": ARMS}[step]
    return [
        Trial(seed, arm) for arm in arms for seed in (SEEDS[:1] if arm in ONCE else SEEDS)
    ]  # fmt: skip


def train_model(trial: Trial) -> None:
    if not trial.weights.exists():
        model = apply_in_training(new_model(trial.seed), TRAINED[trial.arm], trial)
        checkpoint = RUN / f"{trial.name}.checkpoint"
        train_into(
            trial.weights, model, "train", trial.seed, STEPS, RATE, checkpoint,
            with_gaps=trial.arm != "rope",
        )  # fmt: skip


def tune_model(trial: Trial) -> None:
    """Trains a plain model further, under a rule."""
    if not trial.weights.exists():
        model = apply_in_training(load_model(trial.plain.weights), TUNED[trial.arm], trial)
        checkpoint = RUN / f"{trial.name}.checkpoint"
        train_into(trial.weights, model, "tune", trial.seed, TUNING_STEPS, TUNING_RATE, checkpoint)


def apply_in_training(model: LlamaForCausalLM, rule: str, trial: Trial) -> LlamaForCausalLM:
    return model if rule == "plain" else apply(model, rule_of(rule, trial.seed))


def rule_of(name: str, seed: int) -> Fit:
    if name == "constant":
        return one_constant(best_constant(Trial(seed, "plain")))
    if name == "own":
        return calibrate.load(own_fit(seed)) if own_fit(seed).exists() else calibrate.identity()
    return {
        "plain": calibrate.identity(), "paper": calibrate.load("paper@1"),
        "log-n": log_size_rule(TRAINED_TOKENS),
    }[name]  # fmt: skip


def own_fit(seed: int) -> Path:
    """The coefficient file of a model, beside its weights; none if no head is worth a fit."""
    return Trial(seed, "plain").weights / "fit.json"


def calibrate_model(trial: Trial) -> None:
    """Collects prompts and fits through the model with the commands of the README."""
    done = RUN / f"{trial.name}-fitted"
    if own_fit(trial.seed).exists() or done.exists():
        return
    prompts, examples = RUN / f"{trial.name}-prompts.jsonl", RUN / f"{trial.name}-examples"
    if not prompts.exists():
        lines = "\n".join(calibration_lines(trial.seed))
        write_atomically(prompts, lines.encode())
    run_calibrate("model", "collect", "--model", trial.weights, "--prompts", prompts,
                  "--out", examples, "--dtype", "float32")  # fmt: skip
    run_calibrate("model", "fit", examples, "--name", trial.name, "--store", RUN / "fits",
                  "--kind", KIND, "--trained-up-to", OCTAVE, "--steps", FIT_STEPS)  # fmt: skip
    if (RUN / "fits" / trial.name).exists():
        write_atomically(own_fit(trial.seed), (RUN / "fits" / trial.name / "1.json").read_bytes())
    done.touch()


def calibration_lines(seed: int) -> list[str]:
    pairs = [
        pair for task in TASKS for n in CALIBRATION_LENGTHS
        for pair in draw_even("calibrate", seed, task, n, CALIBRATION_PROMPTS)
    ]  # fmt: skip
    lines = [json.dumps({"prompt_ids": prompt, "answer_ids": answer}) for prompt, answer in pairs]
    return list(dict.fromkeys(lines))  # a prompt twice is refused


def best_constant(trial: Trial) -> float:
    """The constant with the most right answers on the prompts for calibration."""

    def share(beta: float) -> float:
        model = apply(load_model(trial.weights), one_constant(beta))
        found = scores_of(model, "calibrate", trial.seed, CALIBRATION_LENGTHS, CALIBRATION_PROMPTS)
        return float(np.mean([right for task in found.values() for right in task["right"]]))

    found = kept(trial.kept("constants"), lambda: [share(beta) for beta in CONSTANTS])
    return CONSTANTS[int(np.argmax(found))]


def measure_arm(trial: Trial) -> None:
    name, rule = ARMS[trial.arm]

    def measure():
        model = load_model(Trial(trial.seed, name).weights)
        applied = apply(model, rule_of(rule, trial.seed))
        return scores_of(applied, "measure", trial.seed, LENGTHS, PROMPTS)

    kept(trial.kept("scores"), measure)


def scores_of(
    model: LlamaForCausalLM, stream: str, seed: int, lengths: tuple[int, ...], count: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Task -> for each length and prompt, whether all tokens are right, and mean log p of one."""
    found = {}
    for task in TASKS:
        of_task = [scores(model, draw(stream, seed, task, n, count)) for n in lengths]
        found[task] = {
            key: [scored[key] for scored in of_task] for key in ("right", "log_p")
        }  # fmt: skip
    return found


def write_result() -> None:
    """Writes the record, and draws its figure."""
    scored = {
        arm: [
            json.loads(trial.kept("scores").read_text())
            for trial in trials("measure") if trial.arm == arm
        ]
        for arm in LABELS
    }  # fmt: skip
    record = {
        "seeds": SEEDS, "lengths": LENGTHS, "prompts": PROMPTS, "trained": TRAINED_LENGTHS,
        "best_constant": [best_constant(Trial(seed, "plain")) for seed in SEEDS],
        "own": [described(rule_of("own", seed)) for seed in SEEDS],
        "arms": gathered(scored),
    }  # fmt: skip
    draw_record(RESULT.with_suffix(".png"), write_record(RESULT, record))


def described(own: Fit) -> dict:
    return {
        "kind": own.rule.kind,
        "verdict": own.verdict or "no head has a significant gain",
        "heads": [[e.layer, e.head, e.coefficients] for e in own.entries],
    }


STEPS = {
    "train": train_model, "calibrate": calibrate_model, "tune": tune_model, "measure": measure_arm
}  # fmt: skip

if __name__ == "__main__":
    main()
