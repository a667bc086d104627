"""The shard of a unit of work: its two sources of rows, and `make_shard`.

`make_shard` draws or reads rows, examines them and packs those that are kept; `resume.py` writes
the bytes.

The shard of a unit does not depend on other units or on the process that makes it. A `HeadSource`
draws the inputs of a unit from a seed of its own and runs a head on them; an `ArraySource` reads
rows of arrays or of files.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.rows.collection import entry_of_rows
from calibrate.rows.heads import Head, HeadReference, receive_head
from calibrate.rows.logits_checks import check_no_probabilities
from calibrate.rows.logits_files import RowsOfFiles
from calibrate.rows.manifest import ShardEntry
from calibrate.rows.rows import Examined, Rows, examine_rows, parse_rows
from calibrate.rows.sampling import lowest_hashes
from calibrate.rows.units import Unit, attended_pieces

COLLECT_STREAM = "collect"  # of inputs; `evaluate` draws from another one


@dataclass(frozen=True, eq=False)
class HeadSource:
    """Inputs that are drawn for a head; processes can be sent it."""

    head: Head | HeadReference
    seed: int
    items_per_piece: int
    misranked_only: bool
    quota: int  # rows that the unit keeps at most

    def read(self, unit: Unit) -> Rows:
        """Draws the inputs of a unit and runs the head on them."""
        head = receive_head(self.head)
        logits = np.empty((unit.sets, unit.size), np.float32)
        targets, n_masked = [], 0
        stream, per_piece = COLLECT_STREAM, self.items_per_piece
        for piece in attended_pieces(head, stream, self.seed, unit, per_piece):
            logits[piece.part] = piece.logits
            targets.append(piece.target)
            n_masked += piece.n_masked
        if unit.number == 0:
            warn_of_masks(f"head {head.name!r}: attend gave", n_masked)
        check_no_probabilities(logits, f"head {head.name!r}: attend gave")
        target = np.concatenate(targets)
        return Rows(logits, target.astype(np.int32) if target.ndim == 1 else target)

    def choose(self, unit: Unit, examined: Examined) -> np.ndarray:
        """Positions of the rows that are kept: those with the lowest hashes of their index."""
        candidates = examined.misranked if self.misranked_only else examined.good
        return lowest_hashes(np.flatnonzero(candidates), unit.first, self.quota)


@dataclass(frozen=True, eq=False)
class ArraySource:
    """The rows of one unit in arrays or files; processes can be sent it."""

    files: RowsOfFiles
    sampled: np.ndarray  # (rows,) bool, the rows of a sample of all

    def read(self, unit: Unit) -> Rows:
        """Reads the rows of the unit."""
        return self.files.read()

    def choose(self, unit: Unit, examined: Examined) -> np.ndarray:
        """Positions of the rows that are kept: the good ones of the sample."""
        return np.flatnonzero(self.sampled & examined.good)


def make_rows(source: HeadSource | ArraySource, unit: Unit) -> Rows:
    """The rows that a collection keeps of a unit."""
    rows = source.read(unit)
    examined = examine_rows(rows)
    kept = source.choose(unit, examined)
    return replace(
        rows.take(kept),
        entropy=examined.entropy[kept],
        index=kept + unit.first,
        counts=examined.counts,
    )


def make_shard(source: HeadSource | ArraySource, unit: Unit) -> tuple[bytes, ShardEntry]:
    """The bytes of a unit's shard, and its entry in the manifest."""
    rows = make_rows(source, unit)
    data = rows.pack()
    return data, entry_of_rows(unit.size, unit.number, rows, data)


def read_shard_entry(unit: Unit, data: bytes, path: Path) -> ShardEntry:
    """The entry of a unit's shard that no manifest lists yet."""
    return entry_of_rows(unit.size, unit.number, parse_rows(data, path), data)
