"""What is written of the studies is what the study's file holds."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from calibrate.rows.heads import load_head

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import ten_heads

SCRIPTS = Path(ten_heads.__file__).parent
STUDIES = (SCRIPTS / "results" / "README.md").read_text(encoding="utf-8")


def load(name):
    return json.loads((SCRIPTS / "results" / f"{name}.json").read_text())


def names_of(script):
    return runpy.run_path(str(SCRIPTS / script))


RECORD, CHOICE, VERDICTS, SMOLLM2 = map(load, ("table1", "choice", "verdicts", "smollm2"))


@pytest.mark.parametrize(
    ("script", "record"),
    [("reproduce_table1", RECORD), ("choose_rule", CHOICE), ("verdict_study", VERDICTS),
     ("smollm2_results.py", SMOLLM2)],
)  # fmt: skip
def test_the_tables_are_the_file(script, record):
    lines = names_of(script)["markdown"](record)
    for line in lines[2:] if record is SMOLLM2 else lines:  # behind its verdict
        assert line in STUDIES, line


def test_readme_dispersal_is_the_file():
    found = load("dispersal")
    for size in ("1024", "16384"):
        cells = " | ".join(f"{found[eps]['estimate'][size]:,}" for eps in found)
        assert f"| estimate from sets of {int(size):,} | {cells} |" in STUDIES
    cells = " | ".join(f"{found[eps]['measured']:,}" for eps in found)
    assert f"| measured | {cells} |" in STUDIES


def test_what_the_readme_says_of_table_1():
    """The bullets' claims, on the numbers."""
    rules = {rule["rule"]: {k: np.array(v, float) for k, v in rule.items() if k not in
                            ("rule", "label")} for rule in RECORD["rules"]}  # fmt: skip
    size = np.array(RECORD["sizes"])
    own, paper, hard = (rules[r] for r in ("own", "paper", "hard"))
    lead = own["accuracy"] - paper["accuracy"]
    assert ((lead > 0) & (own["p_paper"] < 0.0005))[size <= 4096].all()
    for n, points in ((16, 0.1), (256, 1.5), (2048, 3.0)):
        assert lead[size == n] == pytest.approx(points / 100, abs=5.5e-4)
    assert (own["p_paper"][size > 4096] > 0.07).all()
    procedure = rules["procedure"]
    share = own["headroom"] / procedure["headroom"]
    assert share[size == 64] == pytest.approx(4, abs=0.3)
    assert share[size == 128] == pytest.approx(2, abs=0.1)
    ahead = own["accuracy"] - procedure["accuracy"]
    assert ((ahead > 0) & (procedure["p_own"] < 0.006))[size <= 1024].all()
    assert (procedure["p_own"][size > 1024] > 0.3).all()
    sharp = {q: rules[f"own fit, q = {q}"] for q in ("0", "0.25", "0.5")}
    assert (sharp["0.5"]["accuracy"] > procedure["accuracy"]).all()
    assert (sharp["0.5"]["headroom"][(size >= 32) & (size <= 4096)] > 0.885).all()
    assert (sharp["0.5"]["headroom"][(size >= 32) & (size <= 4096)] < 0.945).all()
    for rule in ("constant", "polynomial", "kappa-log-n"):
        assert (abs(rules[rule]["accuracy"] - sharp["0"]["accuracy"]) < 0.002).all(), rule
    same = {q: (r["per_head"] == own["per_head"]).all(axis=1).sum() for q, r in sharp.items()}
    assert same == {"0": 1, "0.25": 9, "0.5": 0}
    better = hard["accuracy"] - own["accuracy"]
    assert ((better > 0) & (better < 0.0185) & (hard["p_own"] < 0.02))[size <= 4096].all()
    kept = rules["rounded"]["gain"] / paper["gain"]
    assert kept[size == 4096] == pytest.approx(0.75, abs=0.02)
    assert abs(kept[size == 16384]) < 0.01
    assert (abs(rules["own-512"]["accuracy"] - own["accuracy"])[size > 512] < 0.004).all()


def test_the_record_is_of_the_shipped_heads_at_full_size():
    script = names_of("reproduce_table1")
    assert RECORD["heads"] == [f"max-retrieval-{i}" for i in range(10)]
    assert RECORD["sizes"] == [16 << i for i in range(11)] == script["SIZES"]
    assert RECORD["sets"] == [32_768] * 5 + [4_096] * 4 + [1_024] * 2
    assert RECORD["table_1_of_the_paper"] == script["PAPER"]


def test_the_record_agrees_with_itself():
    for rule in RECORD["rules"]:
        np.testing.assert_allclose(
            np.mean(rule["per_head"], axis=0), rule["accuracy"], rtol=0, atol=1e-6
        )
    again = ten_heads.record_of(ten_heads.comparison_of(RECORD))
    assert again == {key: RECORD[key] for key in again}


@pytest.mark.slow
def test_a_part_of_the_record_is_reproduced():
    """One head at one size: processors may differ in the last bits, and so in a set or two."""
    rules = {rule: fit for rule, fit in ten_heads.fixed_rules().items() if rule != "hindsight"}
    k = RECORD["sizes"].index(512)
    found = ten_heads.right_answers(load_head("max-retrieval-4"), 512, None, 0, rules)
    assert (found.sets, found.chosen_on) == (RECORD["sets"][k], RECORD["hindsight_chosen_on"][k])
    assert found.hindsight_beta == pytest.approx(RECORD["hindsight_beta"][4][k], rel=1e-5)
    recorded = {rule["rule"]: rule["per_head"][4][k] for rule in RECORD["rules"]}
    assert len(rules) == 5
    for rule in (*rules, "hindsight"):
        assert abs(found.accuracy(rule) - recorded[rule]) < 3 / found.sets, rule


