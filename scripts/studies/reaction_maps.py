#!/usr/bin/env python
"""Calibration of RXNMapper, a deployed model whose attention head is the answer.

scripts/studies/reaction_maps.py                     # all steps below, in this order
scripts/studies/reaction_maps.py convert             # the weights as safetensors: runs/rxnmapper
scripts/studies/reaction_maps.py collect             # reactions and rows of the head, by class
scripts/studies/reaction_maps.py calibrate           # fits, on half of the classes
scripts/studies/reaction_maps.py measure             # scripts/results/reaction-maps.json, figure
scripts/studies/reaction_maps.py --markdown          # prints the tables of its page

Needs RDKit, and the wheel of rxnmapper 0.4.3 in runs/rxnmapper (3 MB, MIT; it is not installed):
    pip install -e '.[studies]'
    pip download rxnmapper==0.4.3 --no-deps --dest runs/rxnmapper
scripts/studies/reaction_maps_package.py runs the package itself, before `measure`.

Existing results are kept. On two cores all takes about 15 minutes, and the package five.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from command_line import parse, study_parser

import calibrate
from calibrate.errors import QualityError
from calibrate.evidence.baselines import PAPER
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import LOG_P, RANKED, P
from calibrate.report.plot_style import OURS, new_figure, own_style, save_figure
from calibrate.rows.logits_files import Arrays
from calibrate.rows.score import score_logits
from calibrate.storage.atomic_io import write_atomically

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs" / "rxnmapper"
MODEL, ROWS, FITS = RUNS / "model", RUNS / "rows", RUNS / "fits"
RESULT = ROOT / "scripts" / "results" / "reaction-maps.json"
FIGURE = RESULT.with_suffix(".png")
PACKAGE = RUNS / "package.json"
WHEEL = "rxnmapper-0.4.3-*.whl"
REACTIONS = 150  # of each class
SHOWN = (BASELINE, "constant", "polynomial")  # in the figure
STYLE = dict(zip(SHOWN, (("0.4", "x"), (OURS, "o"), ("#0072B2", "s")), strict=True))
CHOSEN = "constant"  # on the calibration classes no other kind is significantly better
# Name of a rule: options of calibrate.fit.
RULES = {
    "constant": {"kind": "constant"},
    "log-size": {"kind": "log-size"},
    "polynomial": {"kind": "polynomial"},
    "entropy-and-size": {"kind": "entropy-and-size"},
    "procedure": {"loss": "least-squares"},
}
LABELS = {
    BASELINE: "baseline",
    PAPER: "the paper's published polynomial",
    "procedure": "the paper's procedure (least squares)",
    "constant": "constant",
    "log-size": "log-size (kappa log n + b)",
    "polynomial": "polynomial",
    "entropy-and-size": "entropy-and-size",
}


def main() -> None:
    parser = study_parser(__doc__, STEPS)
    for step in parse(parser, markdown, RESULT).steps:
        STEPS[step]()


def convert() -> None:
    """The model of the wheel as a folder that Transformers loads."""
    if MODEL.exists():
        return
    from reaction_maps_head import convert as convert_wheel

    wheels = sorted(RUNS.glob(WHEEL))
    if not wheels:
        raise SystemExit(
            f"{RUNS} has no {WHEEL}; run `pip download rxnmapper==0.4.3 --no-deps --dest {RUNS}`"
        )
    convert_wheel(wheels[0], RUNS / "unfinished")
    os.replace(RUNS / "unfinished", MODEL)


def collect() -> None:
    """Reactions of every class with their true maps, and the head's logits for each atom."""
    from reaction_maps_data import CALIBRATION_CLASSES, TEST_CLASSES
    from reaction_maps_head import PointerHead, reactions_of, save_reactions, save_rows

    head = PointerHead(MODEL)
    for split, classes in (("calibration", CALIBRATION_CLASSES), ("test", TEST_CLASSES)):
        for number, name in enumerate(classes):
            path = ROWS / split / f"{number}.npz"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            reactions = reactions_of(head, name, REACTIONS)
            save_reactions(path.with_suffix(".json"), reactions)
            save_rows(path, head.rows(reactions, first_group=number * REACTIONS))
            print(f"{split}: {name}, {REACTIONS} reactions", flush=True)


