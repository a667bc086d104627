"""Recorder: writes the logits of a running model's heads as arrays for `calibrate collect`.

Each recorded forward pass is one npz file, written atomically. If more passes are recorded than fit
into the budget, those whose number has the lowest hash are kept, which is an unbiased sample.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.masking import mask_low_logits
from calibrate.errors import CalibrateError
from calibrate.rows.rows import Rows, hashes, join_rows
from calibrate.storage.atomic_io import check_free, check_writable, write_atomically

FILE_OVERHEAD = 2_048  # upper bound of the bytes of an npz file beside its rows

Positions = int | Sequence[int | Sequence[int]]


class Recorder:
    """Records a sample of the logits of many forward passes in a folder."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
    ):
        """Starts a recording in a new or empty folder.

        Raises:
          CalibrateError: the folder is not empty, or cannot be written.
        """
        self.folder, self._max_bytes = Path(folder), max_bytes
        check_free(self.folder)
        check_writable(self.folder / "pass000000.npz")
        self._layers, self._heads = layers, heads
        # (query, target) of the next forward pass
        self._positions: tuple[int | Sequence[int], Positions] | None = None
        self._group: int | Sequence[int] | None = None  # of its sequences
        self._names_groups: bool | None = None  # True if `next` is given groups
        self._rows: dict[int, Rows] = {}  # by layer
        self._count = 0  # of passes with rows
        self._n_groups = 0  # of sequences, if `next` is given no groups
        self._kept: dict[int, tuple[Path, int]] = {}  # (file, bytes) by hash
        self._bytes = 0  # of all kept files
        self._limit = 1 << 64  # lowest hash that did not fit
        self.left_out = 0  # rows whose query does not see the target

    def next(
        self,
        query: Sequence[int] | int,
        target: Positions,
        group: Sequence[int] | int | None = None,
    ) -> None:
        """Sets the positions at which the next forward pass is recorded.

        Args:
          query: position of the query, one for all sequences or one each; -1 is the last.
          target: position of the key that should win, one for all sequences or one each; or for
            each sequence a list of positions, any of which may win.
          group: number of the prompt, one for all sequences or one each, if several passes have
            the same prompt; None: each sequence is a prompt of its own.
        Raises:
          CalibrateError: a group is given for some passes only.
        """
        self.flush()
        if self._names_groups not in (None, group is not None):
            raise CalibrateError("group is given for some forward passes only; give it for all")
        self._positions, self._group, self._names_groups = (query, target), group, group is not None

    def wants(self, layer: int) -> bool:
        """True if the logits of a layer are to be recorded now, once after each `next`."""
        chosen = self._layers is None or layer in self._layers
        return self._positions is not None and chosen and layer not in self._rows

    def queries(self, n_sequences: int, length: int) -> np.ndarray:
        """(sequences,) positions of the queries."""
        assert self._positions is not None
        query = _for_each(self._positions[0], n_sequences, "query")
        return np.array([_position(q, length, "query") for q in query])

    def add(self, layer: int, logits: np.ndarray, n_keys: int) -> None:
        """Adds the logits of one layer to the forward pass.

        Args:
          logits: (sequences, heads, items) float32, masked as `calibrate.core.masking` defines;
            keys first, then items without a position, such as a sink.
          n_keys: number of the items that are keys.
        """
        heads = np.arange(logits.shape[1])
        if self._heads is not None:
            heads = heads[np.isin(heads, list(self._heads))]
        logits, _ = mask_low_logits(logits[:, heads])
        targets = self._targets(len(logits), n_keys, logits.shape[2])
        targets = np.broadcast_to(targets[:, None], logits.shape) & (logits != -np.inf)
        seen = targets.any(axis=2)
        self.left_out += int((~seen).sum())
        of_head = np.broadcast_to(heads, seen.shape)[seen]
        weight = share_of_attention(logits, targets)[seen]
        self._rows[layer] = Rows(
            logits[seen].astype(np.float32),
            targets[seen],
            layer=np.full(len(of_head), layer, np.int16),
            head=of_head.astype(np.int16),
            weight=weight.astype(np.float32),
            group=np.broadcast_to(self._groups(len(logits))[:, None], seen.shape)[seen],
        )

    def _groups(self, n_sequences: int) -> np.ndarray:
        """(sequences,) group of each sequence of this pass."""
        if self._group is None:
            return self._n_groups + np.arange(n_sequences)
        group = np.array(_for_each(self._group, n_sequences, "group"))
        if group.dtype.kind not in "iu" or group.min() < 0:
            raise CalibrateError(f"group is {self._group}; give integers >= 0")
        return group.astype(np.int64)

    def _targets(self, n_sequences: int, n_keys: int, n_items: int) -> np.ndarray:
        """(sequences, items) bool, True at the targets."""
        assert self._positions is not None
        mask = np.zeros((n_sequences, n_items), bool)
        target = _for_each(self._positions[1], n_sequences, "target")
        for row, positions in zip(mask, target, strict=True):
            for position in np.atleast_1d(positions).tolist():
                row[_position(position, n_keys, "target")] = True
        return mask

    def finish(self) -> None:
        """Writes the last pass.

        Raises:
          CalibrateError: nothing was recorded.
        """
        self.flush()
        if not self._count:
            remedy = "call recorder.next(query, target) before each forward pass"
            if self.left_out:
                remedy = f"in all {self.left_out:,} rows the query cannot see the target"
            raise CalibrateError(f"nothing was recorded; {remedy}")

    def flush(self) -> None:
        """Writes the last forward pass if it belongs to the sample."""
        layers, self._rows, self._positions = [*self._rows.values()], {}, None
        if not any(len(rows.target) for rows in layers):
            return
        width = max(rows.logits.shape[1] for rows in layers)
        rows = join_rows([_widen(rows, width) for rows in layers])
        self._n_groups = max(self._n_groups, int(rows.group.max()) + 1)
        number, self._count = self._count, self._count + 1
        self._keep(number, rows)

    def _keep(self, number: int, rows: Rows) -> None:
        """Writes a file if it fits into the budget, and removes files that no longer fit."""
        rank = int(hashes(np.array([number]))[0])
        if rank > self._limit:  # a short pass must not replace a long one with a lower hash
            return
        size = sum(column.nbytes for column in rows.columns().values()) + FILE_OVERHEAD
        path = self.folder / f"pass{number:06d}.npz"
        self._kept[rank] = path, size
        self._bytes += size
        while len(self._kept) > 1 and self._bytes > self._max_bytes:
            self._limit = max(self._kept)
            dropped, size = self._kept.pop(self._limit)
            self._bytes -= size
            dropped.unlink(missing_ok=True)
        if rank in self._kept:
            write_atomically(path, rows.pack())


