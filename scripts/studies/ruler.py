#!/usr/bin/env python
"""RULER's retrieval tasks, by lm-evaluation-harness: SmolLM2 before and after a fit of its heads.

scripts/studies/smollm2.py get         # first: the model
scripts/studies/ruler.py               # both steps below
scripts/studies/ruler.py evaluate      # each task and length under each rule
scripts/studies/ruler.py routes        # ten samples of each: do all ways to load the fit agree?
scripts/studies/ruler.py --markdown    # prints the tables of its page from the record

`niah_multikey_2` and `niah_multikey_3` are lines with a key and a number, or with two UUIDs, of
which one is asked for. The harness makes them from words and digits, without a data set. Answers
are kept in runs/smollm2/ruler one by one: the same command carries on where one stopped, also with
more --samples. Needs the extra `studies`.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from smollm2_results import MODEL, RUNS
from study import parse, run_calibrate, study_parser, table, write_record

import calibrate
from calibrate.evidence.estimate import estimate

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "scripts" / "results" / "ruler.json"
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
N_OF_ROUTES = 10
DTYPE = "float32"
BASELINE, FOLDER, RUNTIME = "baseline", "exported folder", "runtime"
LABELS = {"baseline": "baseline", "constants": "fitted constants"}


@dataclass(frozen=True)
class Cell:
    """A task at a length, which a model answers that was loaded in some way."""

    task: str
    length: int
    route: str  # BASELINE, FOLDER, RUNTIME
    fit: str | None = None  # a reference
    batch: int = 8

    @property
    def name(self) -> str:
        """A name for a file."""
        words = [self.task, str(self.length), self.route.replace(" ", "-"), str(self.batch)]
        return "-".join([*words, *([self.fit] if self.fit else [])])


def main() -> None:
    parser = study_parser(__doc__, STEPS)
    parser.add_argument("--samples", type=int, default=100, help="of each cell, 500 at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parse(parser, markdown, RECORD)
    os.environ |= {"TQDM_MININTERVAL": "10", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    export()
    for name in options.steps:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record |= STEPS[name](options)
        write_record(RECORD, record)


def export() -> None:
    """Exports the constants as a folder, once."""
    if not exported_folder().exists():
        run_calibrate("export", FIT, "--model", MODEL, "--out", exported_folder())


def exported_folder() -> Path:
    return RUNS / "ruler-exported-folder"


def evaluate(options: Any) -> dict[str, Any]:
    """Every task and length under every rule, on the same samples."""
    rules = {"baseline": (BASELINE, None), "constants": (FOLDER, FIT)}
    cells = [Cell(*place, *rule) for place in PLACES for rule in rules.values()]
    answers = iter(answers_of(cells, options.samples, options.jobs))
    rows = []
    for task, length in PLACES:
        of_rules = {rule: next(answers) for rule in rules}
        samples = of_rules["baseline"]
        for others in of_rules.values():
            assert [x["prompt"] for x in others] == [x["prompt"] for x in samples]
        rows.append({
            "task": task,
            "length": length,
            "tokens": float(np.mean([x["tokens"] for x in samples])),
            "right": {rule: [int(x["right"]) for x in found] for rule, found in of_rules.items()},
        })  # fmt: skip
    return {"cells": rows}


def routes(options: Any) -> dict[str, Any]:
    """Ten samples of each task and length, one at a time, by each way to load the constants."""
    ways = (FOLDER, RUNTIME)
    cells = [Cell(*place, way, FIT, 1) for place in PLACES for way in ways]
    cells += [Cell(*place, BASELINE, None, 1) for place in PLACES]
    texts = [
        [x["answer"] for x in answers] for answers in answers_of(cells, N_OF_ROUTES, options.jobs)
    ]
    by_way = {
        way: [
            x for cell, found in zip(cells, texts, strict=True) if cell.route == way for x in found
        ]
        for way in (*ways, BASELINE)
    }
    same = {
        way: int(np.sum([a == b for a, b in zip(by_way[way], by_way[RUNTIME], strict=True)]))
        for way in by_way
    }
    return {"routes": {"samples": len(by_way[RUNTIME]), "same as the runtime": same}}


def answers_of(cells: Sequence[Cell], count: int, jobs: int) -> list[list[dict[str, Any]]]:
    """Answers to the first samples of each cell; a cell is the work of one process."""
    parallel = joblib.Parallel(jobs, return_as="generator")
    found = []
    for cell, answers in zip(
        cells, parallel(joblib.delayed(answers_of_cell)(cell, count) for cell in cells), strict=True
    ):
        found.append(answers)
        print(f"{cell.name}: {len(found)} of {len(cells)} cells", file=sys.stderr, flush=True)
    return found


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
    (RUNS / "ruler").mkdir(exist_ok=True)
    model = harness_model(cell)
    results = lm_eval.simple_evaluate(
        model,
        tasks=[cell.task],
        limit=count,
        task_manager=tasks,
        use_cache=str(RUNS / "ruler" / cell.name),
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
    return found


def harness_model(cell: Cell) -> Any:
    """The model of a cell, in the harness."""
    from lm_eval.models.huggingface import HFLM

    from calibrate.transformers import apply
    from calibrate.transformers.folders import ModelFolder

    given = {"device": "cpu", "dtype": DTYPE, "batch_size": cell.batch}
    if cell.route == FOLDER:
        return HFLM(pretrained=str(exported_folder()), **given)
    if cell.fit is None:
        return HFLM(pretrained=str(MODEL), **given)
    folder = ModelFolder(MODEL)
    model = apply(folder.load(DTYPE), calibrate.load(cell.fit))
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
    if routes := record.get("routes"):
        same = ([way, f"{count} of {routes['samples']}"]
                for way, count in routes["same as the runtime"].items()
                if way != RUNTIME)  # fmt: skip
        lines += ["", *table(["loaded as", "same answers as the runtime"], same)]
    return lines


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


STEPS = {"evaluate": evaluate, "routes": routes}


if __name__ == "__main__":
    main()
