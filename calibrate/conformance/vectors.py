"""The rows and rules of `vectors.json`: README.md beside it describes the format."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.masking import is_masked

PATH = Path(__file__).with_name("vectors.json")


@dataclass(frozen=True, eq=False)
class VectorRow:
    """One row of logits.

    Attributes:
      name: says what the row tests.
      logits: (n,) float32; -inf, or a number far below the others, where an item is masked.
      mask: (n,) bool, True for real items, if the mask is an argument; None without one.
    """

    name: str
    logits: np.ndarray
    mask: np.ndarray | None

    @property
    def real(self) -> np.ndarray:
        """(n,) bool, True for items that are masked neither by `mask` nor by their logit."""
        with np.errstate(invalid="ignore"):
            z = self.logits if self.mask is None else np.where(self.mask, self.logits, -np.inf)
            return np.asarray((z > -np.inf) & ~is_masked(z - z.max()))


@cache
def read_vectors() -> dict[str, Any]:
    """The document of `vectors.json`."""
    document: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return document


@cache
def vector_rows() -> tuple[VectorRow, ...]:
    """The rows, in the order of the file."""
    return tuple(_row(row) for row in read_vectors()["rows"])


def _row(row: dict[str, Any]) -> VectorRow:
    if "formula" in row:
        of = row["formula"]
        i = np.arange(of["n"])
        logits = (of["multiplier"] * i) % of["modulus"] / of["divisor"]
    else:
        logits = np.array([-np.inf if z is None else z for z in row["logits"]])
    mask = np.array(row["mask"]) if "mask" in row else None
    return VectorRow(row["name"], logits.astype(np.float32), mask)
