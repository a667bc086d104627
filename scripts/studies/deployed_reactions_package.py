"""What RXNMapper and chython answer themselves, with their attention as it is and with a constant.

Both walk through the attention: the strongest pair of atoms first, neighbours of mapped atoms with
more weight, unlike elements and used atoms not at all. The confidence of a reaction is RXNMapper's
product over atoms, and chython's mean. A constant beta makes p^beta / sum of p^beta of a row of
attention weights p, before the walk: of RXNMapper in each direction, over all tokens, as a factor
on its queries would; of chython over the reactant atoms of a product atom, as in its rows.
"""

import importlib
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from deployed_reactions import WHEEL
from deployed_rows import TEST
from deployed_rules import bootstrap, calibration_error, diagram_of
from joblib import Parallel, delayed
from sklearn.metrics import roc_auc_score

from calibrate.storage.npz import read_arrays

MULTIPLIER = 1.75  # chython's default, of neighbours of mapped atoms


class Answer(NamedTuple):
    """The package's map of a reaction, and its confidence."""

    atoms: list[int]  # reactant atom of each product atom, -1 without one
    confidence: float


def package_record(head: str, folder: Path, beta: float) -> dict[str, Any]:
    """How good the package's answers on the test reactions are, before and after the constant."""
    answers_of = {"rxnmapper": rxnmapper_answers, "chython-rxnmap": chython_answers}[head]
    records = json.loads((folder / "reactions.json").read_text())
    tested = [i for i, record in enumerate(records) if record["split"] == TEST]
    records = [records[i] for i in tested]
    before, after = (answers_of(folder, records, tested, b) for b in (1.0, beta))
    result = {"reactions": len(records), "before": judge(records, before)}
    result["after"] = judge(records, after)
    right = [np.array(maps_right(records, answers), float) for answers in (before, after)]
    result["difference"] = bootstrap(right[1] - right[0], np.arange(len(records)))
    changed = [a.atoms != b.atoms for a, b in zip(before, after, strict=True)]
    result["changed"] = float(np.mean(changed))
    if head == "chython-rxnmap":
        result["read"] = judge(records, confidences_read(folder, before, tested, beta))
    return result


def atoms_right(record: dict[str, Any], answer: Answer) -> list[bool]:
    """True for each product atom with a source that is mapped to a right one."""
    pairs = zip(record["product_atoms"], record["source"], strict=True)
    return [answer.atoms[atom] in source for atom, source in pairs]


def maps_right(records: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> list[bool]:
    """True for each reaction whose atoms are all mapped right."""
    pairs = zip(records, answers, strict=True)
    return [all(atoms_right(record, answer)) for record, answer in pairs]


def judge(records: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> dict[str, Any]:
    """Shares of atoms and reactions that are right, and the reliability of confidences."""
    right = np.array(maps_right(records, answers), float)
    confidence = np.array([answer.confidence for answer in answers])
    of_atoms = [atoms_right(*pair) for pair in zip(records, answers, strict=True)]
    return {
        "atoms": float(np.mean([right for reaction in of_atoms for right in reaction])),
        "reactions": float(right.mean()),
        "confidence": float(confidence.mean()),
        **calibration_error(diagram_of(confidence, right)),
        "separation": float(roc_auc_score(right, confidence)),
    }


def rxnmapper_answers(
    folder: Path, records: Sequence[dict[str, Any]], numbers: Sequence[int], beta: float
) -> list[Answer]:
    """RXNMapper's answers, from the rules in its wheel and its head in Transformers."""
    parts = np.array_split(np.arange(len(records)), 2)
    answers = Parallel(n_jobs=-1)(
        delayed(walk_of_rxnmapper)(folder, [records[i]["text"] for i in part], beta)
        for part in parts
    )
    return [answer for part in answers for answer in part]


def walk_of_rxnmapper(folder: Path, texts: Sequence[str], beta: float) -> list[Answer]:
    """The answers of the package's rules to some reactions."""
    import torch
    from deployed_reactions_head import PointerHead
    from deployed_reactions_smiles import tokenize

    torch.set_num_threads(1)
    (wheel,) = folder.glob(WHEEL)
    scorer = rules_of_wheel(wheel)
    head, answers = PointerHead(folder / "model"), []
    for text in texts:
        tokens = ["[CLS]", *(tokenize(text) or []), "[SEP]"]
        power = head.attention(head.ids(tokens[1:-1]), special=True) ** beta
        weights = power / power.sum(axis=-1, keepdims=True)
        found = scorer(text, tokens, weights).generate_attention_guided_pxr_atom_mapping()
        confidence = float(np.prod(found["confidences"]))
        answers.append(Answer(found["pxr_mapping_vector"], confidence))
    return answers


def rules_of_wheel(wheel: Path) -> Any:
    """The class of RXNMapper's rules.

    `import rxnmapper` needs Transformers 4, which its module of rules does not.
    """
    if "rxnmapper" not in sys.modules:
        package = types.ModuleType("rxnmapper")
        package.__path__ = [f"{wheel}/rxnmapper"]
        sys.path.append(str(wheel))
        sys.modules["rxnmapper"] = package
    return importlib.import_module("rxnmapper.attention").AttentionScorer


def chython_answers(
    folder: Path, records: Sequence[dict[str, Any]], numbers: Sequence[int], beta: float
) -> list[Answer]:
    """chython's answers: its walk through the stored attention."""
    from chython.core import read_reaction_smiles
    from chython.reactions.attention._assign import greedy_mapping, side_adjacency

    attention, answers = read_arrays(folder / "attention.npz"), []
    for number, record in zip(numbers, records, strict=True):
        reaction = read_reaction_smiles(record["text"])
        sides = [side_adjacency(side) for side in (reaction.reactants, reaction.products)]
        weights = attention[str(number)].astype(float)
        if beta != 1:
            weights = sharpen(weights, beta)
        atoms, score = greedy_mapping(weights, *sides, MULTIPLIER)
        answers.append(Answer(atoms.tolist(), float(score)))
    return answers


def confidences_read(
    folder: Path, answers: Sequence[Answer], numbers: Sequence[int], beta: float
) -> list[Answer]:
    """chython's own maps, with the mean calibrated probability of their pairs of atoms."""
    attention, read = read_arrays(folder / "attention.npz"), []
    for number, answer in zip(numbers, answers, strict=True):
        weights = sharpen(attention[str(number)].astype(float), beta)
        pairs = [(atom, source) for atom, source in enumerate(answer.atoms) if source >= 0]
        read.append(Answer(answer.atoms, float(np.mean([weights[pair] for pair in pairs]))))
    return read


def sharpen(weights: np.ndarray, beta: float) -> np.ndarray:
    """Softmax of beta times the logarithm of each row; weights of 0 stay 0."""
    highest = weights.max(axis=1, keepdims=True)
    power = np.divide(weights, highest, out=np.zeros_like(weights), where=highest > 0) ** beta
    total = power.sum(axis=1, keepdims=True)
    return np.divide(power, total, out=np.zeros_like(power), where=total > 0)
