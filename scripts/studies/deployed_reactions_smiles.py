"""A reaction as RXNMapper reads it: SMILES as tokens of its vocabulary, and the true map."""

import re
from typing import NamedTuple

import numpy as np

# Atoms in brackets, two-letter elements, the organic subset, ring numbers, bonds and punctuation.
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOSPFIbcnosp]|%[0-9]{2}|[0-9]|>>|[()=#+\\/:~@?>*$.-]")
ATOM = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOSPFIbcnosp*]")


class Reaction(NamedTuple):
    """One reaction, its text, and which reactant atoms each product atom may come from."""

    text: str  # SMILES
    tokens: list[str]
    query: np.ndarray  # (rows,) positions of the tokens of product atoms that have a source
    product_atoms: np.ndarray  # (rows,) their numbers among the atoms of the product
    reactant_atoms: np.ndarray  # (n,) positions of the tokens of atoms left of ">>"
    source: np.ndarray  # (rows, n) bool: the right ones


def tokenize(smiles: str) -> list[str] | None:
    """The tokens of SMILES; None where a character belongs to none."""
    tokens = TOKEN.findall(smiles)
    return tokens if "".join(tokens) == smiles else None


def atom_positions(tokens: list[str]) -> np.ndarray:
    """(atoms,) positions of the tokens that are atoms."""
    return np.array([i for i, token in enumerate(tokens) if ATOM.fullmatch(token)], int)
