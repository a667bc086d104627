"""The result of a fit, and what its file says beside the rule: evidence, options and origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibrate.datasets.rows import RowCollection
from calibrate.fitting.per_head import HeadFit
from calibrate.fitting.select import Selection
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients
from calibrate.store.publishing import provenance


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fit, and what it was made of."""

    coefficients: Coefficients
    rows: Rows | None = None  # None: of many heads
    selection: Selection | None = None  # why it is of this kind; None: by the paper's procedure
    heads: Sequence[HeadFit] = ()  # of a fit per head: every head, in order


def with_metadata(
    fit: Coefficients,
    name: str,
    collection: RowCollection,
    quality: dict[str, Any],
    options: dict[str, Any],
) -> Coefficients:
    """The rule with its name, its evidence, and where it came from."""
    if collection.partial:
        options = {**options, "partial": True}
        if "verdict" in quality:
            quality = {**quality, "verdict": f"of an unfinished collection: {quality['verdict']}"}
    configuration = collection.manifest["configuration"]
    split = {key: configuration[key] for key in ("held_out",) if key in configuration}
    source = {
        "head": configuration["head"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
        "seed": configuration["seed"],
        "options": options | split,
    }
    return replace(fit, name=name, quality=quality, source=source, provenance=provenance())


def row_counts(collection: RowCollection, statuses: Mapping[str, int]) -> dict[str, int]:
    """The rows of a collection by what they are, of all sizes, and by status of the solver."""
    sizes = collection.manifest["sizes"]
    totals = {key: sum(size[key] for size in sizes) for key in sizes[0] if key != "size"}
    return {**totals, **statuses}