def test_what_the_readme_says_of_the_choice():
    log_p, p = ({r["rule"]: np.mean(r[name]) for r in CHOICE["rules"]} for name in ("log_p", "p"))
    default = "chosen by calibrate fit"
    kinds = ("constant", "log-size", "polynomial", "entropy-and-size")
    assert np.ptp([log_p[f"{kind}, q = 0"] for kind in kinds]) < 0.002
    assert log_p[default] - log_p["plain"] > 0.9 * 0.41
    for kind in kinds:
        by_q = [f"{kind}, q = {q}" for q in ("0", "0.25", "0.5")]
        falls, rises = np.diff([log_p[rule] for rule in by_q]), np.diff([p[rule] for rule in by_q])
        assert falls[0] == pytest.approx(-0.02, abs=0.002)
        assert -0.23 < falls.sum() < -0.12
        assert rises[0] == pytest.approx(0.016, abs=0.001)
        assert rises[1] > 0.015
    assert log_p["constant, q = 1"] - log_p["constant, q = 0"] == pytest.approx(-7.6, abs=0.05)
    for nested in CHOICE["nested"]:
        for fold in nested["folds"]:
            for measure in ("log p", "p"):
                gains = fold["gains of default"][measure], fold["gains of procedure"][measure]
                assert gains[0] > gains[1]
    for kind in ("constant", "polynomial"):
        assert p[f"{kind}, misranked rows"] < p[f"{kind}, q = 0"]
    gate = log_p["polynomial, q = 0"] - log_p["polynomial, gate at 0.5"]
    assert gate == pytest.approx(0.008, abs=1e-3)
    beyond = CHOICE["beyond"]
    alone = {v for k, v in beyond.items() if "degree" in k and " and " not in k and "mix" not in k}
    assert max(alone) - min(alone) < 0.001
    gain = beyond["H and top-two gap, degree 3"] - beyond["H, degree 4"]
    assert gain == pytest.approx(0.002, abs=1e-3)
    plain, by_entropy, by_commitment, published = (
        beyond[f"mixture: {name}"]
        for name in ("plain", "H, degree 4", "commitment, degree 4", "calibrate fit --q 0")
    )
    assert (by_commitment - plain) / (by_entropy - plain) == pytest.approx(1.5, abs=0.1)
    assert published - plain >= 0.225


def test_what_the_readme_says_of_verdicts():
    cells = {(c["cell"], c["rows"], c["m"]): c for c in VERDICTS["cells"]}
    chosen_on, others = "heads 1, 2, 4, 6, 7, 9", "heads 0, 3, 5, 8"
    for heads in (chosen_on, others):
        without = cells[heads, 40, 0]
        assert without["published"] > without["samples"] / 2
        assert without["below"] >= 0.75 * without["published"]
        assert without["fresh"] < 0
        assert cells[heads, 40, 10]["published"] == 0
    for rows in (150, 600):
        assert cells[others, rows, 10]["below"] == 0
        of_all = {m: cells[chosen_on, rows, m]["fresh_of_all"] for m in (0, 3, 10, 30)}
        assert of_all[10] > max(of_all[0], of_all[3])
    for cell, c in cells.items():
        if cell[0].startswith(("calibrated", "too sharp")) and "not told apart" not in cell[0]:
            assert c["published"] == 0, cell


def test_what_the_readme_says_of_smollm2():
    found = {(r["kind"], r["template"], r["length"]): r["rules"] for r in SMOLLM2["found"]}
    for length, own, plain in ((250, 58.0, 27.0), (900, 50.5, 10.0)):
        rules = found["seen", "all", length]
        assert 100 * rules["own"]["right"]["mean"][0] == pytest.approx(own)
        assert 100 * rules["plain"]["right"]["mean"][0] == pytest.approx(plain)
        for rival in ("constant", "layers"):
            lead, error = rules[rival]["right"]["own_beyond"]
            assert lead > 0.29
            assert lead > 8 * error
            gain, error = rules[rival]["right"]["gain"]
            assert (gain > 2 * error) == ((rival, length) == ("layers", 900))
    rules = found["seen", "all", 2000]
    assert [round(20 * rules[r]["right"]["mean"][0]) for r in ("own", "plain")] == [10, 3]
    for (kind, template, length), rules in found.items():
        if kind == "not seen":
            assert rules["own"]["log_p"]["gain"][0] > 0
        if (kind, template) == ("not seen", "all") and length in (250, 900):
            gain, error = rules["own"]["right"]["gain"]
            assert (gain > 2 * error) == (length == 250)
            assert gain > -2 * error
        if kind == "text":
            losses = [-rules[r]["log_p"]["gain"][0] for r in ("own", "layers", "constant")]
            assert losses == sorted(losses)
            assert 0.026 < losses[1] < losses[2] < 0.033
    beta = np.array([entry["coefficients"][-1] for entry in SMOLLM2["entries"]])
    assert (len(beta), (beta > 1).sum(), (beta < 1).sum()) == (268, 141, 127)
    assert [round(x, 2) for x in (beta.min(), beta.max())] == [0.46, 1.57]
    assert [round(x, 2) for x in np.quantile(beta, [0.25, 0.75])] == [0.87, 1.11]
    assert SMOLLM2["betas"] == {"constant": 1.15, "layers": 1.3}
