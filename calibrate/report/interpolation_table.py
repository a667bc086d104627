"""Gain and cost of a fit of a model, by interpolation weight, as a table."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from calibrate.errors import command
from calibrate.evidence.estimate import NOTHING, Estimate
from calibrate.report.blocks import Table
from calibrate.store.fit import Fit

NOTE = (
    "beta(s) = 1 + s (beta - 1) at interpolation weight s; "
    f"`{command('model fit', interpolation=True)}` saves another one. KL of retention text: "
    "per token, from the baseline's predictions."
)


class Column(NamedTuple):
    """A column: a number of each record, and how it is shown."""

    heading: str
    shape: str
    field: str  # of a record; that of its standard error ends in "_se"
    factor: int = 1

    def cell(self, record: Mapping[str, Any]) -> str:
        """The number with its standard error, where that is known; a dot if the record has none."""
        if self.field not in record:
            return NOTHING
        error = record.get(f"{self.field}_se", math.nan)
        return Estimate(record[self.field], error).shown(self.shape, self.factor)


COLUMNS = (
    Column("held-out examples", ".0f", "inputs"),
    Column("gain in log-likelihood", "+.3f", "gain"),
    Column("gain in calibration templates", "+.3f", "calibration_gain"),
    Column("KL of retention text", ".4f", "kl"),
    Column("99.9 % KL", ".3f", "kl_999"),
    Column("same top token, %", ".2f", "same_top", factor=100),
)


def interpolation_tables(fit: Fit) -> list[Table]:
    """A row for each interpolation weight that the file of a fit has; no table without any."""
    records = fit.evidence.get("interpolation", [])
    if not records:
        return []
    selected = fit.source.get("options", {}).get("interpolation")
    columns = [x for x in COLUMNS if any(x.field in record for record in records)]
    rows = [
        [
            f"{record['weight']:g}",
            *(column.cell(record) for column in columns),
            "selected" if record["weight"] == selected else "",
        ]
        for record in records
    ]
    headings = ["interpolation weight s", *(column.heading for column in columns), ""]
    title = "Gain and cost by interpolation weight, held out, nats"
    return [Table(headings, rows, title, NOTE, left=[""])]
