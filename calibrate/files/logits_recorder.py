"""Recorder of the logits of a running model's heads, as arrays for `calibrate collect`.

One npz file for each recorded forward pass, written atomically. Of more passes than fit, those
whose number has the lowest hash stay: an unbiased sample in any order.
"""

import heapq
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.files.npz import write_arrays
from calibrate.maths.hashing import hashes

FILE_OVERHEAD = 2_048  # bytes of an npz file beside its rows; a test holds real files against it

Positions = int | Sequence[int | Sequence[int]]


class _Pass(NamedTuple):
    """The positions for the next forward pass."""

    query: Sequence[int] | int
    target: Positions


class Recorder:
    """Keeps a sample of the logits of many forward passes on disk."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
    ):
        """Starts a recording in a new or empty folder.

        Raises:
          CalibrateError: the folder holds files, or cannot be made.
        """
        self.folder, self._max_bytes = Path(folder), max_bytes
        self._layers, self._heads = layers, heads
        self._pass: _Pass | None = None
        self._rows: dict[int, dict[str, np.ndarray]] = {}  # by layer
        self._count = 0
        self._kept: list[tuple[int, int]] = []  # (-hash, bytes) of the files there are, a heap
        self._bytes = 0  # of them all
        self._limit = 1 << 64  # the lowest hash that did not fit
        self._paths: dict[int, Path] = {}
        self.left_out = 0  # rows whose target their query does not see
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise CalibrateError(f"cannot make {folder}: {failure.strerror}") from failure
        if any(self.folder.iterdir()):
            raise CalibrateError(f"{folder} holds files already; give a new folder")

    def next(self, query: Sequence[int] | int, target: Positions) -> None:
        """Sets the positions that the next forward pass is recorded at.

        Args:
          query: the position of the query, one for all sequences or one each; -1 is the last.
          target: the position of the key that should win, one for all sequences, or one each; or
            for each a list of positions, any of which may win.
        """
        self.flush()
        self._pass = _Pass(query, target)

    def wants(self, layer: int) -> bool:
        """Whether this layer's logits are to be recorded now: once after each `next`."""
        chosen = self._layers is None or layer in self._layers
        return self._pass is not None and chosen and layer not in self._rows

    def queries(self, n_sequences: int, length: int) -> np.ndarray:
        """(sequences,) the positions of the queries, of that many."""
        assert self._pass is not None
        query = self._pass.query
        if isinstance(query, int | np.integer):
            query = [query] * n_sequences
        if len(query) != n_sequences:
            raise CalibrateError(
                f"query names {len(query)} positions, and the forward pass has {n_sequences} "
                "sequences; give one for each, or one for all"
            )
        return np.array([_position(q, length, "query") for q in query])

    def add(self, layer: int, logits: np.ndarray, n_keys: int) -> None:
        """Takes the logits of one layer.

        Args:
          layer: its number.
          logits: (sequences, heads, items) float32, -inf where masked; keys first, then what has
            no position, such as a sink.
          n_keys: how many of the items are keys.
        """
        assert self._pass is not None
        heads = np.arange(logits.shape[1])
        if self._heads is not None:
            heads = heads[np.isin(heads, list(self._heads))]
        logits = logits[:, heads]
        targets = self._targets(len(logits), n_keys, logits.shape[2])
        targets = np.broadcast_to(targets[:, None], logits.shape) & (logits != -np.inf)
        seen = targets.any(axis=2)
        self.left_out += int((~seen).sum())
        of_head = np.broadcast_to(heads, seen.shape)[seen]
        weight = share_of_attention(logits, targets)[seen]
        self._rows[layer] = {
            "logits": logits[seen].astype(np.float32),
            "target": targets[seen],
            "layer": np.full(len(of_head), layer, np.int16),
            "head": of_head.astype(np.int16),
            "weight": weight.astype(np.float32),
        }

    def _targets(self, n_sequences: int, n_keys: int, n_items: int) -> np.ndarray:
        """(sequences, items) bool."""
        assert self._pass is not None
        target = self._pass.target
        if isinstance(target, int | np.integer):
            target = [int(target)] * n_sequences
        each: Sequence[int | Sequence[int]] = target
        if len(each) != n_sequences:
            raise CalibrateError(
                f"target names positions for {len(each)} sequences, and the forward pass has "
                f"{n_sequences}; give them for each, or one for all"
            )
        mask = np.zeros((n_sequences, n_items), bool)
        for row, positions in zip(mask, each, strict=True):
            for position in [positions] if isinstance(positions, int | np.integer) else positions:
                row[_position(position, n_keys, "target")] = True
        return mask

    def finish(self) -> None:
        """Writes the last pass.

        Raises:
          CalibrateError: nothing was recorded.
        """
        self.flush()
        if not self._count:
            raise CalibrateError(
                "nothing was recorded; call recorder.next(query, target) before each forward pass"
            )

    def flush(self) -> None:
        """Writes the last forward pass, if it belongs to the sample."""
        rows, self._rows, self._pass = self._rows, {}, None
        if not any(len(layer["target"]) for layer in rows.values()):
            return
        width = max(layer["logits"].shape[1] for layer in rows.values())
        columns = {
            name: np.concatenate([_widen(layer[name], name, width) for layer in rows.values()])
            for name in ("logits", "target", "layer", "head", "weight")
        }
        number, self._count = self._count, self._count + 1
        self._keep(number, columns)

    def _keep(self, number: int, columns: dict[str, np.ndarray]) -> None:
        """Writes a file if it fits into the budget, and removes those that no longer do."""
        rank = int(hashes(np.array([number]))[0])
        if rank > self._limit:  # else short passes would fill what a long one leaves
            return
        size = sum(column.nbytes for column in columns.values()) + FILE_OVERHEAD
        heapq.heappush(self._kept, (-rank, size))
        self._bytes += size
        self._paths[rank] = self.folder / f"pass{number:06d}.npz"
        dropped = set()
        while len(self._kept) > 1 and self._bytes > self._max_bytes:
            last, size = heapq.heappop(self._kept)
            self._bytes -= size
            self._limit = -last
            dropped.add(-last)
        if rank not in dropped:
            write_arrays(self._paths[rank], columns)
        for other in dropped:
            self._paths.pop(other).unlink(missing_ok=True)


