"""Comparison of rules as a result to show: each number in the row that names it."""

from calibrate.rows.comparison import compare
from test_comparison import make_score

from calibrate.report.comparison_record import ComparisonRecord
from calibrate.report.wording import p_value, percent

SHARES = {"plain": 0.5, "paper": 0.51, "own": 0.56, "hard": 0.53}


def test_every_p_is_in_the_row_of_the_rule_that_it_is_against():
    comparison = compare("one", [make_score(n, SHARES, sets=200, seed=n) for n in (16, 64)])
    hard = comparison.rules.index("hard")
    measures = {
        "hard attention": map(percent, comparison.accuracy[hard]),
        "±": map(percent, comparison.error[hard]),
        "p-value against plain": map(p_value, comparison.p_plain[hard]),
        "p-value against the paper's": map(p_value, comparison.p_paper[hard]),
        "p-value against ours@1": map(p_value, comparison.p_own[hard]),
    }
    expected = {name: list(cells) for name, cells in measures.items()}
    assert len(set(map(tuple, expected.values()))) == len(expected)  # rows can be told apart
    row = ComparisonRecord(comparison, "ours@1").accuracy_table().rows[hard]
    lines = zip(*(cell.split("\n") for cell in row), strict=True)
    assert {name: cells for name, *cells in lines} == expected
