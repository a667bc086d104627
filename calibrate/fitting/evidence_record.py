"""The evidence of a fit, as its coefficient file has it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibrate.datasets.row_collection import RowCollection
from calibrate.datasets.row_quality import count_bad
from calibrate.fitting.fit_head import HeadFit
from calibrate.fitting.held_out import join_held_out
from calibrate.fitting.options import FitOptions


def evidence_record(
    collection: RowCollection,
    statuses: Mapping[str, int],
    heads: Sequence[HeadFit],
    options: FitOptions,
    verdict: str,
) -> dict[str, Any]:
    """The evidence: inputs, heads, held-out scores by n and by kind, and the verdict."""
    record: dict[str, Any] = {
        "inputs": _inputs(collection, statuses, sum(head.fitted for head in heads if head.rule)),
        "heads": [_head_record(head, options) for head in heads],
    }
    scored = [head.held_out for head in heads if head.rule and head.held_out is not None]
    if scored:
        held_out = join_held_out(scored)
        record["held_out"] = held_out.by_size(options.procedure)
        record["kinds"] = held_out.by_kind()
    return {**record, "verdict": verdict}


def _inputs(collection: RowCollection, statuses: Mapping[str, int], fitted: int) -> dict[str, int]:
    """The inputs of a collection by what they are, and those that were fitted."""
    sizes = collection.manifest["sizes"]
    return {
        "seen": sum(size["rows"] for size in sizes),
        "misranked": sum(size["misranked"] for size in sizes),
        "optimum_infinite": statuses["sharp"],
        "optimum_zero": statuses["flat"],
        "optimum_finite": statuses["interior"],
        "bad": sum(map(count_bad, sizes)),
        "fitted": fitted,
    }


def _head_record(head: HeadFit, options: FitOptions) -> dict[str, Any]:
    """The numbers of one head; a head that keeps softmax has no penalty and no freedom."""
    record: dict[str, Any] = {"layer": head.layer, "head": head.head, "inputs": head.inputs}
    gain = head.gain(options.procedure)
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
