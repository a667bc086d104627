#!/usr/bin/env python
"""Kinds of rule and parameter sharing for the heads of SmolLM2, at the same KL of text.

scripts/studies/smollm2.py get collect         # first: the model, and the examples of its fit
scripts/studies/smollm2_rules.py               # gains on validation templates, at a KL of 0.01
scripts/studies/smollm2_rules.py --markdown    # prints the table of its page from the record

The kinds are those that prompts of one length determine. The held-out templates of the study of
SmolLM2 are not looked at. A rule whose first-order gain is below a fifth of the best one's is not
evaluated, as in `calibrate model fit`. Passes are cached in the collection: the same command
carries on where one stopped.
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from command_line import parse, study_parser
from smollm2 import ALLOWED, RESULT, STEPS_OF_FIT, searching

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule_kinds import CONSTANT, KINDS
from calibrate.datasets.examples import ExampleSet
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import OWN
from calibrate.evidence.metrics import RIGHT
from calibrate.model.calibration_and_validation import ModelSolution
from calibrate.model.candidates import ModelOptions, candidate_families
from calibrate.model.head_rule_optimizer import HeadRuleOptimizer
from calibrate.model.natural_gradient import FULL_KL
from calibrate.model.parameters import RuleFamily
from calibrate.storage.atomic_io import write_atomically

RECORD = RESULT.with_name("smollm2-rules.json")


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parse(parser, markdown, RECORD)
    with searching("fitted", STEPS_OF_FIT, options) as optimizer:
        record = rows_of(optimizer)
    write_atomically(RECORD, (json.dumps(record, indent=1) + "\n").encode())


def rows_of(search: HeadRuleOptimizer) -> list[dict[str, Any]]:
    """Each kind of rule and parameter sharing at the largest weight within the KL budget."""
    calibration, validation = search.calibration, search.validation
    families = [*families_of(validation.objective.examples)]
    optimizer = HeadRuleOptimizer(calibration, validation, families, progress=search.progress)
    solutions = optimizer.solve(families)
    (constants,) = (
        x for x in solutions if (x.family.kind, x.family.sharing) == (CONSTANT, Sharing.PER_HEAD)
    )
    scale, step = np.sqrt(ALLOWED / FULL_KL), optimizer.natural_gradient.step
    return [
        row_of(solution, constants) | {"first_order": scale * step(solution.family).gain}
        for solution in solutions
    ]


def families_of(examples: ExampleSet) -> Iterator[RuleFamily]:
    for kind in (name for name, kind in KINDS.items() if kind.min_sizes == 1):
        basis = candidate_families(ModelOptions(kind), examples)[-1].basis
        for sharing in (Sharing.GLOBAL, Sharing.PER_LAYER, Sharing.PER_HEAD):
            yield RuleFamily(basis, sharing)


def row_of(solution: ModelSolution, constants: ModelSolution) -> dict[str, Any]:
    value = solution.value
    row = {
        "kind": solution.family.kind,
        "sharing": solution.family.sharing.value,
        "evaluated": solution.is_evaluated,
    }
    if not solution.is_evaluated:
        return row
    (kl,) = value.losses
    return row | {
        "weight": solution.weight,
        "gain": numbers_of(value.over()),
        "right": numbers_of(value.answers.gain(OWN, RIGHT)),
        "kl": numbers_of(kl),
        "lead": numbers_of(value.over(constants.value)),
        "examples": value.answers.n,
    }


def numbers_of(estimate: Estimate) -> list[float]:
    return [float(estimate.mean), float(estimate.error)]


def markdown(record: Sequence[dict]) -> list[str]:
    """The table of the page."""
    lines = [
        "| kind | parameter sharing | at first order, nats | s | gain, nats | "
        "less constant, each head | exact match, points | KL |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record:
        shared_by = row["sharing"].removesuffix(" alike")
        cells = [row["kind"], shared_by, f"{row['first_order']:.2f}"]
        if row["evaluated"]:
            cells += [
                f"{row['weight']:.2f}", cell(row["gain"], 1, "+.3f"), cell(row["lead"], 1, "+.3f"),
                cell(row["right"], 100, "+.1f"), cell(row["kl"], 1, ".4f"),
            ]  # fmt: skip
        else:
            cells += ["", "not evaluated", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cell(numbers: Sequence[float], factor: float, digits: str) -> str:
    mean, error = (factor * number for number in numbers)
    return f"{mean:{digits}} ± {error:{digits.removeprefix('+')}}"


if __name__ == "__main__":
    main()
