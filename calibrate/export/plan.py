"""A fit as engines can run it: a factor on the queries of each head, and one slope by log n.

softmax(beta z) is softmax of the logits of queries times beta. With beta = kappa log n + b,

    beta = b (1 + (kappa / b) log n):

b is a factor on the rows of weights that make a head's queries, and engines that run Llama 4's
scaling apply the rest, with one kappa / b for all heads, and no bounds. What is not exactly so is
refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import TERMS, Rule
from calibrate.errors import CoefficientsError, command
from calibrate.store.entry import MAX_ENTROPY, Entry
from calibrate.store.fit import Fit

_FIT = command("model fit RUN", for_export=True)
FOR_EXPORT = f"make the nearest fit that engines run: {_FIT}"
FIT_CONSTANTS = command("model fit RUN", for_export=True, kind="constant")
FIT_CONSTANT = command("fit COLLECTION", kind="constant")  # of a head alone
# Remedies for a fit of another model.
GIVE_OWN_MODEL = "give the model that it was made for, or any_model=True"
IF_CONVERTED = "if it was converted from the model that the fit was made for, give any_model=True"
TAGS = ("calibrate", "attention-temperature")  # of model cards
_ROUNDING = 1e-7  # of beta, relative: as float32 rounds


class Exportable(NamedTuple):
    """The rules that an export of a model can hold."""

    factors: Sharing  # the heads that have one factor
    no_size: str | None = None  # why beta may not go by log n; None if it may


@dataclass(frozen=True)
class ExportPlan:
    """The change that an engine applies: queries of a head times factor (1 + ratio log n)."""

    factors: Mapping[tuple[int, int], float]  # of every (layer, head); 1 where the fit names none
    ratio: float  # kappa / b, of all heads; 0 where beta does not depend on n

    def of_layer(self, layer: int) -> list[float]:
        """The factors of the heads of a layer, by head."""
        heads = ((layer, head) for head in range(len(self.factors)))
        return [self.factors[head] for head in takewhile(self.factors.__contains__, heads)]


@dataclass(frozen=True)
class ExportContents:
    """The contents of an exported folder or .gguf file, as it was written or as it is read back."""

    path: Path
    metadata: dict[str, Any]  # about the export
    model_type: str  # as engines see it
    plan: ExportPlan | None  # what they apply; None if the fit cannot be read
    problems: tuple[str, ...] = ()  # what differs from what was written, a line each
    notes: tuple[str, ...] = ()  # what else a user should know, a line each


def require_made_for(fit: Fit, fingerprint: str, path: Path, remedy: str) -> None:
    """Raises CoefficientsError if a fit was made for a model with another fingerprint."""
    if fit.fingerprint not in (None, fingerprint):
        raise CoefficientsError(
            f"{fit.reference} was made for {fit.fingerprint}, and {path} is {fingerprint}; "
            f"{remedy}",
            parameter="any_model",
        )


def make_plan(fit: Fit, n_layers: int, n_heads: int, context: int | None) -> ExportPlan:
    """The plan of a fit for a model.

    Args:
      n_heads: query heads of each layer.
      context: the most tokens that the model reads, and so the largest n; None: without limit.
    Raises:
      CoefficientsError: the fit depends on entropy; it is bounded at an n that the model reaches;
        kappa / b differs between heads; it has entries for layers or heads that the model lacks.
    """
    require_heads(fit, n_layers, n_heads)
    most = MAX_ENTROPY if context is None else math.log(context)
    line_of = {entry: _line(fit, entry, most) for entry in fit.entries}
    lines = {}
    for layer, head in product(range(n_layers), range(n_heads)):
        entry = fit.entry_of(layer, head)
        lines[layer, head] = line_of[entry] if entry else (0.0, 1.0)
    ratio = _common_ratio(fit, lines, most)
    return ExportPlan({head: b for head, (_, b) in lines.items()}, ratio)


def require_heads(fit: Fit, n_layers: int, n_heads: int) -> None:
    """Raises CoefficientsError if a fit names layers or heads that a model lacks."""
    for entry in fit.entries:
        layer, head = ("layer", entry.layer, n_layers), ("head", entry.head, n_heads)
        for name, index, count in (layer, head):
            if index is not None and index >= count:
                raise CoefficientsError(
                    f"{fit.reference} has an entry for {name} {index}, and the model has {count} "
                    f"{name}s; give the model that the fit was made for"
                )


def slopes(fit: Fit) -> list[float]:
    """kappa of each entry of a fit; CoefficientsError unless beta depends on n at most."""
    return [_size_terms(fit, entry)[0] for entry in fit.entries]


def _line(fit: Fit, entry: Entry, most: float) -> tuple[float, float]:
    """(kappa, b), where beta is kappa log n + b at every log n from 0 to `most`."""
    kappa, b = _size_terms(fit, entry)
    first, last = (_beta(fit.rule, entry, log_n) for log_n in (0.0, most))
    if first == last:  # beta is monotonic in n
        return 0.0, first
    if not np.allclose((first, last), (b, b + kappa * most), rtol=_ROUNDING, atol=0):
        places = (("layer", entry.layer), ("head", entry.head))
        where = "".join(f", {name} {i}" for name, i in places if i is not None)
        raise CoefficientsError(
            f"{fit.reference}{where}: not exactly a line in log n: its bounds make beta "
            f"{first:.4g} at n = 1 and {last:.4g} at n = {math.exp(most):,.0f}, instead of {b:.4g} "
            f"and {b + kappa * most:.4g}, and engines have no bounds; {FOR_EXPORT}"
        )
    return kappa, b


def _size_terms(fit: Fit, entry: Entry) -> tuple[float, float]:
    """(kappa, b) of a rule that does not depend on the entropy."""
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


def _beta(rule: Rule, entry: Entry, log_n: float) -> float:
    """At some entropy above the gate, which takes no part."""
    H = np.float64(rule.min_entropy + 1.0) if rule.by_entropy else None
    return float(entry.beta_at(H, np.float64(log_n), rule))


def _common_ratio(
    fit: Fit, lines: Mapping[tuple[int, int], tuple[float, float]], most: float
) -> float:
    ratios = np.array([kappa / b for kappa, b in lines.values()])
    ratio = float(np.median(ratios))
    if np.ptp(ratios) * most > _ROUNDING:
        raise CoefficientsError(
            f"{fit.reference} has heads with different kappa / b: {ratios.min():.4g} to "
            f"{ratios.max():.4g}; engines have one for all heads; {FOR_EXPORT}"
        )
    return ratio
