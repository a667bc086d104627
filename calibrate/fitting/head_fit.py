"""The fits of heads, with their held-out scores, and the evidence of a coefficient file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.fitting.fit_rule import FittedRule
from calibrate.fitting.held_out import HeldOut, join_held_out
from calibrate.fitting.options import FitOptions
from calibrate.rows.collection import RowCollection
from calibrate.rows.rows import count_bad


@dataclass(frozen=True)
class HeadFit:
    """The fit of one head.

    Attributes:
      layer, head: None where unknown.
      inputs: number of inputs of positive weight.
      misranked: share of them that is misranked, by weight.
      rule: None: the head keeps softmax.
      refusal: why it does; "" where it has a rule.
      constant: the constant of highest likelihood; None where it was not fitted.
      fitted: number of inputs that the rule was fitted to.
      r_squared: of log beta, see `FittedRule.r_squared`.
      bound: the bound that beta reaches in most inputs, "min" or "max"; else "". Of likelihood.
      ranked_right: no input is misranked.
      near_ties: misranked inputs whose optimal beta is above the rule's bound.
      held_out: scores by folds; None where only misranked inputs were kept, or too few inputs.
    """

    layer: int | None
    head: int | None
    inputs: int
    misranked: float
    rule: FittedRule | None = None
    refusal: str = ""
    constant: float | None = None
    fitted: int = 0
    r_squared: float | None = None
    bound: str = ""
    ranked_right: bool = False
    near_ties: int = 0
    held_out: HeldOut | None = field(default=None, compare=False, repr=False)

    def gain(self, procedure: str) -> Estimate | None:
        """The held-out gain of the rule over softmax, nats; None if there are no scores."""
        return None if self.held_out is None else self.held_out.gain(procedure)

    def without_rule(self, refusal: str) -> "HeadFit":
        """The head with softmax, for this reason."""
        return replace(self, rule=None, refusal=refusal)


def make_evidence(
    collection: RowCollection,
    statuses: Mapping[str, int],
    heads: Sequence[HeadFit],
    options: FitOptions,
    verdict: str,
) -> dict[str, Any]:
    """The evidence of a coefficient file: inputs, heads, held-out scores by n and by kind, verdict.

    Args:
      collection: of the inputs.
      statuses: numbers of inputs by the status of their optimum.
      heads: fits of all heads, also of those without a rule.
      options: resolved.
      verdict: in sentences.
    """
    saved = [head for head in heads if head.rule]
    sizes = collection.manifest["sizes"]
    inputs = {
        "seen": sum(size["rows"] for size in sizes),
        "misranked": sum(size["misranked"] for size in sizes),
        "optimum_infinite": statuses["sharp"],
        "optimum_zero": statuses["flat"],
        "optimum_finite": statuses["interior"],
        "bad": sum(map(count_bad, sizes)),
        "fitted": sum(head.fitted for head in saved),
    }
    records = [_head_record(head, options.procedure) for head in heads]
    evidence: dict[str, Any] = {"inputs": inputs, "heads": records}
    scored = [head.held_out for head in saved if head.held_out is not None]
    if scored:
        held_out = join_held_out(scored)
        evidence["held_out"] = held_out.by_size(options.procedure)
        evidence["kinds"] = held_out.by_kind(options.procedure)
    return {**evidence, "verdict": verdict}


def _head_record(head: HeadFit, procedure: str) -> dict[str, Any]:
    """The numbers of one head; a head that keeps softmax has neither penalty nor freedom."""
    record: dict[str, Any] = {"layer": head.layer, "head": head.head, "inputs": head.inputs}
    gain = head.gain(procedure)
    if gain is not None:
        record |= {"gain": float(gain.mean), "se": float(np.nan_to_num(gain.error))}
    if head.rule is None:
        return record
    penalty = head.rule.penalty
    is_infinite = penalty is not None and math.isinf(penalty)
    return record | {
        "penalty": "infinite" if is_infinite else penalty,
        "degrees_of_freedom": head.rule.degrees_of_freedom,
        "r_squared_log_beta": head.r_squared,
        "at_bound": head.bound,
    }