def fit_rules() -> None:
    """Every kind of rule on the rows of the calibration classes; a refused one has no file."""
    FITS.mkdir(exist_ok=True)
    parts = [np.load(path) for path in sorted((ROWS / "calibration").glob("*.npz"))]
    columns = {
        name: [part[name] for part in parts] for name in ("logits", "target", "mask", "group")
    }
    for name, options in RULES.items():
        path = FITS / f"{name}.json"
        if path.exists():
            continue
        try:
            fit = calibrate.fit(**columns, **options, name="rxnmapper")
        except QualityError as refusal:
            print(f"{name}: {refusal}", flush=True)
            continue
        print(f"{name}: {fit.verdict}", flush=True)
        fit.save(path)


def measure() -> None:
    """The fits on the classes that no fit has used."""
    paths = {name: FITS / f"{name}.json" for name in RULES}
    fits = {name: calibrate.load(path) for name, path in paths.items() if path.exists()}
    evidence = score_logits(Arrays.read(ROWS / "test"), fits)
    record = {
        "reactions": {split: count_reactions(split) for split in ("calibration", "test")},
        "rows": {split: count_rows(split) for split in ("calibration", "test")},
        "fits": {name: {"coefficients": list(fit.only.coefficients)} for name, fit in fits.items()},
        "all": scores_of(evidence),
        "sizes": {evidence.span(n): scores_of(part) for n, part in evidence.by("size").items()},
        "reliability": {rule: diagram_of(evidence, rule) for rule in evidence.rules},
        "gain": gains_of(evidence),
        "package": json.loads(PACKAGE.read_text()) if PACKAGE.exists() else None,
    }
    text = json.dumps(rounded(record), indent=1) + "\n"
    write_atomically(RESULT, text.encode())
    draw_figure(json.loads(text), FIGURE)


def count_reactions(split: str) -> int:
    """The number of reactions of a split."""
    return sum(len(json.loads(path.read_text())) for path in (ROWS / split).glob("*.json"))


def count_rows(split: str) -> int:
    """The number of product atoms of a split."""
    return sum(len(np.load(path)["group"]) for path in (ROWS / split).glob("*.npz"))


def scores_of(evidence: Evidence) -> dict:
    """Scores of each rule on rows: NLL in nats; shares of 1 otherwise."""
    record = {"rows": evidence.n, "reactions": evidence.n_groups}
    record["top"] = float(evidence.mean(BASELINE, RANKED).mean)
    record["rules"] = {
        rule: {
            "nll": -float(evidence.mean(rule, LOG_P).mean),
            "p": float(evidence.mean(rule, P).mean),
            "ece": expected_calibration_error(reliability_of(evidence, rule)),
        }
        for rule in evidence.rules
    }
    return record


def gains_of(evidence: Evidence) -> dict:
    """[mean, standard error] of paired differences of log p, nats; the groups are reactions."""
    others = [rule for rule in evidence.rules if rule != CHOSEN]
    over_baseline = ((rule, BASELINE) for rule in evidence.rules[1:])
    pairs = [*over_baseline, *((rule, CHOSEN) for rule in others[1:])]
    gains = {f"{a} over {b}": evidence.gain(a, LOG_P, b) for a, b in pairs}
    return {pair: [float(gain.mean), float(gain.error)] for pair, gain in gains.items()}


def diagram_of(evidence: Evidence, rule: str) -> list[list[float]]:
    """[confidence, share with a right atom on top] of ten bins of about equal weight."""
    bins = reliability_of(evidence, rule)
    return np.stack([bins.confidence, bins.ranked], axis=1).tolist()


