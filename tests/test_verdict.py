"""Scores of rules on synthetic evidence: what the tables, the JSON and the verdict say of them."""

import re
from dataclasses import replace

import numpy as np
import pytest

import calibrate
from calibrate.evidence.baselines import hard_attention, one_constant
from calibrate.evidence.scores import KL, LOG_P, RIGHT, Evidence, P, Scored, Stratum
from calibrate.evidence.verdict import check_margins, heads_moved, judge, main_measure
from calibrate.evidence.verdict_text import (
    NOT_JUDGED,
    WHY_HARD,
    nll_warning,
    sentence,
    sentences,
)
from calibrate.report.blocks import as_json
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.terminal import as_text, show
from calibrate.rows.score_head import score_head
from calibrate.store.coefficients import Entry

SIZES = (16, 64, 256, 1024)
BY_SIZE = tuple(map(Stratum, SIZES))


def made(gains, items="rows", count=200, strata=BY_SIZE, heads=1, **fields):
    """Rules that add so much in each stratum: to log p, or to the share that is right."""
    rng = np.random.default_rng(1)
    stratum = np.repeat(np.arange(len(strata)), count)
    head = np.arange(len(stratum)) % heads

    def added(gain):
        return np.broadcast_to(np.transpose(gain), (heads, len(strata)))[head, stratum]

    values = {}
    if items != "sets":
        plain = rng.normal(-2, 1, len(stratum))
        noise = rng.normal(0, 0.1, (len(gains), len(stratum)))
        rules = [plain, *(plain + added(g) + e for g, e in zip(gains.values(), noise, strict=True))]
        values[LOG_P] = np.array(rules, np.float32)
    if items == "rows":
        values[P] = np.exp(values[LOG_P])
    if items != "rows":
        u = rng.random(len(stratum))
        if any(s.protected for s in strata):
            values[KL] = np.array([u * 0, *(0.05 * u for _ in gains)])
        values[RIGHT] = np.array([u < 0.5, *(u < 0.5 + added(g) for g in gains.values())], float)
    return Evidence(
        ("plain", *gains), values, strata, stratum, np.full(len(stratum), -1),
        np.ones(len(stratum)), Scored("toy", "sha256:toy", items), head=head,
        heads=tuple((0, i) for i in range(heads)) if heads > 1 else ((None, None),), **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gain", "items", "outcome", "words"),
    [
        ((0.3,) * 4, "rows", "gain", "Use mine@2: NLL 2."),
        ((0, 0, 0.3, 0.3), "rows", "gain", "Use mine@2, which gains for long inputs, from 256 ite"),
        ((0, 0, 0, 0.3), "rows", "gain", "Use mine@2, which gains at 1,024 items: NLL "),
        ((0, 0.3, 0.3, -0.3), "rows", "gain", "Use mine@2 only from 64 to 256 items: NLL "),
        ((0.3, 0, 0.3, 0), "rows", "gain", "Use mine@2, which gains at 16 and at 256 items: "),
        ((0,) * 4, "rows", "no difference", "Keep the baseline: mine@2 makes no significant"),
        ((-0.3,) * 4, "rows", "loss", "Keep the baseline: mine@2 is significantly worse: NLL "),
        ((0, 0, 0, -0.3), "rows", "loss", "Keep the baseline: mine@2 is significantly worse"),
        ((0.2,) * 4, "sets", "gain", "Use mine@2: accuracy "),
        ((0, 0, 0, 0.4), "sets", "gain", "Use mine@2, which gains at 1,024 items: accuracy "),
        ((-0.2,) * 4, "sets", "loss", "Keep the baseline"),
    ],
)
def test_the_verdict_says_what_the_numbers_say(gain, items, outcome, words):
    found = made({"own": gain}, items)
    assert judge(found, "own").outcome == outcome
    said = sentence(found, "own", "mine@2")
    assert said.startswith(words)
    factor, digits, measure = (100, 1, RIGHT) if items == "sets" else (-1, 3, LOG_P)
    before, after = (factor * found.mean(rule, measure).mean for rule in ("plain", "own"))
    assert f"{before:.{digits}f} -> {after:.{digits}f}" in said
    whole = found.gain("own", measure)
    assert f"({whole.shown(f'+.{digits}f', factor)}" in said
    assert f"on 800 {items} of toy" in said


