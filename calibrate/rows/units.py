"""Units of work: parts of the rows of one size, each with a seed of its own."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple


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
