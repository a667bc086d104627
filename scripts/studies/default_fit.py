#!/usr/bin/env python
"""Choice of the default fit: every kind of rule, ten heads; into scripts/results/default-fit.json.

scripts/studies/default_fit.py             # 20 minutes of one core; an interrupted run is resumed
scripts/studies/default_fit.py --markdown  # prints the tables of its page from the record

Rules are fitted to 1,024 sets of each size, and scored on a second collection by log p and mean p
of the target. The best rule is chosen on five heads and reported on the other five, and vice versa.
Accuracies of the same rules are in scripts/studies/table1.py.
"""

import json
import sys
from pathlib import Path

import default_fit_other_rules as other_rules
import numpy as np
from command_line import parse, study_parser
from joblib import Parallel, delayed

from calibrate.core.rule_kinds import KINDS
from calibrate.datasets.row_collection import RowCollection
from calibrate.evidence.baselines import TRAINED_SIZE, paper
from calibrate.fitting.fit_collection import validation_scorer
from calibrate.fitting.fit_rule import applied_beta, fit_kind
from calibrate.fitting.options import Options
from calibrate.fitting.select import ScoreOnSets, fit_and_select
from calibrate.parallel.jobs import ONE_PROCESS
from calibrate.rows.collect import collect
from calibrate.rows.heads import Head, load_head
from calibrate.solver.solved_rows import Rows, solve_collection
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.coefficients import Coefficients, identity

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "default-fit.json"
FOLDER = ROOT / "runs" / "choice"
SIZES = [16 << i for i in range(11)]
SETS = 1_024
FIT_SEED, SCORE_SEED = 0, 1
HEADS = [f"max-retrieval-{i}" for i in range(10)]
HALVES = (range(5), range(5, 10))
MEASURES = ("log p", "p")
QS = (0.0, 0.25, 0.5)
CHOSEN = "chosen by calibrate fit"
NAMES = {
    "plain": "baseline",
    "paper": "the paper's published polynomial",
    "polynomial, gate at 0.5": "polynomial, entropy threshold 0.5",
    "mixture: plain": "mixture: baseline",
    "log p": "log-likelihood",
    "p": "target probability",
}  # of what has another name in the record
SHOWN = (16, 64, 256, 1024, 4096, 16384)  # in the tables


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    found = Parallel(n_jobs=2)(delayed(compare)(name) for name in HEADS)
    record = summary([scores for scores, _ in found])
    record["beyond"] = {
        name: float(np.mean([further[name] for _, further in found])) for name in found[0][1]
    }
    write_atomically(RESULT, (json.dumps(record) + "\n").encode())


def compare(name: str) -> list[dict]:
    """The scores of each rule on one head, and those of rules beyond the file format."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        head = load_head(name)
        made_of, other = (collection_of(head, seed) for seed in (FIT_SEED, SCORE_SEED))
        fitted, held_out = rows_of(made_of), rows_of(other)
        rules = rules_for(fitted[0], validation_scorer(head, made_of, ONE_PROCESS))
        scores = {rule: score(fit, held_out[0]) for rule, fit in rules.items()}
        both = [scores, other_rules.scores_beyond(*fitted, *held_out)]
        write_atomically(path, json.dumps(both).encode())
        print(f"{name}: compared", file=sys.stderr)
    return json.loads(path.read_text())


def collection_of(head: Head, seed: int) -> RowCollection:
    """The sets of one seed."""
    return collect(head, SIZES, SETS, seed, FOLDER / f"{head.name}-{seed}")


def rows_of(collection: RowCollection) -> tuple[Rows, np.ndarray]:
    """The solved rows of a collection, and the gap of their two highest logits."""
    top = [np.partition(shard.logits, -2, axis=1)[:, -2:] for _, shard in collection.shards()]
    return solve_collection(collection), np.concatenate([t[:, 1] - t[:, 0] for t in top]).astype(
        float
    )


def rules_for(rows: Rows, accuracy: ScoreOnSets | None) -> dict[str, Coefficients]:
    """Every kind of rule at each q, what `calibrate fit` chooses, and others to compare."""
    rules = {"plain": identity(), "paper": paper()}
    rules["the paper's procedure"] = fit_kind(rows, "polynomial", Options.of_the_paper())
    for kind in KINDS:
        for q in QS:
            rules[f"{kind}, q = {q:g}"] = fit_kind(rows, kind, Options(q=q))
    rules["constant, q = 1"] = fit_kind(rows, "constant", Options(q=1.0))
    rules["constant, misranked rows"] = fit_kind(rows, "constant", Options("misranked"))
    rules["polynomial, misranked rows"] = fit_kind(rows, "polynomial", Options("misranked"))
    rules["polynomial, gate at 0.5"] = fit_kind(rows, "polynomial", Options(min_entropy=0.5))
    rules[CHOSEN] = fit_and_select(
        rows, Options(trained_up_to=TRAINED_SIZE), accuracy
    ).published.coefficients
    return rules


def score(rule: Coefficients, rows: Rows) -> list[list[float]]:
    """Mean log p_t in nats and mean p_t, of each size."""
    log_p = rows.log_p(applied_beta(rule, rows))
    return [[float(x[rows.size == size].mean()) for size in SIZES] for x in (log_p, np.exp(log_p))]


def summary(scores: list[dict[str, list]]) -> dict:
    """Means over heads of each rule's (measures, sizes), and the nested choice."""
    by_rule = {rule: np.array([of_head[rule] for of_head in scores]) for rule in scores[0]}
    return {
        "sizes": SIZES,
        "fit_sets": SETS,
        "rules": [
            {"rule": rule, "log_p": log_p.tolist(), "p": p.tolist(),
             "log_p_by_head": found[:, 0].mean(axis=1).tolist()}
            for rule, found in by_rule.items() for log_p, p in [found.mean(axis=0)]
        ],
        "nested": [nested(by_rule, measure) for measure in range(len(MEASURES))],
    }  # fmt: skip


