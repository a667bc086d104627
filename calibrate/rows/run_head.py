"""Running a head: draws the inputs of a unit, and attends to them piece by piece."""

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import jax

from calibrate.rows.heads import Head, call_member, check_batch, check_logits
from calibrate.rows.units import UNIT_SIZES, Unit, unit_seed


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
