"""Sources of rows: a head that runs over sets drawn for it, or logits on disk."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calibrate.files.rows import row_bytes
from calibrate.maths.masking import as_masks, finite_masks, warn_of_masks
from calibrate.rows.heads import Head, head_loader
from calibrate.rows.logits_files import Arrays, Part
from calibrate.rows.protocol import call, refuse_probabilities
from calibrate.rows.work_units import Unit, attended_pieces, one_ahead, plan_units, unit_seed

STREAM = "collect"


class UnitRows(NamedTuple):
    """The rows of one unit."""

    logits: np.ndarray  # (sets, size) float32
    target: np.ndarray  # (sets,) int32, or (sets, size) bool
    layer: np.ndarray | None = None  # (sets,) int16, if the source names heads
    head: np.ndarray | None = None
    weight: np.ndarray | None = None  # (sets,) float32, if weights differ
    group: np.ndarray | None = None  # (sets,) int64, if the source names groups


class Source(NamedTuple):
    """Where rows come from, unit by unit, and what determines them."""

    shown: str  # what it is called in messages
    configuration: dict[str, Any]
    units: list[Unit]
    rows: Callable[[Unit], Callable[[], UnitRows]]  # a reader, which another process can run too
    row_bytes: dict[int, int]  # of each size
    n_heads: int = 1


def source_of_head(head: Head, sizes: Sequence[int], sets: int, seed: int) -> Source:
    """The source of the sets that are drawn for a head."""
    n = sorted(set(sizes))
    configuration = {
        "head": head.name,
        "fingerprint": head.fingerprint,
        "sizes": n,
        "sets": sets,
        "seed": seed,
    }
    if hasattr(head, "trained_up_to"):
        configuration["trained_up_to"] = int(head.trained_up_to)
    units = [unit for size in n for unit in plan_units(size, sets)]
    masks = _has_sets_of_targets(head, seed, units[0])
    load_head = head_loader(head)

    def rows(unit: Unit) -> Callable[[], UnitRows]:
        return partial(_rows_of_head, load_head, seed, unit)

    shown = f"head {head.name}"
    return Source(shown, configuration, units, rows, {size: row_bytes(size, masks) for size in n})


def source_of_arrays(arrays: Arrays) -> Source:
    """The source of rows on disk."""
    units = [unit for size in arrays.sizes for unit in plan_units(size, arrays.count(size))]
    configuration: dict[str, Any] = {
        "head": arrays.name,
        "fingerprint": arrays.fingerprint,
        "sizes": arrays.sizes,
        "sets": sum(map(arrays.count, arrays.sizes)),
        "seed": 0,
        **arrays.split,
    }
    if arrays.names_heads:
        configuration["heads"] = [list(head) for head in arrays.heads]
    bytes_of = {
        size: row_bytes(size, arrays.sets_of_targets, arrays.columns) for size in arrays.sizes
    }

    def rows(unit: Unit) -> Callable[[], UnitRows]:
        part = arrays.part(unit.size, unit.first, unit.sets)
        return partial(_rows_of_files, part, arrays.columns)

    return Source(arrays.shown, configuration, units, rows, bytes_of, len(arrays.heads))


def _has_sets_of_targets(head: Head, seed: int, unit: Unit) -> bool:
    """Whether the targets of this head are masks, as its first unit shows."""
    batch = call(head, "sample", unit_seed(STREAM, seed, unit), unit.size, unit.sets)
    return np.asarray(getattr(batch, "target", None)).ndim > 1


def _rows_of_head(load_head: Callable[[], Head], seed: int, unit: Unit) -> UnitRows:
    """The logits that a head computes for a unit of sets."""
    head = load_head()
    logits = np.empty((unit.sets, unit.size), np.float32)
    targets = []
    for part, batch, attended in one_ahead(attended_pieces(head, STREAM, seed, unit)):
        logits[part] = np.asarray(attended.logits, np.float32)
        targets.append(np.asarray(batch.target))
    if unit.number == 0:
        warn_of_masks(f"head {head.name!r}: attend gave", finite_masks(logits))
    logits = as_masks(logits)
    refuse_probabilities(logits, f"head {head.name!r}: attend gave")
    target = np.concatenate(targets)
    return UnitRows(logits, target.astype(np.int32) if target.ndim == 1 else target)


def _rows_of_files(part: Part, columns: Collection[str]) -> UnitRows:
    """A unit of rows on disk, with those optional columns."""
    rows = part.read()
    return UnitRows(rows.logits, rows.target, **{name: getattr(rows, name) for name in columns})
