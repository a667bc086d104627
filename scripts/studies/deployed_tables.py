"""The tables of the page of deployed heads, from its record."""

from collections.abc import Iterator
from typing import Any

from deployed_rules import ETS, RULES

from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.evidence.baselines import PAPER
from calibrate.evidence.estimate import decimal
from calibrate.evidence.evidence import BASELINE

LABELS = {
    "rxnmapper": "RXNMapper",
    "chython-rxnmap": "chython-rxnmap",
    "lighterglue": "LighterGlue",
    "lightglue-disk": "LightGlue, DISK",
    "minilm": "MiniLM",
}
COMPARISONS = (
    (CONSTANT, BASELINE), (POLYNOMIAL, CONSTANT), (ETS, CONSTANT), (PAPER, BASELINE),
    (PAPER, CONSTANT),
)  # fmt: skip
SHORT = {BASELINE: "softmax", CONSTANT: "constant", POLYNOMIAL: "polynomial", ETS: "ETS",
         PAPER: "published polynomial"}  # fmt: skip
KINDS_SHOWN = (CONSTANT, POLYNOMIAL)
BY_SIZE = (BASELINE, CONSTANT, POLYNOMIAL, ETS)
ANSWERS = {
    "before": "as it is",
    "after": "constant before its rules",
    "read": "its own map, confidence with the constant",
}


def tables(record: dict[str, Any]) -> list[str]:
    """Every table of the page, with an empty line between two."""
    heads = record["heads"]
    parts = [
        improvements({name: head["test"] for name, head in heads.items()}),
        defaults(heads),
        by_rule(heads, "NLL, nats", lambda rule: f"{rule['nll']:.3f}"),
        by_rule(heads, "ECE (chance level), %, of rows with one right item", ece_cell),
        sizes(heads),
    ]
    reactions = {name: heads[name]["user"] for name in LABELS if is_reaction(heads.get(name))}
    parts += [package_table(reactions)] if reactions else []
    for name, head in heads.items():
        if head["user"] and "pairs" in head["user"]:
            parts += [match_table(name, head["user"]), image_table(name, head)]
    if "minilm" in heads:
        parts.append(retrieval_table(heads["minilm"]["user"]))
    others = {
        f"{LABELS[name]}, {', '.join(head['other']['by_cluster'])}": head["other"]
        for name, head in heads.items()
        if "other" in head
    }
    kept = {f"{LABELS[name]}, kept aside": part for name, part in record.get("kept", {}).items()}
    if others or kept:
        parts.append(improvements({**others, **kept}))
    return [line for part in parts for line in ["", *part]][1:]


def is_reaction(head: dict[str, Any] | None) -> bool:
    """True for a head with answers of its package."""
    return bool(head and head["user"] and "reactions" in head["user"])


def head_of(names: list[str]) -> list[str]:
    """The first two lines of a table, whose first column is text."""
    return [line(*names), "| --- |" + " ---: |" * (len(names) - 1)]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def interval(values: list[float]) -> str:
    """A mean with its interval."""
    mean, low, high = (decimal(value, "+.3f") for value in values)
    return f"{mean} ({low} to {high})"


