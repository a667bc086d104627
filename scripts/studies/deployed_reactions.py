"""Rows of two heads that map atoms: RXNMapper, and chython-rxnmap.

A row is an atom of the product, its items are atoms of the reactants, and the right ones are those
that the template, or the Golden data set, says it comes from. Rows of one item are left out.

RXNMapper (deployed_reactions_head.py): all atoms left of the arrow; the logits are the logarithm of
its attention. chython-rxnmap: atoms of the same element in the reactants, agents left out; the
logits are the logarithm of the attention of product to reactant and back, summed, which is the
matrix that its package walks through.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from deployed_reactions_smiles import Reaction, atom_positions, tokenize
from deployed_rows import CALIBRATION, OTHER, RESERVE, TEST, HeadRows, Row, log_weights
from joblib import Parallel, delayed

from calibrate.storage.atomic_io import write_atomically
from calibrate.storage.npz import write_arrays

WHEEL = "rxnmapper-0.4.3-*.whl"
RXNMAPPER_REACTIONS = {CALIBRATION: 150, TEST: 75, RESERVE: 75}  # of a class
CHYTHON_REACTIONS = {CALIBRATION: 24, TEST: 24, RESERVE: 24}
GOLDEN_RECORDS = "golden records"


class ReactionRows(NamedTuple):
    """The rows of one reaction, and what is kept of it for the package's own answer."""

    logits: np.ndarray  # (rows, items) float32; -inf: no item
    right: np.ndarray  # (rows, items) bool
    record: dict[str, Any]  # text and true map
    attention: np.ndarray | None = None  # of chython-rxnmap: (product atoms, reactant atoms)


def make_rxnmapper_rows(folder: Path) -> None:
    """Writes rows.npz and reactions.json of RXNMapper, from the wheel in the folder."""
    from deployed_reactions_head import convert

    if not (folder / "model").exists():
        (wheel,) = folder.glob(WHEEL)
        convert(wheel, folder / "unfinished")
        (folder / "unfinished").rename(folder / "model")
    parts = rows_by_class(rxnmapper_rows, folder / "model", RXNMAPPER_REACTIONS)
    write_rows(folder, parts, {"rxnmapper": "0.4.3", "transformers": version("transformers")})


def make_chython_rows(folder: Path) -> None:
    """Writes rows.npz, reactions.json and attention.npz of chython-rxnmap."""
    parts = rows_by_class(chython_rows, folder, CHYTHON_REACTIONS)
    parts.append((GOLDEN_RECORDS, OTHER, golden_rows()))
    matrices = [reaction.attention for *_, part in parts for reaction in part]
    write_arrays(folder / "attention.npz", {str(i): x for i, x in enumerate(matrices)})
    packages = ("chython", "chython-rxnmap", "onnxruntime", "rdkit")
    write_rows(folder, parts, {name: version(name) for name in packages})


ClassRows = tuple[str, int, list[ReactionRows]]  # name of the class, its split, its reactions


def rows_by_class(
    make: Callable[[Path, str, int], list[ReactionRows]], folder: Path, counts: dict[int, int]
) -> list[ClassRows]:
    """The reactions of every class, with their rows; classes are shared among the processors."""
    from deployed_reactions_data import CALIBRATION_CLASSES, KEPT_CLASSES, TEST_CLASSES

    classes = {CALIBRATION: CALIBRATION_CLASSES, TEST: TEST_CLASSES, RESERVE: KEPT_CLASSES}
    tasks = [(name, split) for split, names in classes.items() for name in names]
    rows = Parallel(n_jobs=-1)(delayed(make)(folder, name, counts[split]) for name, split in tasks)
    return [(*task, part) for task, part in zip(tasks, rows, strict=True)]


def rxnmapper_rows(model: Path, name: str, count: int) -> list[ReactionRows]:
    """The rows of RXNMapper's head for reactions of a class."""
    import torch
    from deployed_reactions_head import PointerHead, reactions_of

    torch.set_num_threads(1)
    head = PointerHead(model)
    return [
        ReactionRows(head.logits(reaction), reaction.source, record_of(reaction))
        for reaction in reactions_of(head, name, count)
    ]


def chython_rows(folder: Path, name: str, count: int) -> list[ReactionRows]:
    """The rows of chython-rxnmap for reactions of a class."""
    from deployed_reactions_data import make_reactions

    usable = (without_agents(reaction) for reaction in make_reactions(name, seed=0))
    first = islice((reaction for reaction in usable if reaction is not None), count)
    return [rows_of_chython(record_of(reaction)) for reaction in first]