def test_a_rule_that_gains_on_the_whole_is_used_but_not_where_it_loses():
    strata = tuple(Stratum(2**i) for i in range(1, 13))
    found = made({"own": (0.008,) * 11 + (-0.03,)}, strata=strata)
    assert judge(found, "own") == ("gain", LOG_P, [], [4096])
    assert sentence(found, "own").startswith("Use fitted rule, but not at 4,096 items: ")


def test_few_items_tell_nothing(capsys):
    few = made({"own": (1.0,) * 4}, count=1)
    said = sentence(few, "own")
    assert said.startswith("Unknown: 4 rows are too few to judge fitted rule: NLL ")
    assert "error unknown" in said
    show(ScoresRecord(few), verbose=True)
    assert "nan" not in capsys.readouterr().out
    assert as_json(ScoresRecord(few))["all"]["rules"]["own"][LOG_P]["gain_error"] is None
    groups = replace(made({"own": (1.0,) * 4}, count=9), group=np.zeros(36, int))
    assert "36 rows of 1 groups are too few" in sentence(groups, "own")


def test_noise_at_many_sizes_is_no_gain():
    """20 of 400 sizes would be beyond chance one by one."""
    strata = tuple(map(Stratum, range(2, 402)))
    verdict = judge(made({"own": (0.0,) * 400}, count=20, strata=strata), "own")
    assert (verdict.better, verdict.worse) == ([], [])


def test_heads_are_corrected_for_their_number():
    gains = [0.5, 0.5, -0.5, *[0.0] * 37]
    found = made({"own": [gains] * 4}, count=800, heads=40)
    assert heads_moved(found, "own") == (2, 1, 37)
    told = "Of 40 heads with a rule, 2 gain and 1 loses significantly (false discovery rate"
    assert told in " ".join(sentences(found, "own"))
    fit = replace(calibrate.identity(), entries=(Entry((0.0,) * 5, (0, 1), 0, 0),))
    named = " ".join(sentences(replace(found, fits={"own": fit}), "own"))
    assert "Of 1 head with a rule, 1 gains and 0 lose significantly" in named
    assert "; 39 without a rule are unchanged." in named


def test_simpler_rules_that_do_as_well_and_all_that_do_better_are_named():
    rules = {"own": 0.3, "constant": 0.3, "paper": 0.1, "polynomial": 0.3, "log-n": 0.4}
    said = sentences(made({name: (gain,) * 4 for name, gain in rules.items()}), "own")
    assert said[1].startswith("Log n / log 16 (+0.1")
    level = "constant (maximum likelihood) is not significantly worse."
    assert said[1].endswith(f" nats) is significantly better, and {level}")
    assert len(sentences(made({"own": (0.3,) * 4, "paper": (0.1,) * 4}), "own")) == 1


def fitted_at(kind, up_to=None, **options):
    """A fit of constants, or one of log n, whose file says so."""
    rule = calibrate.load("max-retrieval").rule if kind == "log-size" else calibrate.identity().rule
    entry = Entry((0.3, 1.0), (0, 5)) if kind == "log-size" else Entry((0, 0, 0, 0, 2.71), (0, 5))
    rule = rule._replace(min_entropy=0.0, max_beta=64.0)
    given = options | ({"trained_up_to": up_to} if up_to else {})
    return replace(calibrate.identity(), rule=rule, entries=(entry,), source={"options": given})


