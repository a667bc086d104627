#!/usr/bin/env python
"""Kinds of rule for the heads of SmolLM2 at the same KL of text, and what a step depends on.

scripts/studies/smollm2.py get collect         # first: the model, and the examples of its fit
scripts/studies/smollm2_rules.py               # both steps below
scripts/studies/smollm2_rules.py first-order   # gains at first order, on a template left out
scripts/studies/smollm2_rules.py kinds         # gains on validation templates, at a KL of 0.01

The held-out templates of the study of SmolLM2 are not looked at. Passes are cached in the
collection: the same command carries on where one stopped.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from command_line import parse, study_parser
from smollm2 import ALLOWED, RESULT, STEPS_OF_FIT, searching

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import ENTROPY_AND_SIZE
from calibrate.core.rule_kinds import CONSTANT, KINDS
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.metrics import RIGHT
from calibrate.evidence.scores import OWN
from calibrate.model.candidates import ModelOptions, candidate_families
from calibrate.model.fit_splits import ModelSolution
from calibrate.model.head_rule_optimizer import HeadRuleOptimizer
from calibrate.model.natural_gradient import DAMPING, natural_gradient_step
from calibrate.model.parameters import RuleFamily
from calibrate.model.splits import CALIBRATION, splits_of
from calibrate.storage.atomic_io import write_atomically

RECORD = RESULT.with_name("smollm2-rules.json")
N_TEMPLATES = (1, 2, 4, 6, 9)  # that a step is made of
N_DRAWS = 8  # of so many templates
DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0)
EVERY_PROMPT, HALF = "all prompts", "half of the prompts"


def main() -> None:
    parser = study_parser(__doc__, STEPS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parse(parser, markdown, RECORD)
    for name in options.steps:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        with searching("fitted", STEPS_OF_FIT, options) as optimizer:
            record[name] = STEPS[name](optimizer)
        write_atomically(RECORD, (json.dumps(record, indent=1) + "\n").encode())


def first_order(optimizer: HeadRuleOptimizer) -> dict[str, Any]:
    """Gains at first order of steps to some templates, on another one, at a KL by curvature."""
    calibration, family = optimizer.calibration, _family(optimizer, ENTROPY_AND_SIZE).full
    scorer, examples = calibration.scorer, optimizer.validation.objective.examples
    baseline = family.baseline(scorer.heads)
    scores = scorer.fisher_scores(baseline, optimizer.validation.text)
    cells = np.array([example.cell for example in examples.examples])
    is_calibration = splits_of(examples) == CALIBRATION
    halves = []  # (templates, halves, rows, heads)
    for cell in np.unique(cells[is_calibration]):
        indices = np.flatnonzero(is_calibration & (cells == cell)).tolist()
        of_cell = [
            scorer.gradient(baseline, half, np.full(len(half), 1 / len(half)))
            for half in (indices[::2], indices[1::2])
        ]
        halves.append(of_cell)
    gradients = np.array(halves)
    by_templates = [
        {
            "templates": n, "prompts": prompts,
            **{kind: _mean_gain(optimizer, kind, scores, gradients, n, used) for kind in KINDS},
        }
        for n in N_TEMPLATES
        for prompts, used in ((HALF, 1), (EVERY_PROMPT, 2))
    ]  # fmt: skip
    n_others = len(gradients) - 1
    by_damping = [
        {
            "damping": damping,
            **{
                kind: _mean_gain(optimizer, kind, scores, gradients, n_others, 2, damping)
                for kind in KINDS
            },
        }
        for damping in DAMPINGS
    ]
    return {"templates": by_templates, "damping": by_damping}


def _mean_gain(
    optimizer: HeadRuleOptimizer,
    kind: str,
    scores: np.ndarray,
    gradients: np.ndarray,
    n_templates: int,
    n_halves: int,
    damping: float = DAMPING,
) -> float:
    """The gain in nats on each template by steps of so many others, drawn at random, in the mean.

    Args:
      scores: Fisher scores of text, by the numbers of the full family.
      gradients: (templates, halves of the prompts, rows, heads), by the same.
    """
    family = _family(optimizer, kind)
    heads, rng = optimizer.calibration.scorer.heads, np.random.default_rng(0)
    full = _family(optimizer, ENTROPY_AND_SIZE).full
    of_templates = family.project_gradient(gradients[:, :n_halves].mean(axis=1), heads, full)
    judged = family.project_gradient(gradients.mean(axis=1), heads, full)
    projected = family.project_gradient(scores, heads, full)
    fisher = np.einsum("wrc,wsc->crs", projected, projected)
    gains = []
    for left_out in range(len(gradients)):
        others = np.delete(np.arange(len(gradients)), left_out)
        for _ in range(N_DRAWS if n_templates < len(others) else 1):
            chosen = rng.choice(others, n_templates, replace=False)
            gradient = of_templates[chosen].mean(axis=0)
            step = natural_gradient_step(gradient, fisher, ALLOWED, damping)
            assert step is not None
            gains.append(float((judged[left_out] * step).sum()))
    return float(np.mean(gains))


def kinds(optimizer: HeadRuleOptimizer) -> list[dict[str, Any]]:
    """Each kind of rule and parameter sharing at the largest weight within the KL budget."""
    solutions, rows = dict[tuple[str, Sharing], ModelSolution](), []
    optimizer.families = [*_families(optimizer)]
    for family in optimizer.families:
        began = time.monotonic()
        (solution,) = optimizer.solve([family])
        solutions[family.kind, family.sharing] = solution
        rows.append(_row(solution, time.monotonic() - began))
    constants = solutions[CONSTANT, Sharing.PER_HEAD]
    for row, solution in zip(rows, solutions.values(), strict=True):
        row["beyond_constants"] = _numbers(solution.value.over(constants.value))
    return rows


def _families(optimizer: HeadRuleOptimizer) -> Iterator[RuleFamily]:
    for kind in KINDS:
        for sharing in (Sharing.GLOBAL, Sharing.PER_LAYER, Sharing.PER_HEAD):
            yield RuleFamily(_family(optimizer, kind).basis, sharing)


def _family(optimizer: HeadRuleOptimizer, kind: str) -> RuleFamily:
    """The family of a kind with a rule for each head, as `calibrate model fit --kind` fits it."""
    return candidate_families(ModelOptions(kind), optimizer.validation.objective.examples)[-1]


def _row(solution: ModelSolution, seconds: float) -> dict[str, Any]:
    value = solution.value
    (kl,) = value.losses
    return {
        "kind": solution.family.kind,
        "sharing": solution.family.sharing.value,
        "weight": solution.weight,
        "gain": _numbers(value.over()),
        "right": _numbers(value.answers.gain(OWN, RIGHT)),
        "kl": _numbers(kl),
        "examples": value.answers.n,
        "seconds": seconds,
    }


def _numbers(estimate: Estimate) -> list[float]:
    return [float(estimate.mean), float(estimate.error)]


def markdown(record: dict) -> list[str]:
    """The tables of the page."""
    lines = []
    if "kinds" in record:
        lines += [
            "| kind | parameter sharing | weight s | gain, nats | beyond constants per head | "
            "exact match, points | KL | minutes |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in record["kinds"]:
            numbers = [
                _cell(row["gain"], 1, "+.3f"), _cell(row["beyond_constants"], 1, "+.3f"),
                _cell(row["right"], 100, "+.1f"), _cell(row["kl"], 1, ".4f"),
            ]  # fmt: skip
            lines.append(
                f"| {row['kind']} | {row['sharing']} | {row['weight']:.2f} | "
                f"{' | '.join(numbers)} | {row['seconds'] / 60:.1f} |"
            )
    if "first-order" in record:
        for rows in record["first-order"].values():
            names = [name for name in rows[0] if name not in KINDS]
            lines += ["", f"| {' | '.join([*names, *KINDS])} |"]
            lines.append("| " + " | ".join(["---"] * len(names) + ["---:"] * len(KINDS)) + " |")
            for row in rows:
                gains = [f"{row[kind]:.2f}" for kind in KINDS]
                lines.append(f"| {' | '.join([*(str(row[x]) for x in names), *gains])} |")
    return lines


def _cell(numbers: Sequence[float], factor: float, digits: str) -> str:
    mean, error = (factor * number for number in numbers)
    return f"{mean:{digits}} ± {error:{digits.removeprefix('+')}}"


STEPS = {"first-order": first_order, "kinds": kinds}


if __name__ == "__main__":
    main()
