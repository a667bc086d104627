"""Rows of a deployed head in one file, and their split into calibration, test and reserve."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.storage.npz import write_arrays

CALIBRATION, TEST, RESERVE, OTHER = range(4)  # values of `split`; OTHER is only scored
RESERVE_SHARE = 0.2  # of the clusters
SPLIT_SEED = 0
SEED = 20260101  # of all other draws, with the numbers of what is drawn
THREADS = 1  # of PyTorch: another number changes the last bits


class Row(NamedTuple):
    """One observation of a head: its logits, and which item is right."""

    logits: np.ndarray  # (length,) float32, before the softmax
    target: int
    n: int  # nominal size
    group: int  # unit of the bootstrap
    cluster: int  # unit of the split


def split_clusters(n_clusters: int, seed: int = SPLIT_SEED) -> np.ndarray:
    """(n_clusters,) int8: a fifth RESERVE, the others half CALIBRATION and half TEST, at random."""
    n_reserve = round(RESERVE_SHARE * n_clusters)
    n_test = (n_clusters - n_reserve) // 2
    split = np.full(n_clusters, CALIBRATION, np.int8)
    order = np.random.default_rng(seed).permutation(n_clusters)
    split[order[:n_reserve]] = RESERVE
    split[order[n_reserve : n_reserve + n_test]] = TEST
    return split


def write_rows(folder: Path, rows: list[Row], split: np.ndarray, names: Mapping[str, Any]) -> None:
    """Writes `rows.npz` atomically: flat logits, a line for each row of the other columns.

    Args:
      folder: of the head; made if it is absent.
      split: (n_clusters,) of the clusters.
      names: facts for the record, as JSON: names of the clusters, versions, counts left out.
    """
    cluster = np.array([row.cluster for row in rows], np.int32)
    columns = {
        "logits": np.concatenate([row.logits for row in rows]).astype(np.float32),
        "lengths": np.array([len(row.logits) for row in rows], np.int32),
        "target": np.array([row.target for row in rows], np.int32),
        "n": np.array([row.n for row in rows], np.int32),
        "group": np.array([row.group for row in rows], np.int32),
        "cluster": cluster,
        "split": split[cluster],
        "names": np.array(json.dumps(names, sort_keys=True)),
    }
    write_arrays(folder / "rows.npz", columns)


def log_weights(weights: np.ndarray) -> np.ndarray:
    """Logits, up to a constant of each row, of attention weights.

    No weight is a mask: one that underflowed to 0 is set to the least normal float32.
    """
    return np.log(np.maximum(weights, np.finfo(np.float32).tiny))


def check_digest(path: Path, sha256: str) -> None:
    """Raises ImportError if a file of a package is not the pinned one."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ImportError(f"{path.name} has the sha256 {found}, expected {sha256}", path=str(path))


@contextlib.contextmanager
def limit_threads() -> Iterator[None]:
    """Limits PyTorch to `THREADS` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)
