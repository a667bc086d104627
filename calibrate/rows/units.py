"""Units of work: parts of the rows of one size, each with a seed, and a head that runs on them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from calibrate.core.masking import on_cpu
from calibrate.errors import CalibrateError
from calibrate.rows.heads import Head
from calibrate.rows.logits_checks import check_target, in_float32


@dataclass(frozen=True)
class UnitSizes:
    """The amounts of data in a unit of work and in a piece of one.

    A unit is the content of one shard, and the most that an interruption can lose: a second or two
    of work. A piece is the batch that a head runs on: large enough to be efficient, small enough
    for the cache. Another value changes the last bits of the logits, and so of collections.
    """

    items: int = 1 << 22
    min_sets: int = 64
    max_sets: int = 1 << 14
    items_per_piece: int = 1 << 13


UNIT_SIZES = UnitSizes()


class Unit(NamedTuple):
    """Rows first .. first + sets - 1 of one size."""

    size: int
    number: int
    first: int
    sets: int


def plan_units(size: int, sets: int, unit_sizes: UnitSizes = UNIT_SIZES) -> list[Unit]:
    """Divides `sets` rows of one size into units."""
    per_unit = min(max(unit_sizes.items // size, unit_sizes.min_sets), unit_sizes.max_sets)
    return [
        Unit(size, number, first, min(per_unit, sets - first))
        for number, first in enumerate(range(0, sets, per_unit))
    ]


def unit_seed(stream: str, seed: int, unit: Unit) -> int:
    """First 8 bytes of sha256("stream|seed|size|unit"): streams share no input."""
    text = f"{stream}|{seed}|{unit.size}|{unit.number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class Piece(NamedTuple):
    """Some inputs of a unit, and the head's result."""

    part: slice  # of the unit's rows
    batch: Any
    attended: Any
    logits: np.ndarray  # (count, size) float32, -inf where masked
    target: np.ndarray  # (count,) int, or (count, size) bool
    n_masked: int  # finite logits that count as masked


def attended_pieces(
    head: Head,
    stream: str,
    seed: int,
    unit: Unit,
    items_per_piece: int = UNIT_SIZES.items_per_piece,
) -> Iterator[Piece]:
    """Runs a head on a unit, piece by piece.

    Raises:
      CalibrateError: a target is not a position, or the logits are not floats (count, size).
    """
    size = unit.size
    batch = head.sample(unit_seed(stream, seed, unit), size, unit.sets)
    check_target(batch.target, size, unit.sets, f"head {head.name!r}: sample gave a target of")
    per_piece = max(1, items_per_piece // size)
    for start in range(0, unit.sets, per_piece):
        part = slice(start, min(start + per_piece, unit.sets))
        piece = jax.tree.map(itemgetter(part), batch)
        attended = head.attend(piece)
        logits = np.asarray(on_cpu(attended.logits, "attend's .logits"))
        count = part.stop - part.start
        if logits.shape != (count, size) or not np.issubdtype(logits.dtype, np.floating):
            raise CalibrateError(
                f"head {head.name!r}: attend gave .logits {logits.dtype}{logits.shape}; give "
                f"floats {(count, size)}, the scores before softmax"
            )
        logits, n_masked = in_float32(logits)
        yield Piece(part, piece, attended, logits, np.asarray(piece.target), n_masked)
