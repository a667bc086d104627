"""Rows of a deployed head, in a file and by split: calibration, test, kept aside, other."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.storage.npz import read_arrays, write_arrays

CALIBRATION, TEST, RESERVE, OTHER = range(4)  # values of `split`; OTHER is only scored
RESERVE_SHARE = 0.2  # of the clusters
SPLIT_SEED = 0
SEED = 20260101  # of all other draws, with the numbers of what is drawn
MAX_CELLS = 1 << 24  # logits in memory at once, padded
BY_ROW = ("lengths", "n", "group", "cluster", "split")


class Row(NamedTuple):
    """One observation of a head: its logits, and which items are right."""

    logits: np.ndarray  # (length,) before the softmax
    right: np.ndarray  # (length,) bool
    n: int  # nominal size
    group: int  # unit of the bootstrap
    cluster: int  # unit of the split


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of a head.

    Attributes:
      logits, right: flat, row after row; True at the right items.
      lengths, n, group, cluster, split: (rows,), see `Row`.
      about: facts for the record: names of clusters, versions, counts of rows left out.
    """

    logits: np.ndarray
    right: np.ndarray
    lengths: np.ndarray
    n: np.ndarray
    group: np.ndarray
    cluster: np.ndarray
    split: np.ndarray
    about: Mapping[str, Any]

    @classmethod
    def of(cls, rows: Sequence[Row], split: np.ndarray, about: Mapping[str, Any]) -> "HeadRows":
        """Rows with the split of their cluster."""
        logits, right, n, group, cluster = zip(*rows, strict=True)
        return cls(
            np.concatenate(logits).astype(np.float32), np.concatenate(right),
            np.array([len(row) for row in logits]), np.array(n), np.array(group),
            np.array(cluster), split[list(cluster)], about,
        )  # fmt: skip

    @classmethod
    def read(cls, folder: Path) -> "HeadRows":
        arrays = read_arrays(folder / "rows.npz")
        return cls(**arrays | {"about": json.loads(str(arrays["about"]))})

    def write(self, folder: Path) -> None:
        """Writes rows.npz, whole or not at all."""
        about = np.array(json.dumps(self.about, sort_keys=True))
        write_arrays(folder / "rows.npz", {**vars(self), "about": about})

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, chosen: np.ndarray) -> "HeadRows":
        """The rows where `chosen`, (rows,) bool, is True."""
        items = np.repeat(chosen, self.lengths)
        columns = {name: getattr(self, name)[chosen] for name in BY_ROW}
        return HeadRows(self.logits[items], self.right[items], **columns, about=self.about)

    def of_split(self, split: int) -> "HeadRows":
        """The rows of a split."""
        return self.take(self.split == split)

    def parts(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows of similar length: their numbers, logits padded with -inf, and right items."""
        starts = np.cumsum(self.lengths) - self.lengths
        order = np.argsort(self.lengths, kind="stable")
        bins = np.ceil(np.log2(np.maximum(self.lengths[order], 1))).astype(int)
        parts = []
        for value in np.unique(bins):
            rows = order[bins == value]
            n_rows = max(1, MAX_CELLS >> int(value))
            for first in range(0, len(rows), n_rows):
                parts.append(self._padded(rows[first : first + n_rows], starts))
        return parts

    def _padded(
        self, rows: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        width = np.arange(self.lengths[rows].max())
        is_item = width < self.lengths[rows][:, None]
        place = np.where(is_item, starts[rows][:, None] + width, 0)
        logits = np.where(is_item, self.logits[place], -np.inf).astype(np.float32)
        return rows, logits, self.right[place] & is_item

    def arrays(self) -> list[dict[str, np.ndarray]]:
        """The rows as `calibrate.fit` takes them, by similar length."""
        return [
            {"logits": z, "target": right, "mask": z > -np.inf, "group": self.group[rows]}
            for rows, z, right in self.parts()
        ]


def split_clusters(n_clusters: int) -> np.ndarray:
    """(n_clusters,) int8: a fifth RESERVE, the others half CALIBRATION and half TEST, at random."""
    n_reserve = round(RESERVE_SHARE * n_clusters)
    n_test = (n_clusters - n_reserve) // 2
    split = np.full(n_clusters, CALIBRATION, np.int8)
    order = np.random.default_rng(SPLIT_SEED).permutation(n_clusters)
    split[order[:n_reserve]] = RESERVE
    split[order[n_reserve : n_reserve + n_test]] = TEST
    return split


def log_weights(weights: np.ndarray) -> np.ndarray:
    """Logits, up to a constant of each row, of attention weights.

    No weight is a mask: one that underflowed to 0 is set to the least normal float32.
    """
    return np.log(np.maximum(weights, np.finfo(np.float32).tiny))
