"""The plan of an export: one factor for the queries of each head, and one ratio for log n.

The logits z are linear in the queries, so softmax(beta z) is the softmax of queries times beta.
A rule beta = kappa log n + b is

    beta = b (1 + ratio log n),    ratio = kappa / b.

The factor b is multiplied into the weights that compute a head's queries. The rest is the query
scaling of Llama 4, which engines apply with one ratio for all heads and without bounds. A fit that
is not exactly of this form is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.rule import TERMS, RuleForm
from calibrate.errors import CoefficientsError, command
from calibrate.store.coefficient_fields import MAX_ENTROPY
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

_FIT = command("model fit RUN", for_export=True)
FOR_EXPORT = f"make the nearest fit that engines run: {_FIT}"
FIT_CONSTANTS = command("model fit RUN", for_export=True, kind="constant")
FIT_CONSTANT = command("fit COLLECTION", kind="constant")  # for the fit of one head
# Remedies for a fit of another model
GIVE_OWN_MODEL = "give the model that it was made for, or any_model=True"
IF_CONVERTED = "if it was converted from the model that the fit was made for, give any_model=True"
TAGS = ("calibrate", "attention-temperature")  # of model cards
_RELATIVE_ROUNDING = 1e-7  # of beta, as float32 rounds


@dataclass(frozen=True)
class ExportPlan:
    """What engines apply: the queries of a head times factor (1 + ratio log n)."""

    factors: Mapping[tuple[int, int], float]  # by (layer, head); 1 for heads that the fit leaves
    ratio: float  # kappa / b of all heads; 0 if beta does not depend on n

    def layer_factors(self, layer: int) -> list[float]:
        """Returns the factors of the heads of a layer, in order."""
        heads = ((layer, head) for head in range(len(self.factors)))
        return [self.factors[head] for head in takewhile(self.factors.__contains__, heads)]


@dataclass(frozen=True)
class ExportContents:
    """Contents of an export, as it was written or as it is read back."""

    path: Path
    metadata: dict[str, Any]  # reference and id of the fit, fingerprint of the model, digest, ...
    model_type: str  # by which engines choose the model's class or graph
    plan: ExportPlan | None  # None if the fit cannot be read
    problems: tuple[str, ...] = ()  # differences from what was written, a line each


def require_made_for(fit: Fit, fingerprint: str, path: Path, remedy: str) -> None:
    """Raises CoefficientsError if a fit was made for a model of another fingerprint."""
    if fit.fingerprint not in (None, fingerprint):
        raise CoefficientsError(
            f"{fit.reference} was made for {fit.fingerprint}, and {path} is {fingerprint}; "
            f"{remedy}",
            parameter="any_model",
        )


def make_plan(fit: Fit, n_layers: int, n_heads: int, context: int | None) -> ExportPlan:
    """Returns the plan of a fit for a model.

    Args:
      n_heads: number of query heads in each layer.
      context: largest number of tokens that the model reads, and so the largest n; None: no limit.
    Raises:
      CoefficientsError: the fit depends on the entropy; one of its bounds acts at an n that the
        model reaches; kappa / b differs between heads; it has entries for layers or heads that the
        model lacks.
    """
    require_heads(fit, n_layers, n_heads)
    max_log_n = MAX_ENTROPY if context is None else math.log(context)
    line_of_entry = {entry: _line(fit, entry, max_log_n) for entry in fit.entries}
    lines = {}
    for layer, head in product(range(n_layers), range(n_heads)):
        entry = fit.entry_of(layer, head)
        lines[layer, head] = line_of_entry[entry] if entry else (0.0, 1.0)
    ratio = _common_ratio(fit, lines, max_log_n)
    return ExportPlan({head: b for head, (_, b) in lines.items()}, ratio)


def require_heads(fit: Fit, n_layers: int, n_heads: int) -> None:
    """Raises CoefficientsError if a fit has entries for layers or heads that a model lacks."""
    for entry in fit.entries:
        layer, head = ("layer", entry.layer, n_layers), ("head", entry.head, n_heads)
        for name, index, count in (layer, head):
            if index is not None and index >= count:
                raise CoefficientsError(
                    f"{fit.reference} has an entry for {name} {index}, and the model has {count} "
                    f"{name}s; give the model that the fit was made for"
                )


def slopes(fit: Fit) -> list[float]:
    """Returns kappa of each entry of a fit; CoefficientsError if beta depends on the entropy."""
    return [_size_terms(fit, entry)[0] for entry in fit.entries]


def _line(fit: Fit, entry: Entry, max_log_n: float) -> tuple[float, float]:
    """Returns (kappa, b), with beta = kappa log n + b for all log n in [0, max_log_n]."""
    kappa, b = _size_terms(fit, entry)
    first, last = (_beta(fit.rule, entry, log_n) for log_n in (0.0, max_log_n))
    if first == last:  # then it is constant, as beta is monotonic in n
        return 0.0, first
    if not np.allclose((first, last), (b, b + kappa * max_log_n), rtol=_RELATIVE_ROUNDING, atol=0):
        places = (("layer", entry.layer), ("head", entry.head))
        where = "".join(f", {name} {i}" for name, i in places if i is not None)
        raise CoefficientsError(
            f"{fit.reference}{where}: not exactly a line in log n: its bounds make beta "
            f"{first:.4g} at n = 1 and {last:.4g} at n = {math.exp(max_log_n):,.0f}, instead of "
            f"{b:.4g} and {b + kappa * max_log_n:.4g}, and engines have no bounds; {FOR_EXPORT}"
        )
    return kappa, b


def _size_terms(fit: Fit, entry: Entry) -> tuple[float, float]:
    """Returns (kappa, b) of a rule; CoefficientsError if it depends on the entropy."""
    rule = fit.rule
    if (beta := entry.constant_beta(rule)) is not None:
        return 0.0, beta
    by_term = dict(zip(TERMS[rule.kind], entry.coefficients, strict=True))
    level, kappa = by_term.pop("1"), by_term.pop("L", 0.0)
    if any(by_term.values()) or rule.min_entropy > 0 or rule.outside != "clamp":
        remedy = FOR_EXPORT if fit.of_whole_model else f"fit a constant: {FIT_CONSTANT}"
        raise CoefficientsError(
            f"{fit.reference} is of kind {rule.kind!r}: its beta depends on the entropy of each "
            f"row, which engines do not compute; {remedy}"
        )
    return kappa, level


def _beta(rule: RuleForm, entry: Entry, log_n: float) -> float:
    """Returns beta at log n, for an entropy above the threshold; the rule does not depend on it."""
    H = np.float64(rule.min_entropy + 1.0) if rule.by_entropy else None
    return float(entry.beta_at(H, np.float64(log_n), rule))


def _common_ratio(
    fit: Fit, lines: Mapping[tuple[int, int], tuple[float, float]], max_log_n: float
) -> float:
    """Returns kappa / b of all heads; CoefficientsError if heads differ."""
    ratios = np.array([kappa / b for kappa, b in lines.values()])
    ratio = float(np.median(ratios))
    if np.ptp(ratios) * max_log_n > _RELATIVE_ROUNDING:
        raise CoefficientsError(
            f"{fit.reference} has heads with different kappa / b: {ratios.min():.4g} to "
            f"{ratios.max():.4g}; engines have one for all heads; {FOR_EXPORT}"
        )
    return ratio
