"""Scores of rules on synthetic evidence: tables, JSON, and what the terminal shows of them."""

from dataclasses import replace

import numpy as np
import pytest
from evidence_cases import BY_SIZE, CELLS, evidence_of_gains, fitted_at

from calibrate.evidence.baselines import hard_attention, one_constant
from calibrate.evidence.evidence import Stratum
from calibrate.evidence.metrics import ANSWERS, KL, LOG_P, RIGHT, ROWS, SETS
from calibrate.evidence.significance import best_rules
from calibrate.report.blocks import as_json
from calibrate.report.labels import label
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.terminal import show
from calibrate.rows.score import score_head


@pytest.mark.parametrize("items", [ROWS, SETS, ANSWERS], ids=["rows", "head", "answers"])
def test_tables_and_json_have_the_same_numbers(items, capsys):
    gains = {"paper": (0.1,) * 4, "own": (0.3, 0.2, 0.1, 0.1), "hard": (0.4,) * 4, "a": (0,) * 4}
    strata = CELLS if items == ANSWERS else BY_SIZE
    record = ScoresRecord(evidence_of_gains(gains, items, strata=strata), own="mine@2")
    assert record.rules == ["baseline", "own", "paper", "hard", "a"]
    data = as_json(record)
    assert data["of"] == {
        "name": "toy", "fingerprint": "sha256:toy", "items": items.name, "left_out": {},
    }  # fmt: skip
    sizes = {f"{size['size']:,}": size for size in data["sizes"]} | {"all": data["all"]}
    nll, gain, *others = (table for table in record.tables() if "nats" in table.title)
    for table, rules in ((nll, ("baseline", "own", "paper", "a")), (gain, ("own", "paper", "a"))):
        names = [" ".join(heading.split()) for heading in table.columns]
        assert [name for name in names if name not in ("n", "tokens", "answers")] == [
            record.label(rule)
            for rule in rules  # no argmax
        ]
        assert [row[0] for row in table.rows] == list(sizes)
        for row in table.rows:
            cells = dict(zip(names, row, strict=True))
            for rule in rules:
                numbers = sizes[row[0]]["rules"][rule][LOG_P.name]
                mean = f"{-numbers['mean']:.3f}"
                own_gain = f"{numbers['gain']:+.3f} ± {numbers['gain_error']:.3f}"
                expected = own_gain if table is gain else mean
                assert cells[record.label(rule)].removeprefix("* ") == expected
    assert any("Retention text" in table.title for table in others) == (items == ANSWERS)
    check_comparison(record, data)
    show(record)
    out = capsys.readouterr().out
    assert "\n".join(record.verdict_sentences()["own"]) in out
    assert data["verdicts"]["own"]["text"] in out.replace("\n", " ")


def check_comparison(record, data):
    """The comparison has the means of the JSON, and gains in pairs."""
    table, items = record.comparison(), record.judged
    assert [row[0] for row in table.rows][-1] == "argmax"  # it has no finite NLL
    for row in table.rows:
        rule = next(rule for rule, name in record.names.items() if name == row[0])
        numbers = data["all"]["rules"][rule]
        if rule != "hard":
            assert row[table.columns.index("NLL, nats")].endswith(
                f"{-numbers[LOG_P.name]['mean']:.3f}"
            )
        for column, over in ((-2, "baseline"), (-1, "own")):
            gain = items.gain(rule, LOG_P, over).shown("+.3f" if column == -2 else "+.4f")
            assert row[column] == ("" if rule == over else "·" if rule == "hard" else gain)


def test_retention_text_has_its_harm_by_domain():
    text = evidence_of_gains({"own": (0.3, 0.3, 0.3, -0.05)}, ANSWERS, strata=CELLS).text
    strata = (*text.strata, Stratum(128, "news", protected=True))
    stratum = np.where(np.arange(text.n) % 2, text.stratum, len(CELLS))
    evidence = replace(text, strata=strata, stratum=stratum)
    table = next(x for x in ScoresRecord(evidence, own="mine@1").tables() if "mine@1" in x.title)
    assert [row[0] for row in table.rows] == ["book", "news", "all"]
    for name, row in zip(("book", "news"), table.rows, strict=False):
        part = evidence.by("template")[name]
        before, after = (-part.mean(rule, LOG_P).mean for rule in ("baseline", "own"))
        assert row[2] == f"{before:.4f} → {after:.4f}"
        assert row[3] == part.mean("own", KL).shown(".4f")