def share_of_attention(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Share of each head in its layer's attention to the target, as a multiple of the mean.

    These are the responsibilities of a mixture of the heads, one step of expectation maximisation:
    among heads that look for the same item, the one that finds it has the weight.

    Args:
      logits: (sequences, heads, items), -inf where masked.
      targets: (sequences, heads, items) bool.
    Returns:
      (sequences, heads), with mean 1 over the heads that see a target; 0 for other heads.
    """
    with np.errstate(invalid="ignore"):  # rows without an unmasked item, or not finite
        weights = np.exp(logits.astype(float) - logits.max(axis=2, keepdims=True))
        p = np.where(targets, weights, 0).sum(axis=2) / weights.sum(axis=2)
    p = np.where(np.isfinite(p), p, 0)
    seen = targets.any(axis=2)
    total = p.sum(axis=1, keepdims=True)
    share = p * seen.sum(axis=1, keepdims=True) / np.where(total > 0, total, 1)
    return np.where(total > 0, share, seen)


def _widen(rows: Rows, width: int) -> Rows:
    """Pads rows with masked items: a sliding window has fewer keys than other layers."""
    missing = [(0, 0), (0, width - rows.logits.shape[1])]
    if not missing[1][1]:
        return rows
    logits = np.pad(rows.logits, missing, constant_values=-np.inf)
    return replace(rows, logits=logits, target=np.pad(rows.target, missing))


def _for_each(value: int | Sequence[Any], n_sequences: int, argument: str) -> Sequence[Any]:
    """One value for each sequence of a forward pass."""
    if isinstance(value, int | np.integer):
        return [int(value)] * n_sequences
    if len(value) != n_sequences:
        raise CalibrateError(
            f"{argument} has {len(value)} values for the {n_sequences} sequences of the forward "
            "pass; give one for each sequence, or one for all"
        )
    return value


def _position(position: int, length: int, argument: str) -> int:
    if not -length <= position < length:
        raise CalibrateError(f"{argument} is {position}; give a position in [{-length}, {length})")
    return int(position) % length
