"""Collect: run a head and keep a sample of its rows, or those whose target is misranked."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calibrate.errors import CalibrateError
from calibrate.files import collection as files
from calibrate.heads import Head
from calibrate.heads.protocol import call, refuse_probabilities
from calibrate.maths.shannon import entropy
from calibrate.pipeline.units import Unit, attended_pieces, one_ahead, plan_units, unit_seed

STREAM = "collect"
KEEP = ("misranked", "all")
# Of each size, where rows of every kind are kept: a fit has a handful of numbers.
MOST_KEPT_OF_ALL = 2048


class Progress(NamedTuple):
    """What one finished unit adds."""

    receipt: files.Receipt
    finished: int  # units
    units: int
    resumed: bool  # it was on disk already


def collect(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    folder: Path,
    max_bytes: int = 10**9,
    report: Callable[[Progress], None] = lambda progress: None,
    keep: str = "all",
) -> files.Collection:
    """Runs `head` over sets of every size and keeps a sample of the rows, or the misranked ones.

    An interrupted collection is carried on by the same call; a finished one is returned as it is.
    The same configuration gives the same bytes on one machine.

    Args:
      head: what is calibrated.
      sizes: set sizes n.
      sets: how many sets of each size.
      seed: of the data.
      folder: where the collection is, or shall be.
      max_bytes: of the whole folder. Each unit of work has its share of it and keeps the rows
        whose index has the lowest hash: a fair sample, whatever the order of the units.
      report: called after each unit.
      keep: "all", of each size 2,048 good rows at most, whatever their rank; or "misranked".
    Raises:
      CalibrateError: another configuration is in `folder`, or it cannot be written.
      QualityError: more than 1 % of the rows are bad (NaN, +inf, or a masked target).
    """
    folder = Path(folder)
    configuration: dict[str, Any] = {
        "head": head.name,
        "fingerprint": head.fingerprint,
        "sizes": sorted(set(sizes)),
        "sets": sets,
        "seed": seed,
        "max_bytes": max_bytes,
    }
    if keep != "misranked":  # what was collected before there was a choice says nothing of it
        configuration["keep"] = keep
    units = [unit for size in configuration["sizes"] for unit in plan_units(size, sets)]
    wanted = wanted_rows(units, sets, keep)
    quota = row_quotas(wanted, max_bytes, _has_sets_of_targets(head, seed, units[0]))
    complete = _start(folder, configuration)
    if complete:
        # Only shards that were lost since: what the manifest says of the others stands.
        units = [u for u in units if not files.shard_path(folder, u.size, u.number).exists()]
    receipts = []
    for unit in units:
        most = min(quota[unit.size], wanted[unit])
        receipt, resumed = _collect_unit(head, seed, folder, unit, most, keep == "all")
        receipts.append(receipt)
        report(Progress(receipt, len(receipts), len(units), resumed))
    if not complete:
        files.write_manifest(folder, configuration, receipts)
    collection = files.open_collection(folder)
    files.refuse_bad_rows(collection.manifest)
    return collection


def _start(folder: Path, configuration: dict[str, Any]) -> bool:
    """Claims the folder for this configuration; True if the collection is complete already."""
    manifest = files.read_manifest(folder)
    if manifest is None:
        if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise CalibrateError(
                f"{folder} holds other files and no collection; choose a new folder"
            )
        files.write_manifest(folder, configuration, None)
        return False
    there = manifest["configuration"]
    differences = [
        f"{key} is {there.get(key, absent)!r} there and {configuration.get(key, absent)!r} here"
        for key, absent in {**dict.fromkeys(configuration), "keep": "misranked"}.items()
        if there.get(key, absent) != configuration.get(key, absent)
    ]
    if differences:
        raise CalibrateError(
            f"{folder} holds another collection: {'; '.join(differences)}; "
            "give the same options, or another folder (`run`: another --name)"
        )
    return manifest["status"] == "complete"


def wanted_rows(units: Sequence[Unit], sets: int, keep: str) -> dict[Unit, int]:
    """How many rows each unit would keep if there were room: its share of what its size may."""
    most = sets if keep == "misranked" else min(sets, MOST_KEPT_OF_ALL)
    return {u: most * (u.first + u.sets) // sets - most * u.first // sets for u in units}


def row_quotas(
    wanted_rows: Mapping[Unit, int], max_bytes: int, sets_of_targets: bool = False
) -> dict[int, int]:
    """How many rows a unit of each size may keep, so that all files together fit in max_bytes.

    Every unit gets the same bytes, save that what one cannot use goes to the others.
    """
    row_bytes = {unit.size: files.row_bytes(unit.size, sets_of_targets) for unit in wanted_rows}
    overhead = files.MANIFEST_BASE + files.MANIFEST_PER_SIZE * len(row_bytes)
    overhead += (files.MANIFEST_PER_SHARD + files.SHARD_OVERHEAD) * len(wanted_rows)
    left = max_bytes - overhead
    wanted = sorted(rows * row_bytes[unit.size] for unit, rows in wanted_rows.items())
    level = 0
    for i, most in enumerate(wanted):
        level = left // (len(wanted) - i)
        if most > level:
            break
        left -= most
        level = most
    largest = max(row_bytes.values())
    if level < largest:
        needed = overhead + len(wanted) * largest
        raise CalibrateError(
            f"max_bytes is {max_bytes}, too few for one row of each unit; give at least {needed}"
        )
    return {size: level // bytes_each for size, bytes_each in row_bytes.items()}


def _has_sets_of_targets(head: Head, seed: int, unit: Unit) -> bool:
    """Whether the targets of this head are masks, as its first unit shows."""
    batch = call(head, "sample", unit_seed(STREAM, seed, unit), unit.size, unit.sets)
    return np.asarray(getattr(batch, "target", None)).ndim > 1


def _collect_unit(
    head: Head, seed: int, folder: Path, unit: Unit, most: int, keep_all: bool
) -> tuple[files.Receipt, bool]:
    """The receipt of one unit's shard, and whether it was there already."""
    if files.shard_path(folder, unit.size, unit.number).exists():
        return files.inspect_shard(folder, unit.size, unit.number), True
    logits = np.empty((unit.sets, unit.size), np.float32)
    targets = []
    for part, batch, attended in one_ahead(attended_pieces(head, STREAM, seed, unit)):
        logits[part] = attended.logits
        targets.append(np.asarray(batch.target))
    refuse_probabilities(logits, f"head {head.name!r}: attend gave")
    target = np.concatenate(targets)
    if target.ndim == 1:
        target = target.astype(np.int32)
    good, misranked, H, counts = map(np.asarray, _examine(logits, target))
    rows = np.flatnonzero(good if keep_all else misranked)
    rows = rows[_lowest_hashes(rows + unit.first, most)]
    shard = files.Shard(
        logits=logits[rows],
        target=target[rows],
        entropy=H[rows],
        index=rows + unit.first,
        counts=counts.astype(np.int64),
    )
    return files.write_shard(folder, unit.size, unit.number, shard), False


