"""The study of the paper's procedure: its record, and its result on a small data set."""

import numpy as np
import paper_procedure
import paper_procedure_data
import pytest
from study_pages import page_of, record_of


@pytest.fixture(scope="module")
def record():
    return record_of("paper-procedure")


def test_the_record_has_every_data_set(record):
    assert list(record) == list(paper_procedure_data.DATA)


def test_the_page_counts_what_the_record_has(record):
    default, procedure = "polynomial", "least-squares"
    page = " ".join(page_of("paper-procedure").split())
    r_squared = [of["r_squared"] for of in record.values()]
    higher = sum(of[procedure] > of[default] for of in r_squared)
    assert f"higher for the paper's procedure on {higher} of {len(record)} data sets" in page
    accuracy = [of["accuracy"] for of in record.values() if "accuracy" in of]
    ahead = sum(of[default][0] > of[procedure][0] for of in accuracy)
    assert f"accuracy is higher on {ahead} of {len(accuracy)} heads" in page
    errors = [100 * of[rule][1] for of in accuracy for rule in of]
    assert f"error is {min(errors):.1f} to {max(errors):.1f} points" in page
    built_in = [record[name]["gain"] for name in paper_procedure_data.BUILT_IN_HEADS]
    assert max(abs(of[f"{default} over constant"][0]) for of in built_in) < 0.002


@pytest.mark.slow
def test_few_rows_give_what_the_record_says(record, tmp_path):
    result = paper_procedure.compare(paper_procedure_data.DATA["few rows"](tmp_path))
    for rule, nll in record["few rows"]["nll"].items():
        assert result["nll"][rule] == pytest.approx(nll, rel=1e-3), rule
    assert result["misranked"] == record["few rows"]["misranked"]
    for rule, r_squared in record["few rows"]["r_squared"].items():
        assert result["r_squared"][rule] == pytest.approx(r_squared, abs=1e-3)


@pytest.mark.slow
def test_the_figure_has_every_misranked_input_and_the_rules_in_their_domains():
    (ax, *_) = paper_procedure.optimal_beta_figure().axes
    dots = np.asarray(ax.collections[0].get_offsets())
    assert len(dots) == 2_471
    least, greatest = paper_procedure.BETA_BOUNDS
    assert least < dots[:, 1].min() < dots[:, 1].max() < greatest
    labels = ax.get_legend_handles_labels()[1]
    assert labels[:3] == [
        "optimal β of a misranked input", "the paper's procedure (--paper)", "published polynomial",
    ]  # fmt: skip
    by_label = {curve.get_label(): curve.get_data() for curve in ax.lines}
    assert by_label["the paper's procedure (--paper)"][1].min() == 1  # never below softmax
    assert by_label["default polynomial"][0][-1] < dots[:, 0].max()
    curves = [
        by_label[name] for name in ("the paper's procedure (--paper)", "published polynomial")
    ]
    last = [entropy[beta <= 1].max() for entropy, beta in curves]
    assert last == pytest.approx([0.97, 0.85], abs=0.01)  # as the caption says
