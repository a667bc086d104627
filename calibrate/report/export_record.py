"""A checkpoint with a fit in it, as a result to show: what it carries, and what engines apply."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.report.blocks import Block, Facts, Table, Text

if TYPE_CHECKING:
    from calibrate.export.plan import Carried

_SAID = (("fit", "fit"), ("fit id", "id"), ("made from", "model"), ("digest", "digest"))


@dataclass(frozen=True)
class ExportRecord:
    """The result of `calibrate export`."""

    carried: "Carried"

    def as_json(self) -> dict[str, Any]:
        """What the folder carries; factors by layer, a list of all heads each."""
        carried = self.carried
        return {
            "path": carried.path,
            **carried.said,
            "model_type": carried.model_type,
            "ratio": carried.plan and carried.plan.ratio,
            "factors": dict(self._factors()),
            "faults": carried.faults,
            "notes": carried.notes,
        }

    def blocks(self) -> Iterable[Block]:
        """The fit, what engines apply by layer, and what is not as it was written."""
        carried, plan = self.carried, self.carried.plan
        facts = [(label, str(carried.said.get(key))) for label, key in _SAID]
        if plan:
            by_size = f" (1 + {plan.ratio:.6g} log n)" if plan.ratio else ""
            facts += [("engines", f"a {carried.model_type}, queries times factors{by_size}")]
        yield Facts([("path", str(carried.path)), *facts])
        if plan:
            rows = [_cells(layer, np.array(f)) for layer, f in self._factors()]
            columns = ("layer", "least", "median", "most", "heads changed")
            yield Table(columns, rows, title="Factors of heads")
        yield from (Text(note) for note in carried.notes)
        yield from (Text(f"FAILED  {fault}") for fault in carried.faults)
        if not carried.faults:
            seen = "Its weights and its configuration are as they were written"
            if carried.unseen:
                seen = (
                    f"Its weights and its scale of log n are as they were written; {carried.unseen}"
                )
            yield Text(f"{seen}.")

    def failure(self) -> str | None:
        """What is not as it was written, in one line; None if all is."""
        if not self.carried.faults:
            return None
        return (
            f"{self.carried.path} is not what was exported: {'; '.join(self.carried.faults)}; "
            "export again"
        )

    def _factors(self) -> list[tuple[int, list[float]]]:
        plan = self.carried.plan
        layers = sorted({layer for layer, _ in plan.factors}) if plan else []
        return [(layer, plan.of_layer(layer)) for layer in layers] if plan else []


def _cells(layer: int, f: np.ndarray) -> tuple[str, ...]:
    ends = (f"{x:.4f}" for x in (f.min(), np.median(f), f.max()))
    return (str(layer), *ends, f"{int((f != 1).sum())} of {len(f)}")