def nested(by_rule: dict[str, np.ndarray], measure: int) -> dict:
    """The best rule on one half of the heads, scored on the other half; both ways."""

    def gains(rule: str, heads: range) -> dict[str, float]:
        gain = (by_rule[rule] - by_rule["plain"])[list(heads)].mean(axis=(0, 2))
        return dict(zip(MEASURES, gain.tolist(), strict=True))

    folds = []
    for choosing, others in (HALVES, HALVES[::-1]):
        fitted = (rule for rule in by_rule if "," in rule)
        best = max(fitted, key=lambda rule: gains(rule, choosing)[MEASURES[measure]])
        names = {"chosen": best, "default": CHOSEN, "procedure": "the paper's procedure"}
        folds.append(
            {"chosen": best, "on": [HEADS[i] for i in choosing]}
            | {f"gains of {key}": gains(rule, others) for key, rule in names.items()}
        )
    return {"by": MEASURES[measure], "folds": folds}


def markdown(record: dict) -> list[str]:
    """The tables: every rule, the nested choice, and rules beyond the format."""
    shown = [record["sizes"].index(n) for n in SHOWN]
    lines = [
        "| rule | log-likelihood | target probability | "
        + " | ".join(f"n = {n:,}" for n in SHOWN)
        + " |",
        "| --- |" + " ---: |" * (2 + len(SHOWN)),
    ]
    for rule in record["rules"]:
        cells = [f"{100 * rule['p'][i]:.1f}" for i in shown]
        lines.append(
            f"| {NAMES.get(rule['rule'], rule['rule'])} | {np.mean(rule['log_p']):.3f} | "
            f"{100 * np.mean(rule['p']):.1f} | " + " | ".join(cells) + " |"
        )
    lines += ["", "| best by | chosen on | rule | its gain | the default | the paper's procedure |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: |")
    for by in record["nested"]:
        for fold in by["folds"]:
            gains = [fold[f"gains of {key}"] for key in ("chosen", "default", "procedure")]
            cells = [f"{gain['log p']:+.3f}, {100 * gain['p']:+.1f}" for gain in gains]
            heads = f"{fold['on'][0]} .. {fold['on'][-1][-1]}"
            lines.append(
                f"| {NAMES[by['by']]} | {heads} | {fold['chosen']} | " + " | ".join(cells) + " |"
            )
    lines += ["", "| beta as a polynomial of | log-likelihood | gain |", "| --- | ---: | ---: |"]
    for name, value in record["beyond"].items():
        plain = record["beyond"]["mixture: plain" if name.startswith("mixture") else "plain"]
        lines.append(f"| {NAMES.get(name, name)} | {value:.4f} | {value - plain:+.4f} |")
    return lines


if __name__ == "__main__":
    main()
