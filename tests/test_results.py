"""What is written of the studies is what the study's file holds."""

import runpy

import numpy as np
import pytest
import table1_comparison
from study_pages import RESULTS, STUDIES, assert_tables_are, page_of, record_of

from calibrate.rows.heads import load_head


def names_of(script):
    return runpy.run_path(str(STUDIES / f"{script}.py"))


RECORD, TEMPERATURE = record_of("table1"), record_of("temperature-scaling")
# Pages whose tables other files compare with the record, as their scripts need an extra.
ELSEWHERE = {
    "clrs-text", "paper-procedure", "reaction-maps", "tabular", "two-queries",
}  # fmt: skip
NO_SCRIPT = {"dispersal"}
STUDIED = sorted({path.stem for path in RESULTS.glob("*.json")} - ELSEWHERE - NO_SCRIPT)


@pytest.mark.parametrize("study", STUDIED)
def test_the_tables_are_the_record(study):
    script = "smollm2_results" if study == "smollm2" else study.replace("-", "_")
    lines = names_of(script)["markdown"](record_of(study))
    assert_tables_are(study, lines)


def test_every_record_has_a_page_of_the_same_form_and_the_index_lists_it():
    pages = {path.stem for path in RESULTS.glob("*.md")} - {"README"}
    assert pages == {path.stem for path in RESULTS.glob("*.json")}
    index = page_of("README")
    for name in pages:
        text = page_of(name)
        parts = ("**Question.**", "**Answer.**", "## Results", "## How it was measured",
                 "## What it does not show")  # fmt: skip
        places = [text.find(part) for part in parts]
        assert places[0] > -1, name
        assert places == sorted(places), name
        assert f"]({name}.md)" in index


def test_softmax_calibrator_loses_nothing_to_temperature_scaling_in_any_cell():
    script = names_of("temperature_scaling")
    assert len(TEMPERATURE["cells"]) == len([*script["GRID"], *script["SHARP"], *script["DIFFUSE"]])
    assert max(cell["more"] for cell in TEMPERATURE["cells"]) < script["WITHIN"]


def test_the_table_of_dispersal_is_the_record():
    found, page = record_of("dispersal"), page_of("dispersal")
    for size in ("1024", "16384"):
        cells = " | ".join(f"{found[eps]['estimate'][size]:,}" for eps in found)
        assert f"| estimate from sets of {int(size):,} | {cells} |" in page
    cells = " | ".join(f"{found[eps]['measured']:,}" for eps in found)
    assert f"| measured | {cells} |" in page


def test_the_record_is_of_the_shipped_heads_at_full_size_and_agrees_with_itself():
    script = names_of("table1")
    assert RECORD["heads"] == [f"max-retrieval-{i}" for i in range(10)]
    assert RECORD["sizes"] == [16 << i for i in range(11)] == script["SIZES"]
    assert RECORD["sets"] == [32_768] * 5 + [4_096] * 4 + [1_024] * 2
    assert RECORD["table_1_of_the_paper"] == script["PAPER"]
    for rule in RECORD["rules"]:
        np.testing.assert_allclose(
            np.mean(rule["per_head"], axis=0), rule["accuracy"], rtol=0, atol=1e-6
        )
    again = table1_comparison.record_of(table1_comparison.comparison_of(RECORD))
    assert again == {key: RECORD[key] for key in again}


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
