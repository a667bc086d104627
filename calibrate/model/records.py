"""Records of a fit through a model, for its coefficient file: the options and the evidence."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import OWN, Evidence
from calibrate.evidence.metrics import KL, LOG_P
from calibrate.evidence.text_harm import text_harm
from calibrate.evidence.verdict import judged_items
from calibrate.model.options import ModelOptions


def source_record(options: ModelOptions, weight: float) -> dict[str, Any]:
    """The options of a fit; those that are not set, or have no effect, are left out.

    A given interpolation weight is applied whatever it costs, so neither limit has an effect; nor
    has the tolerance without trained lengths.

    Args:
      weight: the interpolation weight of the fit.
    """
    limited = options.interpolation is None
    recorded = {
        "through": "model",
        "kind": options.kind,
        "trained_up_to": options.trained_up_to,
        "max_kl": options.max_kl if limited else None,
        "tolerance": options.tolerance if limited and options.trained_up_to else None,
        "steps": options.max_steps,
        "interpolation": weight,
        "for_export": True if options.engines else None,
        "sharing": options.sharing.name.lower(),
        "heads_per_layer": options.heads_per_layer,
        "seed": options.seed,
    }
    return {"options": {key: option for key, option in recorded.items() if option is not None}}


def evidence_record(
    evidence: Evidence,
    by_weight: Mapping[float, Evidence],
    kind: str,
    over_constant: Estimate | None,
) -> dict[str, Any]:
    """The evidence of a fit on the test split; `report.sentences.with_verdict` adds the verdict.

    Args:
      evidence: the fit, OWN, and other rules.
      by_weight: the fit at each interpolation weight, as OWN.
      kind: of the rules.
      over_constant: gain over one constant for all heads; None if the fit is that constant.
    """
    record: dict[str, Any] = {
        "held_out": judged_items(evidence).held_out_records(),
        "interpolation": [_record_at(weight, at_weight) for weight, at_weight in by_weight.items()],
    }
    if over_constant is not None:
        gain = _known(gain=over_constant.mean, se=over_constant.error)
        record["kinds"] = [{"kind": kind} | gain]
    return record


def _record_at(weight: float, evidence: Evidence) -> dict[str, Any]:
    """At an interpolation weight: held-out gain, gain on calibration templates, and KL of text."""
    answers, text = evidence.answers, evidence.text.held_out_templates
    calibration, judged = answers.calibration_templates, judged_items(evidence)
    estimates: dict[str, Estimate] = {"gain": judged.gain(OWN, LOG_P)}
    if 0 < calibration.n < answers.n:
        estimates["calibration_gain"] = calibration.gain(OWN, LOG_P)
    if text.n:
        estimates["kl"] = text.mean(OWN, KL)
    numbers = {name: x.mean for name, x in estimates.items()}
    numbers |= {f"{name}_se": x.error for name, x in estimates.items()}
    if harm := text_harm(text, OWN):
        numbers |= {"kl_999": harm.kl_999, "same_top": harm.same_top.mean}
    return {"weight": weight, "inputs": judged.n} | _known(**numbers)


def _known(**numbers: float) -> dict[str, float]:
    """The finite numbers: the standard error of a single group is NaN, and left out."""
    return {name: float(number) for name, number in numbers.items() if np.isfinite(number)}
