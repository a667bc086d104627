#!/usr/bin/env python
"""Calibration of a Transformer whose heads serve two kinds of query.

scripts/studies/two_queries.py             # all steps below, in this order
scripts/studies/two_queries.py train       # six models, into scripts/weights
scripts/studies/two_queries.py calibrate   # capture, collect, fit: runs/two-queries
scripts/studies/two_queries.py through     # collect and fit through the model: runs/two-queries
scripts/studies/two_queries.py tune        # trains further with a rule on: runs/two-queries
scripts/studies/two_queries.py measure     # scripts/results/two-queries.json and its figure
scripts/studies/two_queries.py --markdown  # prints the tables of its page from the record

Existing results are kept. On two cores training takes 17 minutes, the rest 25.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from small_models import load_model, on_all_cores
from study import (
    RESULTS,
    RUNS,
    WEIGHTS,
    kept,
    mean_and_error,
    parse,
    run_calibrate,
    table,
    with_errors,
    write_record,
)
from transformers import LlamaForCausalLM
from two_queries_task import (
    ANSWER,
    KINDS,
    TRAINED_SIZES,
    Prompts,
    accuracy,
    answers,
    new_model,
    prompts_of,
    train_into,
)

import calibrate
from calibrate.core.rule import LOG_SIZE
from calibrate.evidence.baselines import log_size_rule, one_constant
from calibrate.evidence.evidence import BASELINE
from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure, sizes_axis
from calibrate.store.fit import Fit
from calibrate.transformers import apply, capture
from calibrate.transformers.attention import attend_with, register

RESULT = RESULTS / "two-queries.json"
RUN = RUNS / "two-queries"
STORE = RUN / "fits"
SEEDS = (0, 1, 2)
HEADS = (2, 4)  # of each layer
TUNED_HEADS = 2  # of the models that are trained further
STEPS, RATE = 4_000, 2e-3
TUNING_STEPS, TUNING_RATE = 500, 3e-4
CALIBRATION_SIZES = [8 << i for i in range(7)]  # up to 16 times the trained size
CALIBRATION_PROMPTS = 300
SIZES = [TRAINED_SIZES[1] << i for i in range(6)]  # 1 to 32 times the trained size
PROMPTS = 256
TRAINED_TOKENS = 64  # prompts count by powers of two, and the largest in training has 33
THROUGH = "-through"
CONSTANTS = (1, 1.25, 1.5, 2, 2.5, 3, 4)
# Kind and size of the columns of the tables; at 32 items every arm answers "one".
COLUMNS = [("one", 512), ("one", 1_024), ("many", 32), ("many", 512), ("many", 1_024)]
SHOWN = {  # in the figure, with their styles
    BASELINE: STYLES[BASELINE],
    "paper": STYLES["paper"],
    "log-n": STYLES["log-n"],
    "constant": STYLES["constant"],
    "own": STYLES["own"],
    "through": STYLES["log-size"],
}
TUNED = {BASELINE: "tuned", "paper": "tuned-paper", "own": "tuned-own"}
LABELS = {
    BASELINE: "baseline",
    "paper": "the paper's published polynomial, every head",
    "log-n": "log n / log 33, every head",
    "constant": "grid constant, every head",
    "own": "default polynomial, selected heads",
    "through": "log-size, fitted through the model",
    "oracle": "oracle, heads of the first layer",
    "tuned": "trained further, baseline",
    "tuned-paper": "trained further with the paper's published polynomial",
    "tuned-own": "trained further with the default polynomial",
}


def main() -> None:
    steps = {
        "train": train_model, "calibrate": calibrate_model, "through": fit_through_model,
        "tune": tune_model, "measure": measure_model,
    }  # fmt: skip
    for name in parse(__doc__, markdown, RESULT, steps):
        results = on_all_cores(steps[name], (Trial(n, seed) for n in HEADS for seed in SEEDS))
        if name == "measure":
            record = {"seeds": list(SEEDS), "sizes": SIZES, "prompts": PROMPTS}
            rows = iter(results)
            record["found"] = {n: [next(rows) for _ in SEEDS] for n in HEADS}
            draw_record(RESULT.with_suffix(".png"), write_record(RESULT, record))


class Trial(NamedTuple):
    """One model of the study: its number of heads and its seed."""

    heads: int
    seed: int

    @property
    def name(self) -> str:
        return f"two-queries-{self.heads}-heads-{self.seed}"

    @property
    def weights(self) -> Path:
        return WEIGHTS / self.name

    def kept(self, what: str) -> Path:
        """The file of a measurement."""
        return RUN / f"{self.name}-{what}.json"

    def tuned(self, arm: str) -> Path:
        return RUN / f"{self.name}-{arm}"

    @property
    def examples(self) -> Path:
        return RUN / f"{self.name}-examples"

    def fit(self, suffix: str = "") -> Fit:
        """A fit of the model; the identity if no head is worth one."""
        name = self.name + suffix
        exists = (STORE / name).exists()
        return calibrate.load(name, STORE) if exists else calibrate.identity()


def train_model(trial: Trial) -> None:
    if not trial.weights.exists():
        model = new_model(trial.heads, trial.seed)
        train_into(trial.weights, model, trial.seed, STEPS, RATE)


def calibrate_model(trial: Trial) -> None:
    """Captures, collects and fits with the commands of the README."""
    if not (STORE / trial.name).exists():
        captured, run = RUN / f"{trial.name}-captured", RUN / trial.name
        capture_model(trial, captured)
        run_calibrate("collect", "--logits", captured, "--out", run)
        run_calibrate("fit", run, "--name", trial.name, "--store", STORE)


def capture_model(trial: Trial, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    model, rng = load_model(trial.weights), np.random.default_rng([2, trial.seed])
    with torch.no_grad(), capture(model, folder) as recorder:
        for size in CALIBRATION_SIZES:
            for kind in KINDS:
                pieces = prompts_of("calibrate", trial.seed, size, kind, CALIBRATION_PROMPTS)
                for prompts in pieces:
                    # If several items are needed, the target is one of them at random.
                    target = [int(rng.choice(np.flatnonzero(asked))) for asked in prompts.asked]
                    recorder.next(query=-1, target=target)
                    answers(model, prompts.tokens)


def fit_through_model(trial: Trial) -> None:
    """Collects prompts and fits through the model with the commands of the README."""
    if (STORE / (trial.name + THROUGH)).exists():
        return
    folder, prompts = RUN / f"{trial.name}-model", RUN / f"{trial.name}-prompts.jsonl"
    model = load_model(trial.weights)
    # All positions are 0, or near: a command runs the model as its configuration has it.
    model.config.rope_parameters = {"rope_type": "linear", "factor": 1e30, "rope_theta": 1e4}
    model.save_pretrained(folder)
    lines = [
        json.dumps({"prompt_ids": tokens, "answer_ids": [ANSWER + answer], "template": kind})
        for size in CALIBRATION_SIZES
        for kind in KINDS
        for tokens, answer in islice(pairs(trial.seed, size, kind), CALIBRATION_PROMPTS)
    ]
    prompts.write_text("\n".join(lines))
    run_calibrate("model", "collect", "--model", folder, "--prompts", prompts,
                  "--out", trial.examples)  # fmt: skip
    run_calibrate("model", "fit", trial.examples, "--name", trial.name + THROUGH, "--store", STORE,
                  "--kind", LOG_SIZE, "--sharing", "global",
                  "--trained-up-to", TRAINED_TOKENS)  # fmt: skip


def pairs(seed: int, size: int, kind: str) -> Iterator[tuple[list[int], int]]:
    """Prompts for calibration with their answers."""
    for piece in prompts_of("calibrate", seed, size, kind, CALIBRATION_PROMPTS):
        yield from zip(piece.tokens.tolist(), piece.answer.tolist(), strict=True)


def rules_of(trial: Trial) -> dict[str, Fit]:
    """The rules that apply without training."""
    return {
        BASELINE: calibrate.identity(),
        "paper": calibrate.load("paper@1"),
        "log-n": log_size_rule(1 + TRAINED_SIZES[1]),
        "own": trial.fit(),
    } | ({"through": trial.fit(THROUGH)} if trial.examples.exists() else {})


def tune_model(trial: Trial) -> None:
    """Trains a model further under each rule of TUNED."""
    for rule, arm in TUNED.items() if trial.heads == TUNED_HEADS else ():
        if not trial.tuned(arm).exists():
            model = apply(load_model(trial.weights), rules_of(trial)[rule])
            train_into(trial.tuned(arm), model, trial.seed + 100, TUNING_STEPS, TUNING_RATE)


def measure_model(trial: Trial) -> dict:
    """Accuracies of every arm, the grid constant and the fit."""
    model, rules, seed = load_model(trial.weights), rules_of(trial), trial.seed
    best = kept(trial.kept("best-constant"), lambda: best_constant(model, seed))
    rules["constant"] = one_constant(best)
    arms = {
        name: kept(trial.kept(name), lambda rule=rule: accuracies(apply(model, rule), seed))
        for name, rule in rules.items()
    }
    arms["oracle"] = kept(trial.kept("oracle"), lambda: accuracies(model, seed, with_oracle(model)))
    for rule, arm in TUNED.items() if trial.heads == TUNED_HEADS else ():
        tuned = apply(load_model(trial.tuned(arm)), rules[rule])
        arms[arm] = kept(trial.kept(arm), lambda tuned=tuned: accuracies(tuned, seed))
    own = rules["own"]
    return {
        "arms": arms, "best_constant": best, "kind": own.rule.kind,
        "entries": [
            {"layer": e.layer, "head": e.head, "coefficients": e.coefficients, "domain": e.domain}
            for e in own.entries
        ],
        "verdict": own.verdict or "no head has a significant gain",
    }  # fmt: skip


def best_constant(model: LlamaForCausalLM, seed: int) -> float:
    """The constant with the best accuracy on the prompts for calibration."""

    def mean_accuracy(beta: float) -> float:
        apply(model, one_constant(beta))
        shares = [
            accuracy(model, prompts_of("calibrate", seed, size, kind, CALIBRATION_PROMPTS))
            for size in CALIBRATION_SIZES for kind in KINDS
        ]  # fmt: skip
        return float(np.mean(shares))

    return max(CONSTANTS, key=mean_accuracy)


def accuracies(
    model: LlamaForCausalLM, seed: int, before: Callable[[Prompts], None] = lambda prompts: None
) -> dict[str, list[float]]:
    """Accuracies of each kind of query by size; every arm has the same prompts."""
    return {
        kind: [
            accuracy(model, prompts_of("measure", seed, size, kind, PROMPTS), before)
            for size in SIZES
        ]
        for kind in KINDS
    }


def with_oracle(model: LlamaForCausalLM) -> Callable[[Prompts], None]:
    """Restricts the attention of the first layer's last query to the items that are asked for.

    Returns the function to call with the prompts before the model runs on them.
    """
    asked = {}

    def attend_to_asked(module, query, key, value, mask, **options):
        out, _ = attend_with(calibrate.identity(), module, query, key, value, mask, **options)
        if module.layer_idx == 0:
            out[:, -1] = torch.einsum("bs,bhsw->bhw", asked["weights"], value[:, :, :-1])
        return out, None

    register("oracle", attend_to_asked)
    model.set_attn_implementation("oracle")

    def before(prompts: Prompts) -> None:
        weights = torch.from_numpy(prompts.asked).float()
        asked["weights"] = weights / weights.sum(dim=1, keepdim=True)

    return before


def accuracies_by_arm(record: dict, heads: int) -> dict[str, dict[str, np.ndarray]]:
    """Arm -> kind -> accuracy (seeds, sizes), per cent."""
    models = record["found"][str(heads)]
    return {
        arm: {kind: 100 * np.array([of["arms"][arm][kind] for of in models]) for kind in KINDS}
        for arm in LABELS if arm in models[0]["arms"]
    }  # fmt: skip


def markdown(record: dict) -> list[str]:
    """A table for each model: per cent, means of the seeds with their standard errors."""
    titles = [f"“{kind}”, {size:,}" for kind, size in COLUMNS]
    lines = []
    for heads in HEADS:
        rows = []
        for arm, by_kind in accuracies_by_arm(record, heads).items():
            shown = [by_kind[kind][:, record["sizes"].index(n)] for kind, n in COLUMNS]
            rows.append([LABELS[arm], *with_errors(*mean_and_error(np.transpose(shown)), ".1f")])
        lines += ["", *table([f"{heads} heads", *titles], rows)]
    return lines[1:]


@own_style()
def draw_record(path: Path, record: dict) -> None:
    figure = new_figure(8, 6.6)
    axes = figure.subplots(len(HEADS), len(KINDS), sharex=True, sharey="col")
    for ax, (heads, kind) in zip(axes.flat, product(HEADS, KINDS), strict=True):
        for arm, (colour, marker, dash) in SHOWN.items():
            mean, error = mean_and_error(accuracies_by_arm(record, heads)[arm][kind])
            ax.errorbar(record["sizes"], mean, error, fmt=dash, color=colour, marker=marker, ms=5,
                        lw=1.6, capsize=2, label=LABELS[arm])  # fmt: skip
        sizes_axis(ax, record["sizes"])
        ax.set_xlabel("")
        ax.grid(alpha=0.25, lw=0.5)
        needs = "one item" if kind == "one" else "many items"
        ax.set_title(f"queries that need {needs}, {heads} heads a layer", fontsize=10)
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy (%)")
    for ax in axes[-1]:
        ax.set_xlabel("items of the prompt (trained on 4 to 32)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  frameon=False)  # fmt: skip
    save_figure(path, figure)


if __name__ == "__main__":
    main()
