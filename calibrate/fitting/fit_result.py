"""The result of a fit, and what its file says beside the rule: evidence, options and origin."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibrate.datasets.row_collection import RowCollection
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
    selection: Selection | None = None  # why it is of this kind; None: of many heads
    heads: Sequence[HeadFit] = ()  # of a fit per head: every head, in order

    def warn_of_bound(self) -> None:
        """Warns of a beta at its bound, of one head."""
        note = self.selection.bound_note if self.selection else ""
        if note:
            warnings.warn(note, stacklevel=3)


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
