#!/usr/bin/env python
"""RULER's retrieval tasks, by lm-evaluation-harness: SmolLM2 before and after a fit of its heads.

scripts/studies/smollm2.py get         # first: the model
scripts/studies/ruler.py               # both steps below
scripts/studies/ruler.py evaluate      # each task and length under each rule
scripts/studies/ruler.py routes        # ten samples of each: do all ways to load the fit agree?
scripts/studies/ruler.py --markdown    # prints the tables of its page from the record

`niah_multikey_2` and `niah_multikey_3` are lines with a key and a number, or with two UUIDs, of
which one is asked for. The harness makes them from words and digits, without a data set. Answers
are kept in runs/smollm2/ruler one by one: the same command carries on where one stopped. Needs the
extra `studies`.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
from smollm2_results import MODEL, RUN
from study import JOBS, RESULTS, parse, run_calibrate, table, write_record

import calibrate
from calibrate.evidence.estimate import estimate

RECORD = RESULTS / "ruler.json"
FIT = "smollm2-135m-instruct@1"
# Tasks, and lengths in tokens: of the prompt, and 128 for the answer. At 256 tokens not even one
# line of UUIDs has room.
PLACES = (
    ("niah_multikey_2", 256),
    ("niah_multikey_2", 512),
    ("niah_multikey_2", 1024),
    ("niah_multikey_3", 512),
    ("niah_multikey_3", 1024),
)
SAMPLES, SAMPLES_OF_ROUTES = 40, 10  # of each cell
DTYPE = "float32"
BASELINE, FOLDER, RUNTIME = "baseline", "exported folder", "runtime"
LABELS = {"baseline": "baseline", "constants": "fitted constants"}


class Cell(NamedTuple):
    """A task at a length, which a model answers that was loaded in some way."""

    task: str
    length: int
    route: str  # BASELINE, FOLDER, RUNTIME
    batch: int = 8

    @property
    def cache(self) -> Path:
        """The file of its answers."""
        return RUN / "ruler" / "-".join(map(str, (*self, FIT))).replace(" ", "-")


def main() -> None:
    steps = parse(__doc__, markdown, RECORD, STEPS)
    os.environ |= {"TQDM_MININTERVAL": "10", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    export()
    for name in steps:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        write_record(RECORD, record | STEPS[name]())


def export() -> None:
    """Exports the constants as a folder, once."""
    if not exported_folder().exists():
        run_calibrate("export", FIT, "--model", MODEL, "--out", exported_folder())


def exported_folder() -> Path:
    return RUN / "ruler-exported-folder"


def evaluate() -> dict[str, Any]:
    """Every task and length under every rule, on the same samples."""
    routes = {"baseline": BASELINE, "constants": FOLDER}
    cells = [Cell(*place, route) for place in PLACES for route in routes.values()]
    answers = iter(answers_of(cells, SAMPLES))
    rows = []
    for task, length in PLACES:
        of_rules = {rule: next(answers) for rule in routes}
        baseline, constants = ([x["prompt"] for x in found] for found in of_rules.values())
        assert baseline == constants
        rows.append({
            "task": task,
            "length": length,
            "tokens": float(np.mean([x["tokens"] for x in of_rules["baseline"]])),
            "right": {rule: [int(x["right"]) for x in found] for rule, found in of_rules.items()},
        })  # fmt: skip
    return {"cells": rows}


def compare_routes() -> dict[str, Any]:
    """Ten samples of each task and length, one at a time, by each way to load the constants."""
    texts = {}
    for route in (FOLDER, RUNTIME, BASELINE):
        found = answers_of([Cell(*place, route, batch=1) for place in PLACES], SAMPLES_OF_ROUTES)
        texts[route] = [x["answer"] for answers in found for x in answers]
    same = {
        route: sum(a == b for a, b in zip(answers, texts[RUNTIME], strict=True))
        for route, answers in texts.items()
    }
    return {"routes": {"samples": len(texts[RUNTIME]), "same as the runtime": same}}


def answers_of(cells: Sequence[Cell], count: int) -> list[list[dict[str, Any]]]:
    """Answers to the first samples of each cell; a cell is the work of one process."""
    tasks = (joblib.delayed(answers_of_cell)(cell, count) for cell in cells)
    return joblib.Parallel(JOBS)(tasks)


def answers_of_cell(cell: Cell, count: int) -> list[dict[str, Any]]:
    """Each sample's prompt, its length in tokens, the answer, and whether RULER calls it right."""
    import lm_eval
    import torch
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.ruler import common_utils

    torch.set_num_threads(1)
    # Of all its tasks the harness would read 13,000 files, which takes longer than a small model.
    tasks = TaskManager(
        include_path=str(Path(common_utils.__file__).parent),
        include_defaults=False,
        metadata={"max_seq_lengths": [cell.length], "tokenizer": str(MODEL)},
    )
    cell.cache.parent.mkdir(exist_ok=True)
    model = harness_model(cell)
    results = lm_eval.simple_evaluate(
        model,
        tasks=[cell.task],
        limit=count,
        task_manager=tasks,
        use_cache=str(cell.cache),
        bootstrap_iters=0,
        random_seed=0,
    )
    samples = sorted(results["samples"][cell.task], key=lambda sample: sample["doc_id"])
    found = []
    for sample in samples:
        prompt, (answer,) = sample["arguments"][0][0], sample["filtered_resps"]
        score = common_utils.process_results(sample["doc"], [answer])[str(cell.length)]
        tokens = len(model.tokenizer(prompt)["input_ids"])
        found.append({"prompt": prompt, "tokens": tokens, "answer": answer, "right": score == 1})
    print(f"{cell.cache.name}: answered", file=sys.stderr, flush=True)
    return found


