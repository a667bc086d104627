"""What the README says of the study is what the study's file holds."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from calibrate.faces.comparison_views import comparison_of, comparison_record
from calibrate.heads import load_head

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "scripts/results/table1.json").read_text())
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts/reproduce_table1"))


def test_readme_table_1_is_the_file(script):
    for line in script["markdown"](RECORD):
        assert line in README, line


def test_the_record_is_of_the_shipped_heads_at_full_size(script):
    assert RECORD["heads"] == [f"max-retrieval-{i}" for i in range(10)]
    assert RECORD["sizes"] == [16 << i for i in range(11)] == script["SIZES"]
    assert RECORD["sets"] == [32_768] * 5 + [4_096] * 4 + [1_024] * 2
    assert RECORD["table_1_of_the_paper"] == script["PAPER"]


def test_the_record_agrees_with_itself():
    for rule in RECORD["rules"]:
        np.testing.assert_allclose(
            np.mean(rule["per_head"], axis=0), rule["accuracy"], rtol=0, atol=1e-6
        )
    again = comparison_record(comparison_of(RECORD))
    assert again == {key: RECORD[key] for key in again}


def test_a_part_of_the_record_is_reproduced():
    """512 of the sets of one head and size: within five standard errors of the whole."""
    from calibrate.pipeline.evaluate import evaluate
    from calibrate.pipeline.rules import fixed_rules

    k = RECORD["sizes"].index(512)
    (score,) = evaluate(load_head("max-retrieval-4"), [512], 512, 0, fixed_rules())
    for rule in RECORD["rules"]:
        if rule["rule"] in ("plain", "paper", "hard"):
            p = rule["per_head"][4][k]
            error = np.sqrt(p * (1 - p) / 512)
            assert abs(score.accuracy(rule["rule"]) - p) < 5 * error