def test_a_constant_that_does_as_well_as_a_richer_rule_comes_with_its_line():
    rules = {"own": fitted_at("log-size"), "constant": fitted_at("constant")}
    found = made({"own": (0.3,) * 4, "constant": (0.3,) * 4}, fits=rules)
    first, last = sentences(found, "own", "mine@1")
    assert first.startswith("Use mine@1 (log-size (kappa log n + b)): ")
    assert last == (
        "Constant (maximum likelihood) (`query = 2.71 * query`) is not significantly worse."
    )
    assert "(constant, beta = 2.71, theta = 0.369)" in sentence(found, "constant")


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((-0.004, -0.003, 0.3, 0.3), r"<= 64\): -0.00.* nats .* \(tolerance 0.005\)"),
        ((0.03, -0.03, 0.3, 0.3), r"= 64\): -0.0[23].* \(exceeds the tolerance of 0.005\)"),
    ],
)
def test_what_a_fit_loses_where_it_was_trained_stands_beside_the_verdict(gains, said):
    found = made({"own": gains}, count=4_000, fits={"own": fitted_at("constant", 64)})
    assert re.match(rf"In distribution \(n {said}", sentences(found, "own")[1])
    (held,) = as_json(ScoresRecord(found))["verdicts"]["own"]["held"]
    assert (held["gain"]["mean"] < -0.005) == ("exceeds" in said)
    assert (held["allowed"], held["unit"]) == (0.005, "nats of log-likelihood")


@pytest.mark.parametrize("up_to", ["16", True, -1, 3, None])
def test_a_file_without_trained_sizes_among_the_items_promises_nothing(up_to):
    found = made({"own": (0.3,) * 4}, fits={"own": fitted_at("constant", up_to)})
    assert len(sentences(found, "own")) == 1


def test_rows_of_a_single_head_say_that_the_model_was_not_judged():
    found = replace(made({"own": (0.3,) * 4}), heads=((3, 1),))
    assert sentences(found, "own")[1] == f"{NOT_JUDGED}."


def test_where_hard_attention_is_right_more_often_a_sentence_says_why():
    found = made({"own": (0.2,) * 4, "hard": (0.4,) * 4}, "sets")
    assert sentences(found, "own")[1].endswith(f" points) is significantly better; {WHY_HARD}.")
    (table, *_) = ScoresRecord(found).tables()
    assert {column for _, column in table.bold} == {2}  # never hard attention


def test_accuracy_that_costs_log_likelihood_is_a_warning_with_the_q_that_does_not(toy_head):
    """Beta = 30 is as accurate, and too confident; of the smaller q that are not, the largest."""
    toy_head.correct = lambda batch, weights: (
        np.asarray(weights)[np.arange(len(weights)), batch.target] > 0.5
    )
    betas = {"own": (30.0, 0.8), "q = 0.5": (28.0, 0.5), "q = 0.25": (4.0, 0.25)}
    rules = {name: replace(one_constant(b), quality={"q": q}) for name, (b, q) in betas.items()}
    found = score_head(toy_head, [16, 64], 400, 0, rules)
    first, warning, *_ = sentences(found, "own")
    nll, ece = (re.search(rf"{word} ([\d.]+) -> ([\d.]+)", first) for word in ("NLL", "ECE"))
    before, after = (-found.mean(rule, LOG_P).mean for rule in ("plain", "own"))
    assert (float(nll[1]), float(nll[2])) == pytest.approx((before, after), abs=6e-4)
    errors = [100 * found.reliability(rule).error for rule in ("plain", "own")]
    assert [float(ece[1]), float(ece[2])] == pytest.approx(errors, abs=0.06)
    assert re.match(
        r"Warning: the NLL is significantly worse than the baseline's \(\+.* nats at n = 16 and \+",
        warning,
    )
    accuracy = 100 * found.mean("q = 0.25", RIGHT).mean
    assert warning.endswith(f"; with q = 0.25 it is not (accuracy {accuracy:.1f} %).")
    assert nll_warning(found, "q = 0.25") == ""
    others = replace(found, fits={"own": rules["own"]})
    assert nll_warning(others, "own").endswith(" nats at n = 64).")