def share_of_attention(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Each head's share of its layer's attention to the target, as a multiple of the mean.

    Heads of a layer that look for the same item cover each other's errors: what one of them misses
    need not count much against it. These are the responsibilities of a mixture of the heads, the
    likelihood of which the fit then raises (a step of expectation maximisation).

    Args:
      logits: (sequences, heads, items), -inf where masked.
      targets: the same, bool.
    Returns:
      (sequences, heads), of mean 1 over the heads that see a target; 0 of those that see none.
    """
    with np.errstate(invalid="ignore"):  # rows that are masked throughout, or not finite
        weights = np.exp(logits.astype(float) - logits.max(axis=2, keepdims=True))
        p = np.where(targets, weights, 0).sum(axis=2) / weights.sum(axis=2)
    p = np.where(np.isfinite(p), p, 0)
    seen = targets.any(axis=2)
    total = p.sum(axis=1, keepdims=True)
    share = p * seen.sum(axis=1, keepdims=True) / np.where(total > 0, total, 1)
    return np.where(total > 0, share, seen)


def _widen(column: np.ndarray, name: str, width: int) -> np.ndarray:
    """Rows of a layer that keeps fewer keys, filled up with masked items."""
    if column.ndim == 1 or column.shape[1] == width:
        return column
    fill = -np.inf if name == "logits" else False
    return np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=fill)


def _position(position: int, length: int, word: str) -> int:
    if not -length <= position < length:
        raise CalibrateError(
            f"{word} is position {position}, and there are {length}; give one within "
            f"[{-length}, {length})"
        )
    return int(position) % length