def improvements(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Improvements of NLL on each head, with their intervals."""
    titles = [f"{SHORT[a]} over {SHORT[b]}" for a, b in COMPARISONS]
    lines = head_of(["head", "rows, groups, clusters", "misranked", *titles])
    for name, part in parts.items():
        counts = ", ".join(f"{part[key]:,}" for key in ("rows", "groups", "clusters"))
        found = part["improvement"]
        cells = [interval(found[f"{a} over {b}"]) for a, b in COMPARISONS]
        lines.append(line(LABELS.get(name, name), counts, percent(part["misranked"]), *cells))
    return lines


def defaults(heads: dict[str, Any]) -> list[str]:
    """What `calibrate.fit` does by default, and its constant."""
    lines = head_of(["head", "the default is", "constant, beta", "held out by folds: constant, NLL",
                     "polynomial, NLL"])  # fmt: skip
    for name, head in heads.items():
        kinds = head["calibration"]["kinds"]
        cells = ["refused" if head["refusal"] else "saved"]
        cells.append(f"{head['fits'][CONSTANT]['coefficients'][0]:.3g}")
        lines.append(line(LABELS[name], *cells, *(f"{kinds[k]:.3f}" for k in KINDS_SHOWN)))
    return lines


def by_rule(heads: dict[str, Any], title: str, cell_of: Any) -> list[str]:
    """A line for each rule, and a column for each head."""
    lines = head_of([title, *(LABELS[name] for name in heads)])
    for rule, label in RULES.items():
        found = (head["test"]["rules"].get(rule) for head in heads.values())
        lines.append(line(label, *(cell_of(x) if x else "not fitted" for x in found)))
    return lines


def ece_cell(rule: dict[str, float]) -> str:
    return f"{100 * rule['ece']:.1f} ({100 * rule['chance']:.1f})"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def sizes(heads: dict[str, Any]) -> list[str]:
    """NLL of some rules by nominal n, which is the largest of a range for reaction heads."""
    lines = head_of(["head, n", "rows", "misranked", *(SHORT[rule] for rule in BY_SIZE)])
    for name, head in heads.items():
        for n, part in head["test"]["sizes"].items():
            cells = [f"{part['nll'][rule]:.3f}" for rule in BY_SIZE]
            shown = f"{int(n):,}"
            if is_reaction(head) and int(n) > 2:
                shown = f"{int(n) // 2 + 1}-{n}"
            label = f"{LABELS[name]}, {shown}"
            lines.append(line(label, f"{part['rows']:,}", percent(part["misranked"]), *cells))
    return lines


def package_table(reactions: dict[str, Any]) -> list[str]:
    """What the packages of reaction heads answer, as they are and with the constant."""
    lines = head_of(
        ["package's own answer", "reactions mapped right", "change, points",
         "AUROC of its confidence", "ECE of it (chance level), %"]
    )  # fmt: skip
    for name, user in reactions.items():
        mean, low, high = (100 * x for x in user["difference"])
        change = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
        for key, label in ANSWERS.items():
            if answer := user.get(key):
                separation = answer["separation"]
                cells = [percent(answer["reactions"]), change if key == "after" else ""]
                cells += ["" if separation is None else f"{separation:.2f}", ece_cell(answer)]
                lines.append(line(f"{LABELS[name]}, {label}", *cells))
    return lines


def match_table(name: str, user: dict[str, Any]) -> list[str]:
    """Precision and recall of accepted matches by rule."""
    lines = head_of(
        [f"{LABELS[name]}: matches, {user['pairs']['1']} pairs and sizes", "precision at 0.1",
         "recall at 0.1", "threshold chosen anew", "precision", "recall"]
    )  # fmt: skip
    for rule in BY_SIZE:
        of = user[rule]
        cells = [percent(of["library"][key]) for key in ("precision", "recall")]
        cells.append(f"{of['threshold']:.3f}")
        cells += [percent(of["chosen"][key]) for key in ("precision", "recall")]
        lines.append(line(SHORT[rule], *cells))
    return lines


def image_table(name: str, head: dict[str, Any]) -> list[str]:
    """The loss by image: a few of them carry most of it."""
    lines = head_of(
        [f"{LABELS[name]}: test image", "rows", "share of the constant's NLL",
         "constant over softmax", "polynomial over constant", "ETS over constant"]
    )  # fmt: skip
    images = head["test"]["by_cluster"]
    total = sum(part["rows"] * part["nll"][CONSTANT] for part in images.values())
    for image, nll, rows in largest_first(images):
        pairs = ((CONSTANT, BASELINE), (POLYNOMIAL, CONSTANT), (ETS, CONSTANT))
        cells = [decimal(nll[b] - nll[a], "+.3f") for a, b in pairs]
        share = percent(rows * nll[CONSTANT] / total)
        lines.append(line(image, f"{rows:,}", share, *cells))
    return lines


def largest_first(
    images: dict[str, dict[str, Any]],
) -> Iterator[tuple[str, dict[str, float], int]]:
    """Name, NLL by rule, and rows of each image, that of the largest loss first."""
    by_loss = sorted(images.items(), key=lambda x: -x[1]["rows"] * x[1]["nll"][CONSTANT])
    for image, part in by_loss:
        yield image, part["nll"], part["rows"]


def retrieval_table(user: dict[str, Any]) -> list[str]:
    """Queries that are answered at a confidence of 0.5, and how many are right."""
    lines = head_of(["MiniLM: confidence of 0.5 or more", "queries", "right"])
    for rule in (*BY_SIZE, PAPER):
        lines.append(
            line(SHORT[rule], *(percent(user[rule][key]) for key in ("accepted", "precision")))
        )
    return lines
