"""What reports say of the kinds of rule that were compared."""

from dataclasses import replace

from calibrate.report.blocks import Heading, Table
from calibrate.report.selection import selection_section, selection_tables


def record(kind, q, gain, p=0.5, low=None):
    low = gain - 0.01 if low is None else low
    return {"kind": kind, "q": q, "log_p": gain - 1, "p": p, "gain": gain, "low": low,
            "high": gain + 0.01}  # fmt: skip


KINDS = [record("constant", 0.0, 0.2), record("entropy-and-size", 0.0, 0.3, 0.52)]


def with_records(fit, records, q=0.0):
    return replace(fit, quality={"candidates": records, "q": q, "verdict": "it gains"})


def last_column(table):
    return [row[-1] for row in table.rows]


def test_the_kinds_are_those_of_the_smallest_q(by_both):
    records = [*KINDS, record("entropy-and-size", 0.25, 0.28, 0.6)]
    (kinds,) = selection_tables(with_records(by_both, records, 0.25))
    assert last_column(kinds) == ["", "chosen"]
    assert kinds.rows[1][1:-1] == ("-0.7000", "+0.3000", "+0.2900 to +0.3100", "52.0%")


def test_a_given_q_is_named_and_has_no_trade(by_both):
    records = [one | {"q": 0.5} for one in KINDS]
    (kinds,) = selection_tables(with_records(by_both, records))
    assert kinds.title.startswith("Kinds of rule at q = 0.5, held out")


def test_files_without_q_and_p_have_the_kinds_alone(by_both, by_size, make_fit):
    records = [
        {"kind": kind, "log_p": -1.0, "gain": 0.1, "low": 0.09, "high": 0.2}
        for kind in ("constant", "log-size", "polynomial")
    ]
    constant = make_fit(powers=(0.0, 0.0, 0.0, 0.0, 2.0))
    for place, fit in enumerate((constant, by_size, make_fit())):
        heading, text, kinds = selection_section(with_records(fit, records))
        assert heading == Heading("Which kind of rule")
        assert text.text == "It gains."
        assert isinstance(kinds, Table)
        assert kinds.columns[1:-1] == ["log p", "gain over plain", "95 % interval"]
        scores = ("-1.0000", "+0.1000", "+0.0900 to +0.2000")
        assert [row[1:-1] for row in kinds.rows] == 3 * [scores]
        assert last_column(kinds) == ["chosen" * (i == place) for i in range(3)]
    assert list(selection_section(replace(by_both, quality={}))) == []