def test_where_no_rule_changes_the_accuracy_of_a_head_the_nll_decides(toy_head):
    """Its `correct` asks for the highest weight, which is the same for every beta."""
    rules = {"own": one_constant(2.0), "hard": hard_attention()}
    found = score_head(toy_head, [16, 64], 400, 0, rules)
    assert main_measure(found) == LOG_P
    first, note, *_ = sentences(found, "own")
    assert first.startswith("Use fitted rule (constant, beta = 2, theta = 0.5)")
    assert note == "No rule changes this head's accuracy (`correct`), so the NLL decides."
    ranked = [row[1] for row in ScoresRecord(found, ("own",)).ranking().rows]
    assert ranked == ["fitted rule", "baseline"]


def test_rows_that_made_the_fit_are_said_to_be(by_size):
    fit = replace(by_size, source={"fingerprint": "sha256:toy"})
    said = sentence(made({"own": (0.2,) * 4}, fits={"own": fit}), "own")
    assert "rows of toy (those it was fitted to)" in said


CELLS = (Stratum(64, "list"), Stratum(128, "list"), Stratum(64, "towns"),
         Stratum(128, "book", protected=True))  # fmt: skip


def test_a_size_whose_gain_nobody_notices_is_not_named():
    """By little noise a gain of 0.002 nats is beyond chance, and 0.3 with much is not alone."""
    found = made({"own": (0.002, 0.3, 0.3, 0.3)}, count=4000)
    verdict = judge(found, "own")
    assert verdict.better == [64, 256, 1024]
    assert sentence(found, "own").startswith(
        "Use fitted rule, which gains for long inputs, from 64 "
    )


def test_protected_text_has_a_sentence_of_its_own():
    found = made({"own": (0.3, 0.3, 0.3, -0.05)}, "answers", strata=CELLS)
    first, last = sentences(found, "own")
    assert re.match("Use fitted rule: NLL .*, exact match .* on 600 answers", first)
    assert re.fullmatch(
        r"Retention text \(NLL \+0.05.. ± 0.00.. nats\): 0.02.. ± 0.0... nats per token of KL "
        "divergence from the baseline.", last,
    )  # fmt: skip


def test_templates_that_a_fit_has_not_seen_decide():
    strata = tuple(s._replace(unseen=s.template == "towns") for s in CELLS)
    found = made({"own": (0.3, 0.3, -0.4, 0)}, "answers", strata=strata)
    first, seen, _ = sentences(found, "own")
    assert first.startswith("Keep the baseline: fitted rule is significantly worse: NLL ")
    assert first.endswith(" on 200 answers of toy in 1 held-out prompt template.")
    assert seen.startswith(
        "In the 1 prompt template of the calibration split, on 400 new answers: NLL "
    )
    log_p, right, *_ = ScoresRecord(found).tables()
    assert [(row[0], row[-1]) for row in log_p.rows] == [
        ("64", "200"), ("calibration templates", "400"), ("retention text", "200")
    ]  # fmt: skip
    assert len(right.rows) == 2


def test_what_a_fit_of_a_model_may_lose_is_in_its_file_and_a_token():
    fit = fitted_at("constant", 128, through="model", allowed_loss=0.01)
    gains, tokens = (-0.03, -0.03, -0.03, -0.5), np.repeat([4, 4, 4, 1], 200)
    found = made({"own": gains}, "answers", strata=CELLS, fits={"own": fit}, tokens=tokens)
    text, answers = as_json(ScoresRecord(found))["verdicts"]["own"]["held"]
    assert text["gain"]["mean"] == pytest.approx(-0.025, abs=0.003)  # of KL
    assert -0.01 < answers["gain"]["mean"] < -0.005  # more than others may lose
    assert (text["allowed"], answers["allowed"]) == (0.01, 0.01)
    assert [promise.passed for promise in check_margins(found, "own")] == [False, True]
    bounds = {"allowed_loss": 0.04, "tolerance": 0.002}
    both = replace(found, fits={"own": fitted_at("constant", 128, through="model", **bounds)})
    assert [promise.allowed for promise in check_margins(both, "own")] == [0.04, 0.002]
    assert [promise.passed for promise in check_margins(both, "own")] == [True, False]
    of_rows = replace(found, fits={"own": fitted_at("constant", 128)})  # 128 items, not tokens
    assert not any("in distribution" in text.lower() for text in sentences(of_rows, "own"))


