"""The study of the paper's procedure: its record, and its result on a small data set."""

import json
import runpy
from pathlib import Path

import numpy as np
import paper_procedure_data
import pytest

from calibrate.fitting.groups import MIN_ROWS

STUDIES = Path(paper_procedure_data.__file__).parent


@pytest.fixture(scope="module")
def study():
    return runpy.run_path(str(STUDIES / "paper_procedure.py"))


@pytest.fixture(scope="module")
def record(study):
    return json.loads(study["RESULT"].read_text())


def test_the_record_has_every_data_set_and_the_readme_its_tables(study, record):
    assert list(record) == list(paper_procedure_data.DATA)
    page = (STUDIES.parent / "results" / "README.md").read_text()
    for line in study["markdown"](record):
        assert line in page


def test_the_paper_s_procedure_is_never_refused_and_stays_positive(record):
    for name, result in record.items():
        assert result["robust"]["n_rows"] >= MIN_ROWS, name
        assert result["refused"] is None, name
        assert result["robust"]["minimum"] > 0, name


def test_few_rows_give_what_the_record_says(study, record, tmp_path):
    result = study["compare"](paper_procedure_data.DATA["few rows"](tmp_path))
    for rule, nll in record["few rows"]["nll"].items():
        assert result["nll"][rule] == pytest.approx(nll, rel=1e-3), rule
    fit, expected = result["robust"], record["few rows"]["robust"]
    assert fit["n_rows"] == expected["n_rows"]
    assert fit["r_squared"] == pytest.approx(expected["r_squared"], abs=1e-3)


def test_arrays_have_the_properties_that_they_are_named_for():
    rng = np.random.default_rng(0)
    logits, target = paper_procedure_data.near_ties(rng, 500, 64)
    below = logits.max(axis=1) - logits[np.arange(500), target]
    assert ((below > 0) & (below <= 1e-5)).sum() > 30
    logits, _ = paper_procedure_data.query_norms(rng, 500, 64)
    deviation = logits.std(axis=1)
    assert deviation.max() > 10 * deviation.min()
