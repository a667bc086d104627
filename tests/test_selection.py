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
        scores = ["-1.0000", "+0.1000", "+0.0900 to +0.2000"]
        assert [row[1:-1] for row in kinds.rows] == 3 * [scores]
        assert last_column(kinds) == ["selected" if i == place else "" for i in range(3)]
    assert tables(by_size, []) == []


INTERVAL = "+0.0000 to +0.3000"  # of -0.00001, no -0.0000


def test_an_accuracy_tuned_rule_has_a_row_beside_kinds_at_maximum_likelihood(make_fit):
    constant = make_fit(powers=(0.0, 0.0, 0.0, 0.0, 4.0))
    record = {"kind": "constant", "q": 0.0, "log_p": -0.8, "gain": 0.2, "low": 0.1, "high": 0.3}
    tuned = {"q": 0.53125, "log_p": -0.9, "gain": 0.1, "low": -0.00001, "p": 0.655}
    line = record | {"kind": "log-size", "coefficients": [0.1, 2.0]}
    (kinds,) = tables(constant, [record, line, record | tuned], q=0.53125)
    assert "q = 0)" in kinds.title
    assert [row[1:4] for row in kinds.rows] == [
        ["-0.8000", "+0.2000", "+0.1000 to +0.3000"],
        ["-0.8000", "+0.2000", "+0.1000 to +0.3000"],
        ["-0.9000", "+0.1000", INTERVAL],
    ]
    assert "q = 0.53" in kinds.rows[-1][0]
    assert [row[4] for row in kinds.rows] == ["·", "·", "65.5"]
    assert kinds.rows[1][-1] == "kappa = 0.1, b = 2"
    assert "ten pseudo-observations" in kinds.note


def test_least_squares_stand_beside_a_constant_by_likelihood(make_fit):
    constant = {"kind": "constant", "loss": "likelihood", "q": 0.0, "gain": 0.2}
    squares = {"kind": "polynomial", "loss": "least-squares", "gain": 0.1}
    (kinds,) = tables(make_fit(), [constant, squares])
    assert "q" not in kinds.title
    assert [row[:2] + row[-1:] for row in kinds.rows] == [
        ["constant (maximum likelihood)", "+0.2000", ""],
        ["polynomial (least-squares)", "+0.1000", "selected"],
    ]


def test_of_heads_the_kinds_have_means_and_none_is_selected(make_fit):
    fit = make_fit()
    heads = replace(fit, entries=tuple(replace(fit.only, layer=0, head=i) for i in range(2)))
    (kinds,) = tables(heads, [{"kind": "constant", "loss": "likelihood", "q": 0.0, "gain": 0.2}])
    assert "means of heads" in kinds.title
    assert kinds.rows == [["constant", "+0.2000"]]


def test_kinds_at_a_q_that_was_given_are_said_to_be(make_fit):
    constant = make_fit(powers=(0.0, 0.0, 0.0, 0.0, 4.0))
    (kinds,) = tables(constant, [{"kind": "constant", "q": 0.25, "gain": 0.2}], q=0.25)
    assert "q = 0.25" in kinds.title
    assert kinds.rows == [["constant", "+0.2000", "selected"]]
