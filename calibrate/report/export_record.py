"""Exports of a fit, and the attention scale that a server applies, as results to show."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.errors import CalibrateError, QualityError, command
from calibrate.report.blocks import Block, Facts, Result, Table, Text

if TYPE_CHECKING:
    from calibrate.export.engine_check import EngineCheck
    from calibrate.export.onnx import OnnxExport
    from calibrate.export.plan import ExportContents

FACTS = (("fit", "fit"), ("fit id", "id"), ("made from", "model"), ("digest", "digest"))
FACTOR_COLUMNS = ("layer", "least", "median", "most", "heads changed")
NATS_UNIT = "nats, root mean square"


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
    failure: CalibrateError | None = None
    if check.applies == CANNOT_TELL:
        failure = CalibrateError(f"{text}; give more or longer prompts=", parameter="prompts")
    elif check.applies != APPLIES_FIT:
        failure = QualityError(f"{text}; serve {contents.path} as guides/serving.md says")
    data = {"path": contents.path, **contents.metadata, **check._asdict()}
    table = _off_table(check, "model")
    return Result([table] if failure else [table, Text(f"{text}.")], data, failure)


def stock_result(model: Path, check: "EngineCheck") -> Result:
    """The scale that an engine applies; exit 3 if it differs from the model's, 1 if undecided."""
    from calibrate.export.engine_check import AS_STATED, CANNOT_TELL

    blocks: list[Block] = [_off_table(check, "attention scale")]
    failure: CalibrateError | None = None
    if check.applies == AS_STATED:
        blocks.append(Text(f"{_agrees(model, check)}."))
    elif check.applies == CANNOT_TELL:
        failure = CalibrateError(_cannot_tell(model, check), parameter="prompts")
    else:
        failure = QualityError(_differs(model, check))
    record = {"path": model, **check._asdict()}
    return Result(blocks, record, failure)


def _off_table(check: "EngineCheck", kind: str) -> Table:
    """The engine's difference from each model, or from the model under each attention scale."""
    rows = [(name, f"{off:.4f}") for name, off in check.off.items()]
    n = f"{check.lengths[0]:,} to {check.lengths[-1]:,} tokens"
    title = f"The engine's log p is off, at prompts of {n}, by ({NATS_UNIT})"
    return Table((kind, "off"), rows, title=title, left=(kind,))


def _agrees(model: Path, check: "EngineCheck") -> str:
    ruled_out = [name for name in check.named if name not in check.untold]
    off = check.off[next(iter(check.off))]
    parts = [
        f"{check.engine} agrees with {model} up to {check.lengths[-1]:,} tokens: its log p is off "
        f"by {off:.2g} nats (at one token, where no scale acts, by up to {check.noise:.2g})"
    ]
    if ruled_out:
        parts.append(f"ruled out: {', '.join(ruled_out)}")
    open_cases = [name for name in check.named if name in check.untold]
    if open_cases:
        parts.append(f"not told apart by these prompts: {', '.join(open_cases)}")
    return "; ".join(parts)


def _cannot_tell(model: Path, check: "EngineCheck") -> str:
    names = [name for name in check.named if name in check.untold]
    alternatives = f"from {', '.join(names)}" if names else "from another attention scale"
    return (
        f"cannot tell the attention scale of {check.engine}: up to {check.lengths[-1]:,} tokens "
        f"what the configuration of {model} states is not told {alternatives}, by a noise of "
        f"{check.noise:.2g} nats; give more or longer prompts=, or serve weights that are not "
        "quantised"
    )


def _differs(model: Path, check: "EngineCheck") -> str:
    from calibrate.export.engine_check import APPLIES_OTHER

    names = list(check.off)
    stated = check.off[names[0]]
    text = f"{check.engine} differs from {model} by {stated:.2g} nats"
    if check.applies == APPLIES_OTHER:
        best = min(names, key=check.off.__getitem__)
        check_fit = command("export", check="EXPORTED", engine=check.engine)
        return (
            f"{text}, and another attention scale does not explain it: the best, {best}, leaves "
            f"{check.off[best]:.2g}; {check_fit} tells whether the server applies an exported fit; "
            "else compare weights, tokenizer and rotary positions"
        )
    return (
        f'{text}; what explains it is "{check.applies}", which leaves '
        f"{check.off[check.applies]:.2g}; use a version of the engine that applies what "
        "config.json states"
    )