@pytest.mark.parametrize("items", ["rows", "sets", "answers"])
def test_tables_json_and_csv_say_the_same(items, capsys):
    gains = {"paper": (0.1,) * 4, "own": (0.3, 0.2, 0.1, 0.1), "hard": (0.4,) * 4, "a": (0,) * 4}
    strata = CELLS if items == "answers" else BY_SIZE
    record = ScoresRecord(made(gains, items, strata=strata), own="mine@2")
    assert record.rules == ["plain", "own", "paper", "hard", "a"]
    (first, second, *_) = record.tables()
    names = ["mine@2", "the paper's published\npolynomial", "argmax", "a"]
    if items != "sets":
        names.remove("argmax")  # its NLL is infinite
    shown = 3 if items == "sets" else 2  # at once, so that lines are short
    assert first.columns[1:-1] == ["baseline", *names[:shown]]
    assert (second.columns[1:-1], second.detail) == (["baseline", *names[shown:]], True)
    assert max(map(len, as_text(first).splitlines())) < 100
    data, measure = as_json(record), RIGHT if items == "sets" else LOG_P
    factor, digits = (100, 1) if items == "sets" else (-1, 3)
    sizes = {f"{size['size']:,}": size for size in data["sizes"]} | {"all": data["all"]}
    for row in first.rows[: len(sizes)]:
        found = sizes[row[0]]["rules"]
        assert row[-1] == f"{sizes[row[0]]['items']:,}"
        plain, own = (found[rule][measure] for rule in ("plain", "own"))
        mean, error = factor * plain["mean"], abs(factor) * plain["error"]
        assert row[1] == f"{mean:.{digits}f} ± {error:.{digits}f}"
        mean, gain, error = factor * own["mean"], factor * own["gain"], own["gain_error"]
        shown = f"{gain:+.{digits}f} ± {abs(factor) * error:.{digits}f}"
        assert row[2].removeprefix("* ") == f"{mean:.{digits}f} ({shown})"
    marked = {(i, j) for i, row in enumerate(first.rows) for j in (1, 2, 3) if row[j][0] == "*"}
    assert (0, 2) in marked == first.bold  # in text as well; argmax is no rule to use
    assert "* marks the best rule" in first.note
    assert [row[0] for row in first.rows[len(sizes) :]] == ["retention text"] * (items == "answers")
    assert (data["text"] is None) == (items != "answers")
    show(record)
    short = capsys.readouterr().out
    show(record, verbose=True)
    assert len(short) < len(capsys.readouterr().out)
    assert "\n".join(record.verdict_sentences()["own"]) in short
    assert data["verdicts"]["own"]["text"] in short.replace("\n", " ")


def test_heads_are_ranked_and_those_without_a_rule_are_unchanged(by_size):
    entries = tuple(replace(by_size.only, layer=0, head=i) for i in (0, 2))
    fit = replace(by_size, entries=entries)
    found = made({"own": [[0.1, 0.0, 0.3]] * 4}, heads=3, fits={"own": fit})
    record = ScoresRecord(found, own="lines@1")
    (table,) = (table for table in record.tables() if table.columns[0] == "head")
    assert [row[0] for row in table.rows] == [f"layer 0, head {i}" for i in (2, 0, 1)]
    assert [row[-1] for row in table.rows] == ["0.5 log n + 0.6"] * 2 + ["1"]
    assert table.rows[2][2] == "unchanged"
    assert [(x["layer"], x["head"]) for x in as_json(record)["heads"]] == [(0, 2), (0, 0), (0, 1)]
    head = as_json(record)["heads"][0]
    assert head["rules"]["own"][LOG_P]["gain"] == pytest.approx(0.3, abs=0.02)
    assert [size["size"] for size in head["sizes"]] == list(SIZES)
