"""Benchmark of passes through a model, shared by processes: seconds a step, against one process.

python scripts/benchmarks/bench_passes.py MODEL [ROUNDS]    (a folder; default: 3 rounds)

A step is that of `calibrate model fit`: a prompt of each of ten templates and a window of text, 250
tokens each, with the gradient by a constant for each head; a check scores 32 prompts. One process
has one thread, and so has each of two.
"""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from timing import answer_help, medians

from calibrate.core.rule import CONSTANT, Sharing
from calibrate.model.parameters import Parameters, RuleFamily
from calibrate.model.runner import ModelSource, Runner
from calibrate.model.scoring import NO_CACHE
from calibrate.model.transformers_scorer import TransformersScorer
from calibrate.parallel import Jobs
from calibrate.prompts.make_examples import ExampleSpec, make_examples
from calibrate.prompts.retrieval_task import PROMPT_TEMPLATES
from calibrate.transformers.folders import ModelFolder

PROCESSES = (1, 2)


def main() -> None:
    folder = ModelFolder(Path(sys.argv[1]))
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    torch.set_num_threads(1)
    wanted = ExampleSpec(
        templates=tuple(PROMPT_TEMPLATES)[:10], lengths=(250,), count=4, built_in_text=True
    )
    examples = make_examples(wanted, folder)[0]
    firsts = [next(i for i, x in enumerate(examples.examples) if x.cell == c) for c in range(11)]
    source = ModelSource(folder.path.resolve(), folder.fingerprint(), folder.dtype(), "cpu")
    print(f"| {folder.name}, {os.cpu_count()} cores | step, s | check, s |\n| --- | ---: | ---: |")
    for processes in PROCESSES:
        runner = Runner.of(source, Jobs(processes))
        heads = runner.heads()
        family = RuleFamily(CONSTANT, Sharing.PER_HEAD, 4.0, 5.0)
        parameters = Parameters(family, family.zeros(heads) + 0.1)
        weights = np.ones(len(firsts))
        scorer = TransformersScorer(runner, heads, examples, NO_CACHE)
        took = medians({
            "step": partial(scorer.gradient, parameters, firsts, weights),
            "check": partial(scorer.score, [parameters.rules(heads)], range(32)),
        }, rounds)  # fmt: skip
        print(f"| {processes} | {took['step']:.1f} | {took['check']:.1f} |", flush=True)


if __name__ == "__main__":
    answer_help(__doc__)
    main()