def harness_model(cell: Cell) -> Any:
    """The model of a cell, in the harness."""
    from lm_eval.models.huggingface import HFLM

    from calibrate.transformers import apply
    from calibrate.transformers.folders import ModelFolder

    given = {"device": "cpu", "dtype": DTYPE, "batch_size": cell.batch}
    if cell.route == FOLDER:
        return HFLM(pretrained=str(exported_folder()), **given)
    if cell.route == BASELINE:
        return HFLM(pretrained=str(MODEL), **given)
    folder = ModelFolder(MODEL)
    model = apply(folder.load(DTYPE), calibrate.load(FIT))
    return HFLM(pretrained=model, tokenizer=folder.tokenizer(), batch_size=cell.batch)


def markdown(record: dict) -> list[str]:
    """The tables of the page: accuracy, its change, and the ways to load the fit."""
    titles = [*(f"{label}, %" for label in LABELS.values()), "gain, points"]
    rows = []
    for cell in [*record["cells"], *totals(record["cells"])]:
        right = {rule: np.array(cell["right"][rule]) for rule in LABELS}
        shares = [f"{100 * right[rule].mean():.1f}" for rule in LABELS]
        counts = [str(cell["length"]), f"{cell['tokens']:.0f}", str(len(right["baseline"]))]
        gain = difference(right["constants"], right["baseline"])
        rows.append([cell["task"], *counts, *shares, gain])
    lines = table(["task", "length", "tokens of the prompt", "samples", *titles], rows)
    routes = record["routes"]
    same = ([route, f"{count} of {routes['samples']}"]
            for route, count in routes["same as the runtime"].items()
            if route != RUNTIME)  # fmt: skip
    return [*lines, "", *table(["loaded as", "same answers as the runtime"], same)]


def totals(cells: Sequence[dict]) -> list[dict]:
    """All lengths of each task, as cells."""
    rows = []
    for task in dict(PLACES):
        of_task = [cell for cell in cells if cell["task"] == task]
        right = {rule: [x for cell in of_task for x in cell["right"][rule]] for rule in LABELS}
        tokens = np.mean([cell["tokens"] for cell in of_task])
        rows.append({"task": task, "length": "all", "tokens": tokens, "right": right})
    return rows


def difference(right: np.ndarray, baseline: np.ndarray) -> str:
    """The paired difference in points, with its standard error."""
    n = len(right)
    return estimate(100.0 * (right - baseline), np.ones(n), np.arange(n)).shown("+.1f")


STEPS = {"evaluate": evaluate, "routes": compare_routes}


if __name__ == "__main__":
    main()
