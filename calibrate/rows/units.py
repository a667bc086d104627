"""Units of work: parts of the rows of one size, each with a seed, and a head that runs on them."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import jax

from calibrate.rows.heads import Head, call_member, check_batch, check_logits


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


def attended_pieces(
    head: Head,
    stream: str,
    seed: int,
    unit: Unit,
    items_per_piece: int = UNIT_SIZES.items_per_piece,
) -> Iterator[tuple[slice, Any, Any]]:
    """Runs a head on a unit, piece by piece: (slice of the unit's rows, batch, attended)."""
    batch = call_member(head, "sample", unit_seed(stream, seed, unit), unit.size, unit.sets)
    check_batch(head, batch, unit.size, unit.sets)
    per_piece = max(1, items_per_piece // unit.size)
    for start in range(0, unit.sets, per_piece):
        part = slice(start, min(start + per_piece, unit.sets))
        piece = jax.tree.map(itemgetter(part), batch)
        attended = call_member(head, "attend", piece)
        check_logits(head, attended, unit.size, part.stop - part.start)
        yield part, piece, attended


def one_ahead(items: Iterable[Any]) -> Iterator[Any]:
    """Yields the same items, each after the next is made: JAX then computes in the background."""
    iterator = iter(items)
    for current in iterator:
        for following in iterator:
            yield current
            current = following
        yield current