def rounded(value: Any) -> Any:
    """The same record with floats of four significant digits; coefficients keep theirs."""
    if isinstance(value, dict):
        return {k: v if k == "coefficients" else rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


@own_style()
def draw_figure(record: dict, path: Path) -> None:
    """Reliability before and after, and NLL by the number of reactant atoms."""
    figure = new_figure(9.4, 3.9)
    left, right = figure.subplots(1, 2)
    left.plot([0.3, 1], [0.3, 1], color="0.6", lw=1, ls=":")
    for rule in SHOWN:
        colour, marker = STYLE[rule]
        confidence, top = np.transpose(record["reliability"][rule])
        left.plot(confidence, top, marker=marker, color=colour, label=LABELS[rule])
        sizes = record["sizes"]
        nll = [part["rules"][rule]["nll"] for part in sizes.values()]
        right.plot(range(len(sizes)), nll, marker=marker, color=colour)
    left.set(xlabel="probability of the most probable atom", ylabel="share that is right")
    right.set(xlabel="reactant atoms", ylabel="NLL of the right atom, nats", ylim=(0, None))
    right.set_xticks(range(len(record["sizes"])), list(record["sizes"]))
    for ax in (left, right):
        ax.grid(alpha=0.25, lw=0.5)
    figure.legend(loc="outside lower center", ncols=len(SHOWN), frameon=False)
    save_figure(path, figure)


def markdown(record: dict) -> list[str]:
    """The tables of the page."""
    rules = record["all"]["rules"]
    lines = [
        "| rule | NLL, nats | gain over the baseline, nats | probability of a right atom | ECE |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for rule, scores in rules.items():
        gain = record["gain"].get(f"{rule} over {BASELINE}")
        shown = "" if gain is None else f"{gain[0]:+.3f} ± {gain[1]:.3f}"
        lines.append(
            f"| {LABELS[rule]} | {scores['nll']:.3f} | {shown} | {100 * scores['p']:.1f} % | "
            f"{100 * scores['ece']:.1f} % |"
        )
    parts = {**record["sizes"], "all": record["all"]}
    lines += ["", *size_markdown(parts)]
    lines += ["", *rules_by_size(parts, "NLL, nats", "nll", 1, ".3f")]
    lines += ["", *rules_by_size(parts, "ECE, %", "ece", 100, ".1f")]
    return lines + package_markdown(record["package"])


def size_markdown(parts: dict[str, dict]) -> list[str]:
    """By the number of reactant atoms: accuracy, and the probability of a right atom."""
    lines = [
        "| reactant atoms | rows | right atom on top, under every rule | "
        "its probability: baseline | constant |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for span, part in parts.items():
        shares = part["top"], *(part["rules"][rule]["p"] for rule in (BASELINE, CHOSEN))
        cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
        lines.append(f"| {span} | {part['rows']:,} | {cells} |")
    return lines


def rules_by_size(
    parts: dict[str, dict], title: str, measure: str, factor: int, digits: str
) -> list[str]:
    """A line for each rule, and a column for each number of reactant atoms."""
    lines = [f"| {title}, by reactant atoms | {' | '.join(parts)} |"]
    lines += ["| --- |" + " ---: |" * len(parts)]
    for rule in parts["all"]["rules"]:
        scores = [factor * part["rules"][rule][measure] for part in parts.values()]
        cells = " | ".join(f"{score:{digits}}" for score in scores)
        lines.append(f"| {LABELS[rule]} | {cells} |")
    return lines


def package_markdown(record: dict | None) -> list[str]:
    """The tables of what the package itself answers, before and after."""
    if record is None:
        return []
    names = {
        "atoms": "atoms mapped right",
        "reactions": "reactions mapped right throughout",
        "atom_ece": "ECE of atoms",
        "reaction_ece": "ECE of reactions",
        "changed": "reactions whose map changes",
    }
    lines = ["", "| RXNMapper's own answer | baseline | constant | change, points |"]
    lines += ["| --- | ---: | ---: | ---: |"]
    for key, name in names.items():
        before, after = (record[rule].get(key) for rule in (BASELINE, "fit"))
        cells = ["" if value is None else f"{100 * value:.1f} %" for value in (before, after)]
        change = record["difference"].get(key)
        cells.append("" if change is None else f"{100 * change[0]:+.2f} ± {100 * change[1]:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| confidence of a reaction | baseline: reactions, right | constant |"]
    lines += ["| --- | --- | --- |"]
    for before, after in zip(record[BASELINE]["bins"], record["fit"]["bins"], strict=True):
        cells = [f"{n:,}, {100 * right:.0f} %" if n else "0" for _, n, right in (before, after)]
        lines.append(f"| {before[0]} | {' | '.join(cells)} |")
    return lines


STEPS = {"convert": convert, "collect": collect, "calibrate": fit_rules, "measure": measure}

if __name__ == "__main__":
    main()
