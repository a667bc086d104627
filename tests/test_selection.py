"""What reports say of the kinds of rule that were compared."""

from dataclasses import replace

from calibrate.report.selection import selection_tables


def tables(fit, records, q=0.0):
    return selection_tables(replace(fit, quality={"candidates": records, "q": q}))


def last_column(table):
    return [row[-1] for row in table.rows]


def test_files_without_q_and_p_have_the_kinds_alone(by_size, make_fit):
    records = [
        {"kind": kind, "log_p": -1.0, "gain": 0.1, "low": 0.09, "high": 0.2}
        for kind in ("constant", "log-size", "polynomial")
    ]
    constant = make_fit(powers=(0.0, 0.0, 0.0, 0.0, 2.0))
    for place, fit in enumerate((constant, by_size, make_fit())):
        (kinds,) = tables(fit, records)
        scores = ["-1.0000", "+0.1000", "+0.0900 to +0.2000", "·"]
        assert [row[1:-1] for row in kinds.rows] == 3 * [scores]
        assert last_column(kinds) == ["chosen" if i == place else "" for i in range(3)]
    assert tables(by_size, []) == []
