#!/usr/bin/env python
"""RXNMapper itself on the test reactions, with its head as it is and with the fitted constant.

The package needs Transformers 4, and therefore an environment of its own:
    python -m venv runs/rxnmapper/environment
    runs/rxnmapper/environment/bin/pip install 'rxnmapper[rdkit]==0.4.3' 'setuptools<81'
    runs/rxnmapper/environment/bin/python scripts/studies/reaction_maps_package.py

Writes runs/rxnmapper/package.json, which `reaction_maps.py measure` reads. A constant beta on the
queries makes p^beta / sum of p^beta of a row of attention weights p: that is done to the head's
weights, before the package's own rules (types of atoms, neighbours, no atom twice). An interrupted
run goes on where it stopped.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

RUNS = Path(__file__).parents[2] / "runs" / "rxnmapper"
FIT = RUNS / "fits" / "constant.json"  # calibrate is not installed here: the file is read as JSON
BINS = ((0, 0.2), (0.2, 0.35), (0.35, 0.5), (0.5, 0.65), (0.65, 0.8), (0.8, 0.95), (0.95, 1.0))
ECE_BINS = 10


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    beta = json.loads(FIT.read_text())["entries"][0]["coefficients"][-1]
    reactions = [
        reaction
        for path in sorted((RUNS / "rows" / "test").glob("*.json"))
        for reaction in json.loads(path.read_text())
    ]
    answers = {"baseline": answers_of(reactions, 1.0), "fit": answers_of(reactions, beta)}
    record = {"beta": beta, "reactions": len(reactions)}
    for rule, given in answers.items():
        record[rule] = summary(reactions, given)
    maps = [[answer["map"] for answer in given] for given in answers.values()]
    changed = [before != after for before, after in zip(*maps, strict=True)]
    record["fit"]["changed"] = float(np.mean(changed))
    right = [atoms_right(reactions, given) for given in answers.values()]
    record["difference"] = {
        "atoms": paired_difference(*right),
        "reactions": paired_difference(*([[all(x)] for x in rule] for rule in right)),
    }
    write(RUNS / "package.json", record)


def answers_of(reactions: list[dict], beta: float) -> list[dict]:
    """The package's map, and its confidences by atom and of the reaction, of every reaction."""
    path = RUNS / f"package-{beta:g}.jsonl"
    done = finished(path)
    if texts(done) != texts(reactions[: len(done)]):
        done = []
    mapper = sharpened_mapper(beta)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(answer) + "\n" for answer in done)
        for number, reaction in enumerate(reactions[len(done) :], len(done)):
            (result,) = mapper.get_attention_guided_atom_maps(
                [reaction["text"]], detailed_output=True, canonicalize_rxns=False
            )
            answer = {
                "text": reaction["text"],
                "map": [int(atom) for atom in result["pxr_mapping_vector"]],
                "atoms": [float(p) for p in result["pxr_confidences"]],
                "confidence": result["confidence"],
            }
            done.append(answer)
            file.write(json.dumps(answer) + "\n")
            if number % 100 == 99:
                print(f"beta {beta:g}: {number + 1} of {len(reactions)}", file=sys.stderr)
    return done


def finished(path: Path) -> list[dict]:
    """The answers of an earlier run; a last line that was being written is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def texts(reactions: list[dict]) -> list[str]:
    """The text of each reaction."""
    return [reaction["text"] for reaction in reactions]


def sharpened_mapper(beta: float):
    """RXNMapper with beta times the logits of its head; 1 is the package as it is."""
    from rxnmapper import RXNMapper

    mapper = RXNMapper()
    weights_of = mapper.convert_batch_to_attns

    def sharpened(*args, **options):
        powers = (weights.double() ** beta for weights in weights_of(*args, **options))
        return [(power / power.sum(-1, keepdim=True)).float() for power in powers]

    if beta != 1:
        mapper.convert_batch_to_attns = sharpened
    return mapper


def atoms_right(reactions: list[dict], answers: list[dict]) -> list[list[bool]]:
    """For each reaction, whether each atom of its product is mapped to one of its true sources."""
    return [
        [
            answer["map"][atom] in source
            for atom, source in zip(reaction["product_atoms"], reaction["source"], strict=True)
        ]
        for reaction, answer in zip(reactions, answers, strict=True)
    ]


def paired_difference(before: list[list[bool]], after: list[list[bool]]) -> list[float]:
    """[mean, standard error] of the change of a share of items, where lists are independent."""
    changes = [sum(new) - sum(old) for old, new in zip(before, after, strict=True)]
    items = np.array([len(old) for old in before])
    mean = sum(changes) / items.sum()
    residuals = np.array(changes) - mean * items
    n = len(items)
    return [float(mean), float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / items.sum())]


def summary(reactions: list[dict], answers: list[dict]) -> dict:
    """Shares that are right, and how well confidences match them.

    An atom is right if it is mapped to one of its true sources; a reaction if all its atoms are.
    The package's confidence of a reaction is the product of those of its atoms.
    """
    mapped = atoms_right(reactions, answers)
    atom_right = [right for reaction in mapped for right in reaction]
    right = [all(reaction) for reaction in mapped]
    atom_confidence = [
        answer["atoms"][atom]
        for reaction, answer in zip(reactions, answers, strict=True)
        for atom in reaction["product_atoms"]
    ]
    confidence = [answer["confidence"] for answer in answers]
    bins = []
    for low, high in BINS:
        inside = [
            r for r, p in zip(right, confidence, strict=True) if low <= p < high + (high == 1)
        ]
        share = float(np.mean(inside)) if inside else 0.0
        bins.append([f"{low:g} to {high:g}", len(inside), share])
    return {
        "atoms": float(np.mean(atom_right)),
        "reactions": float(np.mean(right)),
        "mean_confidence": float(np.mean(confidence)),
        "atom_ece": calibration_error(atom_confidence, atom_right),
        "reaction_ece": calibration_error(confidence, right),
        "bins": bins,
    }


def calibration_error(confidence: list[float], right: list[bool]) -> float:
    """The expected calibration error over ten bins of equally many items."""
    order = np.argsort(confidence, kind="stable")
    parts = np.array_split(order, min(ECE_BINS, len(order)))
    p, top = np.array(confidence), np.array(right, float)
    gaps = [len(part) * abs(p[part].mean() - top[part].mean()) for part in parts]
    return float(sum(gaps) / len(order))


def write(path: Path, record: dict) -> None:
    """Writes JSON whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    main()
