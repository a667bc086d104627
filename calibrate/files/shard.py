"""A shard: the kept rows of one unit of work, all of one set size, in an npz file.

It holds `logits` (rows, n) float32, `target` (rows,) int32, or (rows, n) bool where several items
may win, `entropy` (rows,) float32, `index` (rows,) int64 (which set), and `counts`, int64, of
all rows of the unit, in the order of COUNTS. If the source names heads, also `layer` and `head`
(rows,) int16, -1 if unknown; if it has weights, `weight` (rows,) float32; and if it names groups,
`group` (rows,) int64.
"""

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import DamagedError
from calibrate.files.manifest import COUNTS, MANIFEST
from calibrate.files.npz import digest_of, pack_arrays, parse_arrays, read_bytes

# Upper bound of a file's bytes besides its rows; a test compares real files with it.
SHARD_OVERHEAD = 2_048
ENTROPY_ERROR = 1e-3  # nats, far more than the rounding of float32
REPAIR = "the same `calibrate collect` command as before repairs it"

BYTES_OF_COLUMN = {"layer": 2, "head": 2, "weight": 4, "group": 8}  # optional, of a row

Column = tuple[str, tuple[int, ...]]  # dtype and shape
Heads = list[tuple[int, int]]  # (layer, head) of each, -1 where unknown


@dataclass(frozen=True)
class Shard:
    """The kept rows of one unit."""

    logits: np.ndarray  # (rows, n)
    target: np.ndarray  # (rows,) int32, or (rows, n) bool
    entropy: np.ndarray  # nats
    index: np.ndarray
    counts: np.ndarray  # (len(COUNTS),)
    layer: np.ndarray | None = None  # (rows,) int16, -1 if unknown; None without heads
    head: np.ndarray | None = None
    weight: np.ndarray | None = None  # (rows,) float32; None if all are 1
    group: np.ndarray | None = None  # (rows,) int64; None if each row is one of its own

    @property
    def heads(self) -> frozenset[tuple[int, int]]:
        """The heads that its rows are of; none where they are unknown."""
        if self.layer is None or self.head is None:
            return frozenset()
        return frozenset(zip(self.layer.tolist(), self.head.tolist(), strict=True))

    def of_heads(self, heads: Heads) -> "Shard":
        """Its rows of some heads, if the source names heads; the counts stay those of the unit."""
        wanted = np.zeros(len(self.index), bool)
        for layer, head in heads:
            wanted |= (self.layer == layer) & (self.head == head)
        columns = {name: x for name, x in vars(self).items() if name != "counts" and x is not None}
        return replace(self, **{name: column[wanted] for name, column in columns.items()})


def row_bytes(size: int, sets_of_targets: bool = False, columns: Collection[str] = ()) -> int:
    """Bytes of one kept row of `size` items, with those optional columns."""
    of_columns = sum(BYTES_OF_COLUMN[name] for name in columns)
    return 4 * size + (size if sets_of_targets else 4) + 4 + 8 + of_columns


def shard_path(folder: Path, size: int, unit: int) -> Path:
    """The path of a unit's shard."""
    return folder / f"n{size:05d}-unit{unit:05d}.npz"


def pack_shard(shard: Shard) -> bytes:
    """A shard as the bytes of a file."""
    return pack_arrays({name: x for name, x in vars(shard).items() if x is not None})


def parse_unlisted(data: bytes, path: Path, size: int) -> Shard:
    """The shard in bytes without a known digest; see `parse_shard`."""
    shard = parse_shard(data, path, size)
    require(pack_shard(shard) == data, path, "it has more bytes than its arrays")
    return shard


