"""What is written of the studies is what the study's file holds."""

import numpy as np
import pytest
import table1
from study import mean_and_error
from study_pages import RESULTS, assert_tables_are, page_of, record_of

import calibrate
from calibrate.evidence.metrics import RIGHT
from calibrate.rows.heads import load_head
from calibrate.rows.score import score_head

RECORD = record_of("table1")
# Modules whose name is not that of the page; the modules of some studies need an extra.
MODULES = {"clrs-text": "clrs_text_results", "smollm2": "smollm2_results"}


@pytest.mark.parametrize("study", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_the_tables_and_the_figure_are_the_record(study, tmp_path):
    module = pytest.importorskip(MODULES.get(study, study.replace("-", "_")))
    assert_tables_are(study, module.markdown(record_of(study)))
    if hasattr(module, "draw_record"):
        module.draw_record(tmp_path / "x.png", record_of(study))
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_every_record_has_a_page_and_the_index_lists_it():
    pages = {path.stem for path in RESULTS.glob("*.md")} - {"README", "deployed-heads-plan"}
    assert pages == {path.stem for path in RESULTS.glob("*.json")}
    assert all(f"]({name}.md)" in page_of("README") for name in pages)


def test_the_answer_on_table_1_has_the_paired_differences_of_the_record():
    place = RECORD["sizes"].index(1_024)

    def difference(rule, other, metric, digits=".1f"):
        """Over all n of a loss, else at n = 1,024."""
        both = [
            np.array([head["rules"][x]["all"][metric] for head in RECORD["heads"]])
            if metric == "nll" else 100 * table1.values(RECORD, x, metric)[:, place]
            for x in (rule, other)
        ]  # fmt: skip
        mean, error = mean_and_error(both[0] - both[1])
        return f"{mean:{digits}} ± {error:{digits}}"

    page = " ".join(page_of("table1").split())
    assert f"by {difference('polynomial', 'baseline', 'accuracy')} points over" in page
    assert f"{difference('polynomial', 'paper', 'accuracy')} more than" in page
    assert f"by {difference('constant', 'polynomial', 'nll', digits='.4f')} nats" in page
    assert f"by {difference('least-squares', 'polynomial', 'nll', digits='.3f')} nats" in page


@pytest.mark.slow
def test_a_part_of_the_record_is_reproduced(monkeypatch, tmp_path):
    """One head at one n: processors may differ in the last bits, and so in an input or two."""
    recorded = RECORD["heads"][4]["rules"]["paper"]["accuracy"][RECORD["sizes"].index(512)]
    rules = {"paper": calibrate.load("paper")}
    found = score_head(load_head("max-retrieval-4"), [512], 2_048, 1, rules)
    assert abs(float(found.mean("paper", RIGHT).mean) - recorded) < 3 / 2_048
