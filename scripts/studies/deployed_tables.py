"""The tables of the page of deployed heads, from its record, which has more rules and sizes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from deployed_rules import ETS, RULES
from study import table

from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, LOG_SIZE, POLYNOMIAL
from calibrate.evidence.baselines import PAPER
from calibrate.evidence.estimate import decimal
from calibrate.evidence.evidence import BASELINE
from calibrate.fitting.options import LEAST_SQUARES

LABELS = {
    "rxnmapper": "RXNMapper",
    "chython-rxnmap": "chython-rxnmap",
    "lighterglue": "LighterGlue",
    "lightglue-disk": "LightGlue, DISK",
    "minilm": "MiniLM",
}
REACTION_HEADS = ("rxnmapper", "chython-rxnmap")
FITTED = ((CONSTANT, BASELINE), (LOG_SIZE, CONSTANT), (POLYNOMIAL, CONSTANT),
          (ENTROPY_AND_SIZE, CONSTANT))  # fmt: skip
BY_OTHERS = ((ETS, CONSTANT), (LEAST_SQUARES, CONSTANT), (PAPER, CONSTANT), (PAPER, BASELINE))
SHORT = RULES | {PAPER: "published polynomial"}
BY_SIZE = (BASELINE, CONSTANT, LOG_SIZE, POLYNOMIAL)
SIZES = ("128", "256")  # of RXNMapper: the largest number of atoms of a range
WITH_ECE = (BASELINE, CONSTANT, POLYNOMIAL, LEAST_SQUARES, PAPER)
TESTED, KEPT = "test", "kept aside"
ANSWERS = {
    "before": "as it is",
    "after": "constant before its rules",
    "read": "its own map, confidence with the constant",
}


def markdown(record: dict[str, Any]) -> list[str]:
    """Every table of the page, with an empty line between two."""
    heads, kept = record["heads"], record["kept"]
    tested = {LABELS[name]: head["test"] for name, head in heads.items()}
    parts = {f"{label}, {TESTED}": part for label, part in tested.items()}
    parts |= {
        f"{LABELS[name]}, {', '.join(head['other']['by_cluster'])}": head["other"]
        for name, head in heads.items()
        if "other" in head
    }
    parts |= {f"{LABELS[name]}, {KEPT}": part for name, part in kept.items()}
    return [
        *improvements(parts, ["rows, groups, clusters", "misranked"], FITTED), "",
        *improvements(tested, [], BY_OTHERS), "",
        *constants(heads), "",
        *calibration_errors(heads), "",
        *sizes({TESTED: heads["rxnmapper"]["test"], KEPT: kept["rxnmapper"]}), "",
        *package_table({name: heads[name]["user"] for name in REACTION_HEADS}),
    ]  # fmt: skip


def interval(values: list[float]) -> str:
    """A mean with its interval."""
    mean, low, high = map(signed, values)
    return f"{mean} ({low} to {high})"


def signed(value: float) -> str:
    """A number with its sign and three decimals, or four where three would hide the sign."""
    return decimal(value, "+.3f" if abs(value) >= 0.0005 else "+.4f").replace("+0.0000", "0.0000")


def improvements(
    parts: dict[str, dict[str, Any]], counts: list[str], pairs: Sequence[tuple[str, str]]
) -> list[str]:
    """Improvements of NLL on each head, with their intervals, beside the columns of `counts`."""
    titles = [f"{SHORT[a]} over {SHORT[b]}" for a, b in pairs]
    rows = []
    for name, part in parts.items():
        counted = ", ".join(f"{part[key]:,}" for key in ("rows", "groups", "clusters"))
        cells = [counted, percent(part["misranked"])] if counts else []
        cells += [interval(part["improvement"][f"{a} over {b}"]) for a, b in pairs]
        rows.append([name, *cells])
    return table(["head", *counts, *titles], rows)


def constants(heads: dict[str, Any]) -> list[str]:
    """NLL of four rules on the test split, and of the constant on folds; beta of the constant."""

    def row(label: str, cell_of: Callable[[dict[str, Any]], str]) -> list[str]:
        return [label, *map(cell_of, heads.values())]

    def nll_row(rule: str) -> list[str]:
        return row(SHORT[rule], lambda head: f"{head['test']['rules'][rule]['nll']:.3f}")

    return table(["NLL, nats", *(LABELS[name] for name in heads)], [
        *map(nll_row, (BASELINE, CONSTANT, POLYNOMIAL, PAPER)),
        row("*constant, folds of the calibration split*",
            lambda head: f"{head['calibration']['kinds'][CONSTANT]:.3f}"),
        row("*its beta*", lambda head: f"{head['fits'][CONSTANT]['coefficients'][0]:.3g}"),
    ])  # fmt: skip


def calibration_errors(heads: dict[str, Any]) -> list[str]:
    """The ECE of some rules on each head."""
    rows = ([RULES[rule], *(ece_cell(head["test"]["rules"][rule]) for head in heads.values())]
            for rule in WITH_ECE)  # fmt: skip
    title = "ECE (chance level), %, of rows with one right item"
    return table([title, *(LABELS[name] for name in heads)], rows)


def ece_cell(rule: dict[str, float]) -> str:
    return f"{100 * rule['ece']:.1f} ({100 * rule['chance']:.1f})"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def sizes(parts: dict[str, dict[str, Any]]) -> list[str]:
    """NLL of some rules of RXNMapper by number of atoms; the record has the largest of a range."""
    rows = []
    for name, found in parts.items():
        for n in SIZES:
            part = found["sizes"][n]
            cells = [f"{part['nll'][rule]:.3f}" for rule in BY_SIZE]
            label = f"{name}, {int(n) // 2 + 1}-{n}"
            rows.append([label, f"{part['rows']:,}", percent(part["misranked"]), *cells])
    titles = ["rows", "misranked", *(SHORT[rule] for rule in BY_SIZE)]
    return table(["RXNMapper, atoms", *titles], rows)


def package_table(reactions: dict[str, Any]) -> list[str]:
    """What the packages of reaction heads answer, as they are and with the constant."""
    rows = []
    for name, user in reactions.items():
        mean, low, high = (100 * x for x in user["difference"])
        change = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
        for key, label in ANSWERS.items():
            if answer := user.get(key):
                wrong = round((1 - answer["reactions"]) * user["reactions"])
                cells = [f"{user['reactions']}", f"{wrong}", percent(answer["reactions"])]
                cells.append(change if key == "after" else "")
                auroc = answer["separation"]
                error = auroc_error(auroc, user["reactions"] - wrong, wrong)
                cells.append(f"{auroc:.2f} ± {error:.2f}")
                rows.append([f"{LABELS[name]}, {label}", *cells, ece_cell(answer)])
    return table(
        ["package's own answer", "reactions", "wrong", "mapped right", "change, points",
         "AUROC of its confidence", "ECE of its confidence (chance level), %"], rows
    )  # fmt: skip


def auroc_error(auroc: float, right: int, wrong: int) -> float:
    """The standard error of an AUROC, from the numbers of both classes alone.

    Reference: Hanley and McNeil 1982, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve".
    """
    two_right, two_wrong = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)
    variance = auroc * (1 - auroc) + (right - 1) * (two_right - auroc**2)
    variance += (wrong - 1) * (two_wrong - auroc**2)
    return math.sqrt(variance / (right * wrong))
