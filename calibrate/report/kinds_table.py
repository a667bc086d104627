"""Held-out scores of every kind of rule, on the same folds, as a table."""

import math

from calibrate.evidence.estimate import Estimate, decimal
from calibrate.fitting.folds import N_FOLDS
from calibrate.fitting.options import LEAST_SQUARES
from calibrate.report.blocks import Table
from calibrate.report.labels import label
from calibrate.store.fit import Fit

NOTE = (
    f"Held out: {N_FOLDS} folds of whole groups; each is scored under rules that were fitted to "
    "the others. NLL: lower is better. Gain: log-likelihood over the baseline, ± standard error of "
    "the paired difference."
)


def kinds_table(fit: Fit) -> Table | None:
    """A row for each kind of rule of a fit to a head or heads; None without held-out scores.

    Fits of models have none: their file compares the kind with one constant for all heads.
    """
    records = [record for record in fit.evidence.get("kinds", []) if "nll" in record]
    if not records or fit.of_whole_model:
        return None
    is_least_squares = fit.source.get("options", {}).get("loss") == LEAST_SQUARES
    saved = LEAST_SQUARES if is_least_squares else fit.rule.kind
    rows = []
    for record in records:
        gain = Estimate(record.get("gain", math.nan), record.get("se", math.nan))
        rows.append(
            [
                label(record["kind"]),
                decimal(record["nll"], ".3f"),
                gain.shown("+.3f") if record["kind"] != "baseline" else "",
                "this fit" if record["kind"] == saved else "",
            ]
        )
    columns = ["kind of rule", "NLL", "gain ± SE", ""]
    return Table(columns, rows, "Kinds of rule, held out, nats", NOTE, left=[columns[0], ""])
