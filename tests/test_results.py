"""What is written of the studies is what the study's file holds."""

import runpy

import numpy as np
import pytest
from study import mean_and_error
from study_pages import RESULTS, STUDIES, assert_tables_are, page_of, record_of

import calibrate
from calibrate.evidence.metrics import RIGHT
from calibrate.report.plot_style import save_figure
from calibrate.rows.heads import load_head
from calibrate.rows.score import score_head


def names_of(script):
    return runpy.run_path(str(STUDIES / f"{script}.py"))


RECORD = record_of("table1")
# Pages whose tables other files compare with the record, as their scripts need an extra.
ELSEWHERE = {
    "clrs-text", "deployed-heads", "paper-procedure", "tabular", "two-queries",
}  # fmt: skip
STUDIED = sorted({path.stem for path in RESULTS.glob("*.json")} - ELSEWHERE)


@pytest.mark.parametrize("study", STUDIED)
def test_the_tables_are_the_record(study):
    script = "smollm2_results" if study == "smollm2" else study.replace("-", "_")
    lines = names_of(script)["markdown"](record_of(study))
    assert_tables_are(study, lines)


def test_every_record_has_a_page_and_the_index_lists_it():
    pages = {path.stem for path in RESULTS.glob("*.md")} - {"README", "deployed-heads-plan"}
    assert pages == {path.stem for path in RESULTS.glob("*.json")}
    assert all(f"]({name}.md)" in page_of("README") for name in pages)


def test_the_answer_on_table_1_has_the_paired_differences_of_the_record():
    values, place = names_of("table1")["values"], RECORD["sizes"].index(1_024)

    def difference(rule, other, metric, digits=".1f"):
        """Over all n of a loss, else at n = 1,024."""
        both = [
            np.array([head["rules"][x]["all"][metric] for head in RECORD["heads"]])
            if metric == "nll" else 100 * values(RECORD, x, metric)[:, place]
            for x in (rule, other)
        ]  # fmt: skip
        mean, error = mean_and_error(both[0] - both[1])
        return f"{mean:{digits}} ± {error:{digits}}"

    page = " ".join(page_of("table1").split())
    assert f"by {difference('polynomial', 'baseline', 'accuracy')} points over" in page
    assert f"{difference('polynomial', 'paper', 'accuracy')} more than" in page
    assert f"by {difference('constant', 'polynomial', 'nll', digits='.4f')} nats" in page
    assert f"by {difference('least-squares', 'polynomial', 'nll', digits='.3f')} nats" in page


def test_the_gain_of_the_record_is_drawn(tmp_path):
    save_figure(tmp_path / "x.png", names_of("table1")["accuracy_figure"](RECORD))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_part_of_the_record_is_reproduced(monkeypatch, tmp_path):
    """One head at one n: processors may differ in the last bits, and so in an input or two."""
    recorded = RECORD["heads"][4]["rules"]["paper"]["accuracy"][RECORD["sizes"].index(512)]
    rules = {"paper": calibrate.load("paper")}
    found = score_head(load_head("max-retrieval-4"), [512], 2_048, 1, rules)
    assert abs(float(found.mean("paper", RIGHT).mean) - recorded) < 3 / 2_048