def record_of(reaction: Reaction) -> dict[str, Any]:
    """Text and true map: for each product atom with a source, the reactant atoms that are right."""
    return {
        "text": reaction.text,
        "product_atoms": reaction.product_atoms.tolist(),
        "source": [np.flatnonzero(row).tolist() for row in reaction.source],
    }


def without_agents(reaction: Reaction) -> Reaction | None:
    """The reaction without solvents and reagents; None where one of them is a source."""
    from deployed_reactions_data import REAGENTS

    left, right = reaction.text.split(">>")
    molecules = left.split(".")
    is_kept = [molecule not in REAGENTS for molecule in molecules]
    counts = [len(atom_positions(tokenize(molecule) or [])) for molecule in molecules]
    columns = np.repeat(is_kept, counts)
    if reaction.source[:, ~columns].any():
        return None
    kept = [molecule for molecule, keep in zip(molecules, is_kept, strict=True) if keep]
    return reaction._replace(
        text=".".join(kept) + ">>" + right,
        reactant_atoms=reaction.reactant_atoms[columns],
        source=reaction.source[:, columns],
    )


def rows_of_chython(record: dict[str, Any]) -> ReactionRows:
    """The rows of chython-rxnmap for one reaction."""
    from chython.core import read_reaction_smiles
    from chython.reactions.attention._encode import encode_reaction, run_model

    reaction = read_reaction_smiles(record["text"])
    encoded = encode_reaction(reaction.reactants, reaction.products)
    attention = run_model(encoded, threads=1)
    atoms = np.array(record["product_atoms"], int)
    right = np.zeros((len(atoms), attention.shape[1]), bool)
    for row, source in zip(right, record["source"], strict=True):
        row[source] = True
    same_element = encoded.equal_atoms[atoms]
    assert same_element[right].all(), record["text"]
    logits = np.where(same_element, log_weights(attention[atoms]), -np.inf).astype(np.float32)
    return ReactionRows(logits, right, record, attention.astype(np.float32))


def golden_rows() -> list[ReactionRows]:
    """The rows of chython-rxnmap for the Golden records in its tests."""
    import chython.reactions

    path = Path(chython.reactions.__file__).parent / "test" / "golden_subset.smi"
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = [line.split("\t")[1] for line in lines if line and not line.startswith("#")]
    return [rows_of_chython(read_mapped(text)) for text in texts]


def read_mapped(text: str) -> dict[str, Any]:
    """Text without its map, and the map, of mapped SMILES.

    Every reactant atom that symmetry makes equal to the mapped one is right. Equal molecules on
    the left count as equal.
    """
    from deployed_reactions_data import output_order
    from rdkit import Chem

    sides = [Chem.MolFromSmiles(side) for side in text.split(">>")]
    number = [[atom.GetAtomMapNum() for atom in side.GetAtoms()] for side in sides]
    for side in sides:
        for atom in side.GetAtoms():
            atom.SetAtomMapNum(0)
    ranks = np.array(list(Chem.CanonicalRankAtoms(sides[0], breakTies=False)))
    place = {mapped: atom for atom, mapped in enumerate(number[0]) if mapped}
    ranks_written = ranks[output_order(sides[0])]
    atoms, source = [], []
    for written, atom in enumerate(output_order(sides[1])):
        if number[1][atom] in place:
            atoms.append(written)
            same = ranks_written == ranks[place[number[1][atom]]]
            source.append(np.flatnonzero(same).tolist())
    return {
        "text": ">>".join(map(Chem.MolToSmiles, sides)),
        "product_atoms": atoms,
        "source": source,
    }


def write_rows(folder: Path, parts: Sequence[ClassRows], packages: Mapping[str, str]) -> None:
    """Writes the reactions as reactions.json, and then rows.npz."""
    records, rows, one_item = [], [], 0
    for cluster, (name, split, reactions) in enumerate(parts):
        for reaction in reactions:
            several = rows_of(reaction, len(records), cluster)
            one_item += len(reaction.logits) - len(several)
            rows += several
            records.append({**reaction.record, "class": name, "split": split})
    about = {
        "clusters": [name for name, *_ in parts],
        "counts": {"rows": len(rows), "rows of one item, left out": one_item},
        "packages": packages,
    }
    write_atomically(folder / "reactions.json", json.dumps(records).encode())
    HeadRows.of(rows, np.array([split for _, split, _ in parts]), about).write(folder)


def rows_of(reaction: ReactionRows, group: int, cluster: int) -> list[Row]:
    """The rows of a reaction with two items or more; their n is the power of two from there on."""
    rows = []
    for logits, right in zip(reaction.logits, reaction.right, strict=True):
        is_item = logits > -np.inf
        if (length := int(is_item.sum())) > 1:
            n = 1 << (length - 1).bit_length()
            rows.append(Row(logits[is_item], right[is_item], n, group, cluster))
    return rows
