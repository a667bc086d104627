"""SMILES as tokens, as the vocabulary of RXNMapper has them."""

import re

import numpy as np

# Atoms in brackets, two-letter elements, the organic subset, ring numbers, bonds and punctuation.
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOSPFIbcnosp]|%[0-9]{2}|[0-9]|>>|[()=#+\\/:~@?>*$.-]")
ATOM = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOSPFIbcnosp*]")


def tokenize(smiles: str) -> list[str] | None:
    """The tokens of SMILES; None where a character belongs to none."""
    tokens = TOKEN.findall(smiles)
    return tokens if "".join(tokens) == smiles else None


def atom_positions(tokens: list[str]) -> np.ndarray:
    """(atoms,) positions of the tokens that are atoms."""
    return np.array([i for i, token in enumerate(tokens) if ATOM.fullmatch(token)], int)