def test_the_star_marks_rules_within_001_nats_of_the_best_or_not_significantly_worse():
    gains = {"a": (0.3, 0.2, 0.1, 0.1), "b": (0.3, 0.2, 0.1, 0.1), "c": (0.1,) * 4}
    record = ScoresRecord(evidence_of_gains(gains, SETS), ("a", "b"))
    items, means = record.judged, [*record.tables(), record.comparison()]
    beaten = {x for x in record.rules for y in record.rules if items.gain(y, LOG_P, x).sign > 0}
    assert set(best_rules(items, record.rules)) == set(record.rules) - beaten == {"a", "b"}
    stars = [{(i, j) for i, row in enumerate(x.rows) for j, cell in enumerate(row) if "*" in cell}
             for x in means]  # fmt: skip
    assert [bool(x) for x in stars] == ["NLL" in x.title or x is means[-1] for x in means]


@pytest.mark.parametrize(("loss", "count", "best"), [
    (0.007, 4_000, True), (0.013, 4_000, False), (0.013, 20, True),
])  # fmt: skip
def test_a_significant_loss_below_001_nats_does_not_matter(loss, count, best):
    gains = {"own": (0.3,) * 4, "constant": (0.3 - loss,) * 4}
    evidence = evidence_of_gains(gains, count=count, fits={"own": fitted_at("log-size")})
    assert evidence.gain("own", LOG_P, "constant").significant == (count == 4_000)
    assert ("constant" in best_rules(evidence, evidence.rules)) == best
    record = ScoresRecord(evidence, ("own", "constant"))
    assert ("as good: constant" in " ".join(record.verdict_sentences()["own"])) == best
    of_constant = " ".join(record.verdict_sentences()["constant"])
    assert ("Significantly better: fitted rule" in of_constant) != best


def test_hard_attention_is_never_the_best_rule_to_use():
    gains = {"own": (0.2,) * 4, "hard": (0.4,) * 4}
    record = ScoresRecord(evidence_of_gains(gains, SETS))
    assert best_rules(record.judged, record.rules) == ["own"]
    accuracy, *_ = record.tables()
    assert "argmax" in accuracy.columns
    assert not any("*" in cell for row in accuracy.rows for cell in row)


def test_an_unknown_error_is_null_and_no_nan_is_shown(capsys):
    record = ScoresRecord(evidence_of_gains({"own": (1.0,)}, count=1, strata=BY_SIZE[:1]))
    show(record)
    assert "nan" not in capsys.readouterr().out
    assert as_json(record)["all"]["rules"]["own"][LOG_P.name]["gain_error"] is None


def test_held_out_templates_have_the_first_table():
    strata = tuple(s._replace(unseen=s.template == "towns") for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, -0.4, 0)}, ANSWERS, strata=strata)
    for table in ScoresRecord(evidence).tables()[:3]:
        assert [row[0] for row in table.rows] == ["64", "calibration templates"]


def test_argmax_is_not_ranked_by_its_infinite_nll(toy_head):
    rules = {"own": one_constant(2.0), "hard": hard_attention()}
    record = ScoresRecord(score_head(toy_head, [16, 64], 400, 0, rules), ("own",))
    names = [row[0] for row in record.comparison().rows]
    assert names == [label("own"), label("baseline"), label("hard")]


def test_the_nll_decides_and_accuracy_is_shown():
    """A rule with a better NLL and a worse accuracy is the better one."""
    evidence = evidence_of_gains({"a": (0.2,) * 4, "b": (0.1,) * 4}, SETS)
    right = evidence.values[RIGHT].copy()
    right[1] = 0  # of "a"
    evidence = replace(evidence, values={**evidence.values, RIGHT: right})
    record = ScoresRecord(evidence, ("a", "b"))
    assert [row[0] for row in record.comparison().rows] == ["a", "b", label("baseline")]
    titles = [table.title for table in record.tables()]
    assert ["Accuracy" in titles[0], "NLL" in titles[1]] == [True, True]


def test_heads_are_ranked_and_those_without_a_rule_are_unchanged(by_size):
    entries = tuple(replace(by_size.only, layer=0, head=i) for i in (0, 2))
    fits = {"own": replace(by_size, entries=entries)}
    evidence = evidence_of_gains({"own": [[0.1, 0.0, 0.3]] * 4}, heads=3, fits=fits)
    record = ScoresRecord(evidence, own="lines@1")
    (table,) = (table for table in record.tables() if table.columns[0] == "head")
    assert [row[0] for row in table.rows] == [f"layer 0, head {i}" for i in (2, 0, 1)]
    assert [row[-1] for row in table.rows] == ["0.5 log n + 0.6"] * 2 + ["1"]
    assert [row[3] == "unchanged" for row in table.rows] == [False, False, True]
    assert [(x["layer"], x["head"]) for x in as_json(record)["heads"]] == [(0, 2), (0, 0), (0, 1)]
    head = as_json(record)["heads"][0]
    assert head["rules"]["own"][LOG_P.name]["gain"] == pytest.approx(0.3, abs=0.02)
