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


def test_readme_dispersal_is_the_file():
    found = json.loads((ROOT / "scripts/results/dispersal.json").read_text())
    for size in ("1024", "16384"):
        cells = " | ".join(f"{found[eps]['estimate'][size]:,}" for eps in found)
        assert f"| estimate from sets of {int(size):,} | {cells} |" in README
    cells = " | ".join(f"{found[eps]['measured']:,}" for eps in found)
    assert f"| measured | {cells} |" in README


def test_what_the_readme_says_of_table_1():
    """The bullets' claims, on the numbers."""
    rules = {rule["rule"]: {k: np.array(v, float) for k, v in rule.items() if k not in
                            ("rule", "label")} for rule in RECORD["rules"]}  # fmt: skip
    size = np.array(RECORD["sizes"])
    own, paper, constant, hard = (rules[r] for r in ("own", "paper", "constant", "hard"))
    lead = own["accuracy"] - paper["accuracy"]
    middle = (size >= 512) & (size <= 4096)
    assert ((lead > 0.01) & (lead < 0.03) & (own["p_paper"] < 0.001))[middle].all()
    assert (lead[size < 512] < 0.005).all()
    ahead = constant["accuracy"] - own["accuracy"]
    assert ((ahead > 0) & (ahead < 0.01) & (constant["p_own"] < 0.01))[size <= 1024].all()
    assert (abs(ahead) < 0.003)[size > 1024].all()
    kappa = rules["kappa-log-n"]["accuracy"] - own["accuracy"]
    assert (abs(kappa) < 0.0051).all()
    better = hard["accuracy"] - own["accuracy"]
    assert ((better > 0) & (better < 0.021) & (hard["p_own"] < 0.01))[size <= 4096].all()
    kept = rules["rounded"]["gain"] / paper["gain"]
    assert kept[size == 4096] == pytest.approx(0.75, abs=0.02)
    assert abs(kept[size == 16384]) < 0.01
    assert (abs(rules["own-512"]["accuracy"] - own["accuracy"])[size > 512] < 0.005).all()


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