@jax.jit
def _examine(
    logits: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(count, n) logits -> which rows are good, which misranked, entropy, the counts of COUNTS."""
    if target.ndim == 1:
        at_target = jnp.take_along_axis(logits, target[:, None], axis=1)
        n_targets = jnp.ones(len(logits), jnp.int32)
    else:
        at_target = jnp.max(logits, axis=1, keepdims=True, where=target, initial=-jnp.inf)
        n_targets = jnp.sum(target & (logits == at_target), axis=1)
    highest = jnp.max(logits, axis=1, keepdims=True)
    nan = jnp.any(jnp.isnan(logits), axis=1)  # the maximum may pass over a NaN on the CPU
    inf = (highest == jnp.inf)[:, 0] & ~nan
    masked_target = (at_target == -jnp.inf)[:, 0] & ~nan & ~inf
    good = ~(nan | inf | masked_target)
    misranked = good & (highest > at_target)[:, 0]
    ties = good & ~misranked & (jnp.sum(logits == at_target, axis=1) > n_targets)
    counts = [jnp.ones_like(good), misranked, ties, nan, inf, masked_target]
    totals = jnp.stack([jnp.sum(c, dtype=jnp.int32) for c in counts])
    return good, misranked, entropy(logits), totals


def _lowest_hashes(index: np.ndarray, quota: int) -> np.ndarray:
    """Positions, in order, of the `quota` rows whose index has the lowest hash."""
    if len(index) <= quota:
        return np.arange(len(index))
    # SplitMix64's finaliser: every bit of the index moves every bit of the hash.
    x = index.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return np.sort(np.argsort(x, kind="stable")[:quota])
