"""What `calibrate fit` prints of several heads."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Table
from calibrate.report.per_head_record import PerHeadRecord
from calibrate.rows.gain import Gain
from calibrate.rows.per_head import HeadFit, HeadRule, PerHeadResult


@pytest.mark.parametrize(
    ("name", "column", "cell"),
    [
        ("by_size", "beta(n)", "0.5 log n + 0.6"),
        ("by_both", "beta(H, n), range", "1.28 to 2.50"),  # eight terms would be too wide
    ],
)
def test_the_rule_of_each_head(name, column, cell, request):
    fit: Coefficients = request.getfixturevalue(name)
    entry = replace(fit.only, layer=1, head=2)
    rule = HeadRule(entry=entry, kind=fit.rule.kind, gain=Gain(0.2, 0.1, 0.3, 0.0), held_out=[])
    heads = [HeadFit(1, 2, 500, 0.25, rule, "it gains"), HeadFit(1, 3, 500, 0.0, None, "no gain")]
    coefficients = replace(
        fit, entries=(entry,), quality={"verdict": "one"}, path=Path("fits/x/1.json")
    )
    record = PerHeadRecord(PerHeadResult(coefficients, heads), None)
    (table,) = (block for block in record.blocks() if isinstance(block, Table))
    assert table.columns[-1] == column
    assert [row[:4] for row in table.rows] == [("1", "2", "500", "25.0%")]
    assert table.rows[0][-1] == cell
