"""What is written of the studies is what the study's file holds."""

import runpy

import pytest
import table1_comparison
from study_pages import RESULTS, STUDIES, assert_tables_are, page_of, record_of

from calibrate.rows.heads import load_head


def names_of(script):
    return runpy.run_path(str(STUDIES / f"{script}.py"))


RECORD = record_of("table1")
# Pages whose tables other files compare with the record, as their scripts need an extra.
ELSEWHERE = {
    "clrs-text", "paper-procedure", "reaction-maps", "tabular", "two-queries",
}  # fmt: skip
STUDIED = sorted({path.stem for path in RESULTS.glob("*.json")} - ELSEWHERE)


@pytest.mark.parametrize("study", STUDIED)
def test_the_tables_are_the_record(study):
    script = "smollm2_results" if study == "smollm2" else study.replace("-", "_")
    lines = names_of(script)["markdown"](record_of(study))
    assert_tables_are(study, lines)


def test_every_record_has_a_page_and_the_index_lists_it():
    pages = {path.stem for path in RESULTS.glob("*.md")} - {"README"}
    assert pages == {path.stem for path in RESULTS.glob("*.json")}
    assert all(f"]({name}.md)" in page_of("README") for name in pages)


def test_a_comparison_of_heads_survives_its_record():
    again = table1_comparison.record_of(table1_comparison.comparison_of(RECORD))
    assert again == {key: RECORD[key] for key in again}


def test_the_gain_of_the_record_is_drawn(tmp_path):
    names_of("table1")["draw_gain"](tmp_path / "x.png", RECORD)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_part_of_the_record_is_reproduced():
    """One head at one size: processors may differ in the last bits, and so in a set or two."""
    rules, k = table1_comparison.fixed_rules(), RECORD["sizes"].index(512)
    found = table1_comparison.right_answers(load_head("max-retrieval-4"), 512, None, 0, rules)
    assert (found.sets, found.chosen_on) == (RECORD["sets"][k], RECORD["hindsight_chosen_on"][k])
    assert found.hindsight_beta == pytest.approx(RECORD["hindsight_beta"][4][k], rel=1e-5)
    recorded = {rule["rule"]: rule["per_head"][4][k] for rule in RECORD["rules"]}
    assert len(rules) == 5
    again = table1_comparison.compare_heads(["a", "b"], [[found], [found]])
    assert set(again.rules) == {*rules, "hindsight"}
    for rule, share in zip(again.rules, again.per_head[:, 0, 0], strict=True):
        assert abs(share - recorded[rule]) < 3 / found.sets, rule
