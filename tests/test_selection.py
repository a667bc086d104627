"""What reports say of the kinds of rule that were compared."""

from dataclasses import replace

from calibrate.report.selection import selection_tables


def record(kind, q, gain, p=0.5):
    return {"kind": kind, "q": q, "log_p": gain - 1, "p": p, "gain": gain, "low": gain - 0.01,
            "high": gain + 0.01}  # fmt: skip


KINDS = [record("constant", 0.0, 0.2), record("entropy-and-size", 0.0, 0.3, 0.52)]


def tables(fit, records, q=0.0):
    return selection_tables(replace(fit, quality={"candidates": records, "q": q}))


def last_column(table):
    return [row[-1] for row in table.rows]


def test_the_kinds_are_those_of_the_smallest_q(by_both):
    (kinds,) = tables(by_both, [*KINDS, record("entropy-and-size", 0.25, 0.28, 0.6)], 0.25)
    assert [row[0] for row in kinds.rows] == ["one constant", "the rule of entropy and size"]
    assert last_column(kinds) == ["", "chosen"]
    assert kinds.rows[1][1:-1] == ["-0.7000", "+0.3000", "+0.2900 to +0.3100", "52.0%"]


def test_a_given_q_has_no_trade(by_both):
    (kinds,) = tables(by_both, [one | {"q": 0.5} for one in KINDS], 0.5)
    assert last_column(kinds) == ["", "chosen"]


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
