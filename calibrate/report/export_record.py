"""An export as a result to show: what it carries, and what engines apply."""

from typing import TYPE_CHECKING

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.report.blocks import Facts, Result, Table, Text

if TYPE_CHECKING:
    from calibrate.export.engine_check import EngineCheck
    from calibrate.export.plan import ExportContents

_SAID = (("fit", "fit"), ("fit id", "id"), ("made from", "model"), ("digest", "digest"))
_COLUMNS = ("layer", "least", "median", "most", "heads changed")


def export_result(carried: "ExportContents") -> Result:
    """The fit, what engines apply by layer, and what is not as it was written.

    JSON has the factors of all heads by layer.
    """
    plan, faults = carried.plan, carried.problems
    layers = sorted({layer for layer, _ in plan.factors}) if plan else []
    factors = {layer: plan.of_layer(layer) for layer in layers} if plan else {}
    found = {
        "path": carried.path,
        **carried.metadata,
        "model_type": carried.model_type,
        "ratio": plan and plan.ratio,
        "factors": factors,
        "faults": faults,
        "notes": carried.notes,
    }
    facts = [("path", str(carried.path))]
    facts += [(label, str(carried.metadata.get(key))) for label, key in _SAID]
    tables = []
    if plan:
        by_size = f" (1 + {plan.ratio:.6g} log n)" if plan.ratio else ""
        facts.append(("engines", f"a {carried.model_type}, queries times factors{by_size}"))
        rows = [_cells(layer, np.array(f)) for layer, f in factors.items()]
        tables = [Table(_COLUMNS, rows, title="Factors of heads")]
    texts = [*carried.notes, *(f"FAILED  {fault}" for fault in faults)]
    failure = None
    if faults:
        said = f"{carried.path} is not what was exported: {'; '.join(faults)}; export again"
        failure = CalibrateError(said)
    else:
        texts.append("Its weights and its fit are as they were written.")
    return Result([Facts(facts), *tables, *map(Text, texts)], found, failure)


def _cells(layer: int, f: np.ndarray) -> tuple[str, ...]:
    ends = (f"{x:.4f}" for x in (f.min(), np.median(f), f.max()))
    return (str(layer), *ends, f"{int((f != 1).sum())} of {len(f)}")


def engine_result(carried: "ExportContents", check: "EngineCheck") -> Result:
    """Reports what an engine applies; a failure unless it is the fit: exit 3, or 1 if undecided."""
    from calibrate.export.engine_check import BASELINE, CONSTANTS, FIT, OTHER, UNKNOWN

    rows = [(f"{n:,}", *(f"{x:.4f}" for x in off.values())) for n, off in check.prompts]
    columns = ("tokens", *(f"off {name}" for name in check.off))
    table = Table(columns, rows, title="Its log p, in nats (root mean square)")
    what = {
        FIT: "applies the fit",
        BASELINE: "applies plain softmax",
        UNKNOWN: "may apply it or not",
    }
    said = what.get(check.applies, f"applies {OTHER}")
    if check.applies == OTHER:
        said += f" from {check.off_from:,} tokens on"
        if min(check.off, key=check.off.__getitem__) == CONSTANTS:
            said += ", most like the fit without its part of log n"
    noise = f"{check.noise:.2g}" if check.noise else "not known"
    share = round(check.share, 2) + 0.0  # no -0
    said = (
        f"{check.engine} {said}: it goes {share:.2f} ± {check.error:.2f} of the way from plain "
        f"softmax to {carried.metadata['fit']}, which differ by {check.effect:.2g} nats; its noise "
        f"is {noise}"
    )
    failure: CalibrateError | None = None
    if check.applies == UNKNOWN:
        failure = CalibrateError(f"{said}; give more or longer prompts=", parameter="prompts")
    elif check.applies != FIT:
        failure = QualityError(f"{said}; serve {carried.path} as fits/serving.md says")
    found = {"path": carried.path, **carried.metadata, **check._asdict()}
    del found["untold"]  # one alternative: `applies` says it
    return Result([table] if failure else [table, Text(f"{said}.")], found, failure)
