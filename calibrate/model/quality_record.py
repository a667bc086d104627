"""What a coefficient file keeps of a fit through a model: its options, and its quality."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibrate.core.parameter_sharing import Sharing
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import OWN, Evidence
from calibrate.evidence.metrics import KL, LOG_P
from calibrate.evidence.text_harm import text_harm
from calibrate.evidence.verdict import judged_items
from calibrate.model.options import ModelOptions


def source_record(options: ModelOptions, weight: float) -> dict[str, Any]:
    """The options as a file keeps them, whose keys stay: `allowed_loss` is the margin of KL.

    It is that of the NLL of trained lengths, too, unless there is a `tolerance`. The interpolation
    weight is `strength`.
    """
    margins = options.max_kl, options.tolerance if options.trained_up_to else options.max_kl
    max_kl, tolerance = (None, None) if options.interpolation else margins
    named = {
        "kind": options.kind,
        "trained_up_to": options.trained_up_to,
        "allowed_loss": max_kl,
        "tolerance": None if tolerance == max_kl else tolerance,
        "steps": options.max_steps,
        "strength": weight,
        "for_export": True if options.engines else None,
        "sharing": None if options.sharing is Sharing.PER_HEAD else options.sharing.name.lower(),
        "heads_per_layer": options.heads_per_layer,
    }
    known = {key: option for key, option in named.items() if option is not None}
    return {"seed": options.seed, "options": {"through": "model"} | known}


def quality_record(
    evidence: Evidence, by_weight: Mapping[float, Evidence], over_constant: Estimate | None
) -> dict[str, Any]:
    """The quality of a fit on the test split; `report.sentences.with_verdict` adds the verdict.

    Args:
      evidence: the fit, OWN, and other rules.
      by_weight: the fit at each interpolation weight, as OWN.
      over_constant: gain over one constant for all heads; None if the fit is that.
    """
    record: dict[str, Any] = {
        "held_out": judged_items(evidence).gain_records(),
        "trade": [_record_at(weight, at_weight) for weight, at_weight in by_weight.items()],
    }
    if over_constant is not None:
        record["over_constant"] = _finite(gain=over_constant.mean, gain_error=over_constant.error)
    return record


def _record_at(weight: float, evidence: Evidence) -> dict[str, float]:
    """At an interpolation weight: held-out gain, gain on other templates, and KL of text."""
    answers, text = evidence.answers, evidence.text.held_out_templates
    calibration = answers.calibration_templates
    estimates: dict[str, Estimate] = {"gain": judged_items(evidence).gain(OWN, LOG_P)}
    if 0 < calibration.n < answers.n:
        estimates["seen"] = calibration.gain(OWN, LOG_P)
    if text.n:
        estimates["kl"] = text.mean(OWN, KL)
    numbers = {name: x.mean for name, x in estimates.items()}
    numbers |= {f"{name}_error": x.error for name, x in estimates.items()}
    if harm := text_harm(text, OWN):
        numbers |= {"kl_999": harm.kl_999, "same_top": harm.same_top.mean}
    return _finite(strength=weight, **numbers)


def _finite(**numbers: float) -> dict[str, float]:
    """The numbers that a file can hold: an error of one group is unknown."""
    return {key: float(number) for key, number in numbers.items() if np.isfinite(number)}