def parse_shard(data: bytes, path: Path, size: int) -> Shard:
    """The shard of that set size in the bytes of a file.

    Raises:
      DamagedError: it is not a shard, or its values are not those of a collection.
    """
    arrays = parse_arrays(data, path)
    n_rows = len(np.atleast_1d(arrays.get("target", ())))
    expected: dict[str, Column] = {
        "logits": ("<f4", (n_rows, size)),
        "target": ("<i4", (n_rows,)),
        "entropy": ("<f4", (n_rows,)),
        "index": ("<i8", (n_rows,)),
        "counts": ("<i8", (len(COUNTS),)),
    }
    if "target" in arrays and arrays["target"].dtype == bool:
        expected["target"] = ("|b1", (n_rows, size))
    if not {"layer", "head"}.isdisjoint(arrays):
        expected |= dict.fromkeys(("layer", "head"), ("<i2", (n_rows,)))
    optional = {"weight": ("<f4", (n_rows,)), "group": ("<i8", (n_rows,))}
    expected |= {name: column for name, column in optional.items() if name in arrays}
    check_arrays(arrays, path, expected)
    shard = Shard(**{name: arrays[name] for name in expected})
    _check_values(shard, path, size)
    return shard


def _check_values(shard: Shard, path: Path, size: int) -> None:
    """Raises DamagedError for values that a collection cannot have."""
    rows, *some = shard.counts.tolist()
    require(min(some) >= 0 and max(sum(some), len(shard.target)) <= rows, path,
            f"counts are {[rows, *some]}, of {len(shard.target)} rows kept")  # fmt: skip
    if not len(shard.target):
        return
    target = shard.target
    if target.dtype == bool:
        require(target.any(axis=1).all(), path, "target marks no item in some row")
        at_target = shard.logits.max(axis=1, where=target, initial=-np.inf)
    else:
        within = 0 <= target.min() <= target.max() < size
        require(within, path, f"target is not within [0, {size})")
        at_target = np.take_along_axis(shard.logits, target[:, None], axis=1)[:, 0]
    highest = shard.logits.max(axis=1)  # NaN if there is one in the row
    require((highest < np.inf).all(), path, "logits hold NaN or inf")
    require((at_target > -np.inf).all(), path, "a target is masked")
    H = shard.entropy
    bounded = -ENTROPY_ERROR <= H.min() <= H.max() <= np.log(size) + ENTROPY_ERROR
    require(bounded, path, f"entropy is not within [0, log {size}]")
    index = shard.index
    require(index[0] >= 0 and (index[:-1] < index[1:]).all(), path, "index does not rise")
    if shard.weight is not None:
        valid = ((shard.weight >= 0) & (shard.weight < np.inf)).all()
        require(valid, path, "a weight is negative or not finite")
    if shard.group is not None:
        require(shard.group.min() >= 0, path, "a group is negative")


def check_arrays(arrays: dict[str, np.ndarray], path: Path, expected: dict[str, Column]) -> None:
    """Raises DamagedError unless exactly these arrays are there."""
    for name, (dtype, shape) in expected.items():
        array = arrays.get(name)
        right = array is not None and (array.dtype, array.shape) == (np.dtype(dtype), shape)
        actual = "absent" if array is None else f"{array.dtype}{array.shape}"
        require(right, path, f"{name} is {actual}, expected {np.dtype(dtype)}{shape}")
    require(arrays.keys() == expected.keys(), path, f"it has arrays {', '.join(sorted(arrays))}")


def require(condition: bool | np.bool_, path: Path, error: str) -> None:
    """Raises DamagedError with a description unless a condition is true."""
    if not condition:
        raise DamagedError(f"{path}: {error}; {REPAIR}")


def listed_bytes(path: Path, entry: dict[str, Any], most: float = math.inf) -> bytes:
    """The bytes of a collection's file, as its entry in the manifest lists them.

    Args:
      most: how many it may have, whatever is listed.
    Raises:
      DamagedError: it is absent, too large, or has another digest.
    """
    if not path.exists():
        raise DamagedError(f"{path} is missing; {REPAIR}")
    data = read_bytes(path, int(min(entry["bytes"], most)), REPAIR)
    if digest_of(data) != entry["sha256"]:
        raise DamagedError(
            f"{path} is not the file that {MANIFEST} lists: it was damaged or replaced; {REPAIR}"
        )
    return data


def is_as_listed(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file is there with the digest in its entry."""
    with contextlib.suppress(DamagedError):
        return bool(listed_bytes(path, entry))
    return False
