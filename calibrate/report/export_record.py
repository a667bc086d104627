"""Exports of a fit, and the attention scale that a server applies, as results to show."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.errors import CalibrateError, QualityError, command
from calibrate.report.blocks import Facts, Result, Table, Text

if TYPE_CHECKING:
    from calibrate.export.engine_check import EngineCheck
    from calibrate.export.onnx import OnnxExport
    from calibrate.export.plan import ExportContents

FACTS = (("fit", "fit"), ("fit id", "id"), ("made from", "model"), ("digest", "digest"))
FACTOR_COLUMNS = ("layer", "least", "median", "most", "heads changed")


def export_result(contents: "ExportContents") -> Result:
    """The fit in an export, the factors that engines apply, and faults; exit 1 if there are any.

    JSON has the factors of all heads by layer.
    """
    plan, faults = contents.plan, contents.problems
    layers = sorted({layer for layer, _ in plan.factors}) if plan else []
    factors = {layer: plan.layer_factors(layer) for layer in layers} if plan else {}
    data = {
        "path": contents.path,
        **contents.metadata,
        "model_type": contents.model_type,
        "ratio": plan and plan.ratio,
        "factors": factors,
        "faults": faults,
    }
    facts = [("path", str(contents.path))]
    facts += [(label, str(contents.metadata.get(key))) for label, key in FACTS]
    tables = []
    if plan:
        by_size = f" (1 + {plan.ratio:.6g} log n)" if plan.ratio else ""
        factors_text = f"the queries of a {contents.model_type} times factors{by_size}"
        facts.append(("engines apply", factors_text))
        rows = [_factor_cells(layer, np.array(f)) for layer, f in factors.items()]
        tables = [Table(FACTOR_COLUMNS, rows, title="Factors of heads")]
    texts = [f"FAILED  {fault}" for fault in faults]
    failure = None
    if faults:
        message = f"{contents.path} is not what was exported: {'; '.join(faults)}; export again"
        failure = CalibrateError(message)
    else:
        texts.append("Integrity check passed: its weights and its fit are as they were written.")
    return Result([Facts(facts), *tables, *map(Text, texts)], data, failure)


def onnx_result(export: "OnnxExport") -> Result:
    """The softmax nodes that were replaced in an .onnx file."""
    names = ", ".join(export.replaced)
    facts = [
        ("path", str(export.path)),
        ("fit", export.fit),
        ("replaced", f"{len(export.replaced)} softmax nodes: {names}"),
    ]
    return Result([Facts(facts)], export)


def _factor_cells(layer: int, f: np.ndarray) -> tuple[str, ...]:
    ends = (f"{x:.4f}" for x in (f.min(), np.median(f), f.max()))
    return (str(layer), *ends, f"{int((f != 1).sum())} of {len(f)}")


def engine_result(contents: "ExportContents", check: "EngineCheck") -> Result:
    """The rule that an engine applies; exit 3 if it is not the fit, 1 if that is undecided."""
    from calibrate.export.engine_check import (
        APPLIES_BASELINE,
        APPLIES_FIT,
        APPLIES_OTHER,
        CANNOT_TELL,
        LACKS_LOG_N,
    )

    actions = {
        APPLIES_FIT: "applies the fit",
        APPLIES_BASELINE: "applies plain softmax",
        CANNOT_TELL: "may apply it or not",
    }
    finding = actions.get(check.applies, f"applies {APPLIES_OTHER}")
    nearest = min(check.off, key=check.off.__getitem__)
    if (check.applies, nearest) == (APPLIES_OTHER, LACKS_LOG_N):
        finding += ", most like the fit without its part of log n"
    share = round(check.share, 2) + 0.0  # no -0
    text = (
        f"{check.engine} {finding}: it goes {share:.2f} of the way from plain softmax to "
        f"{contents.metadata['fit']}, which differ by {check.effect:.2g} nats; its noise is "
        f"{check.noise:.2g}"
    )
    remedy = f"serve {contents.path} as guides/serving.md says"
    data = {"path": contents.path, **contents.metadata, **check._asdict()}
    return _check_result(check, text, remedy, data, is_right=check.applies == APPLIES_FIT)


def stock_result(model: Path, check: "EngineCheck") -> Result:
    """The scale that an engine applies; exit 3 if it differs from the model's, 1 if undecided."""
    from calibrate.export.engine_check import APPLIES_OTHER, AS_STATED, CANNOT_TELL

    off, open_cases = check.off[AS_STATED], ", ".join(check.untold)
    remedy = "use a version of the engine that applies what config.json states"
    if check.applies in (AS_STATED, CANNOT_TELL):
        agrees = "agrees" if check.applies == AS_STATED else "may agree"
        text = (
            f"{check.engine} {agrees} with {model} up to {check.lengths[-1]:,} tokens: its log p "
            f"is off by {off:.2g} nats, its noise is {check.noise:.2g} nats"
        )
        text += f"; these prompts do not tell this from: {open_cases}" if open_cases else ""
    else:
        text = f"{check.engine} differs from {model} by {off:.2g} nats"
        best = min(check.off, key=check.off.__getitem__)
        if check.applies == APPLIES_OTHER:
            text += (
                ", and another attention scale does not explain it: the best, "
                f"{best}, leaves {check.off[best]:.2g}"
            )
            check_fit = command("export", check="EXPORTED", engine=check.engine)
            remedy = (
                f"{check_fit} tells whether the server applies an exported fit; else compare "
                "weights, tokenizer and rotary positions"
            )
        else:
            text += f'; "{check.applies}" explains it, and leaves {check.off[check.applies]:.2g}'
    data = {"path": model, **check._asdict()}
    return _check_result(check, text, remedy, data, is_right=check.applies == AS_STATED)


def _check_result(
    check: "EngineCheck", text: str, remedy: str, data: dict[str, Any], is_right: bool
) -> Result:
    """The engine's difference from each prediction, and a finding."""
    from calibrate.export.engine_check import CANNOT_TELL

    rows = [(name, f"{off:.4f}") for name, off in check.off.items()]
    n = f"{check.lengths[0]:,} to {check.lengths[-1]:,} tokens"
    title = f"The engine's log p against each prediction, at prompts of {n}, nats"
    table = Table(("prediction", "off by"), rows, title=title, left=("prediction",))
    if is_right:
        return Result([table, Text(f"{text}.")], data)
    failure: CalibrateError = QualityError(f"{text}; {remedy}")
    if check.applies == CANNOT_TELL:
        message = f"{text}; give more or longer prompts=, or serve weights that are not quantised"
        failure = CalibrateError(message, parameter="prompts")
    return Result([table], data, failure)
