"""A checkpoint with a fit in it, as a result to show: what it carries, and what engines apply."""

from typing import TYPE_CHECKING

import numpy as np

from calibrate.report.blocks import Facts, Result, Table, Text

if TYPE_CHECKING:
    from calibrate.export.plan import Carried

_SAID = (("fit", "fit"), ("fit id", "id"), ("made from", "model"), ("digest", "digest"))
_COLUMNS = ("layer", "least", "median", "most", "heads changed")


def export_result(carried: "Carried") -> Result:
    """The fit, what engines apply by layer, and what is not as it was written.

    JSON has the factors of all heads by layer.
    """
    plan, faults = carried.plan, carried.faults
    layers = sorted({layer for layer, _ in plan.factors}) if plan else []
    factors = {layer: plan.of_layer(layer) for layer in layers} if plan else {}
    found = {
        "path": carried.path, **carried.said, "model_type": carried.model_type,
        "ratio": plan and plan.ratio, "factors": factors, "faults": faults, "notes": carried.notes,
    }  # fmt: skip
    facts = [("path", str(carried.path))]
    facts += [(label, str(carried.said.get(key))) for label, key in _SAID]
    tables = []
    if plan:
        by_size = f" (1 + {plan.ratio:.6g} log n)" if plan.ratio else ""
        facts.append(("engines", f"a {carried.model_type}, queries times factors{by_size}"))
        rows = [_cells(layer, np.array(f)) for layer, f in factors.items()]
        tables = [Table(_COLUMNS, rows, title="Factors of heads")]
    texts = [*carried.notes, *(f"FAILED  {fault}" for fault in faults)]
    failure = None
    if faults:
        failure = f"{carried.path} is not what was exported: {'; '.join(faults)}; export again"
    else:
        texts.append("Its weights and its fit are as they were written.")
    return Result([Facts(facts), *tables, *map(Text, texts)], found, failure)


def _cells(layer: int, f: np.ndarray) -> tuple[str, ...]:
    ends = (f"{x:.4f}" for x in (f.min(), np.median(f), f.max()))
    return (str(layer), *ends, f"{int((f != 1).sum())} of {len(f)}")
