"""The study of deployed heads: its tables, its rules, and their scores on rows made here."""

import json

import numpy as np
import pytest
from deployed_heads import accepted_answers, evaluate
from deployed_matches import MatchedPair, Matches, choose_threshold, match_record, write_pairs
from deployed_rows import HeadRows, Row
from deployed_rules import ETS, Ets, bootstrap, fit_all, record_of_rules, rules_of, score
from deployed_tables import auroc_error, signed
from scipy.special import log_softmax
from study_pages import page_of, record_of

import calibrate
from calibrate.evidence.baselines import one_constant

PLANTED = Ets((0.5, 1.2))


def test_the_page_has_the_numbers_of_the_record_that_no_table_has():
    record, page = record_of("deployed-heads"), " ".join(page_of("deployed-heads").split())

    def gained(part, pair, sign=1):
        mean, *bounds = (sign * x for x in part["improvement"][pair])
        return f"{mean:.3f} ({min(bounds):.3f} to {max(bounds):.3f})"

    rxnmapper = record["heads"]["rxnmapper"]
    assert gained(record["kept"]["minilm"], "paper over baseline", -1) in page
    slope, _ = rxnmapper["fits"]["log-size"]["coefficients"]
    assert f"kappa = {slope:.2f}" in page
    polynomial = rxnmapper["fits"]["polynomial"]
    last = polynomial["domain"][1]
    beta = np.polyval(polynomial["coefficients"], last)
    assert f"falls to {beta:.1f} at {last:.2f} nats" in page
    for head in ("lighterglue", "lightglue-disk"):
        matches = record["heads"][head]["user"]
        shown = [
            f"precision {100 * of['precision']:.1f}, recall {100 * of['recall']:.1f} %"
            for of in (matches["constant"]["chosen"], matches["baseline"]["library"])
        ]
        assert f"({' against '.join(shown)})" in page
    for head in record["heads"].values():
        ece = {rule: of["ece"] for rule, of in head["test"]["rules"].items()}
        others = ("log-size", "entropy-and-size", ETS)
        assert max(abs(ece[rule] - ece["constant"]) for rule in others) < 0.006


def test_a_bound_below_0_keeps_its_sign():
    assert [signed(x) for x in (-0.0003194, 0.0004, -0.00002, 0.0, -0.0016, 1.8)] == [
        "-0.0003", "+0.0004", "0.0000", "0.0000", "-0.002", "+1.800",
    ]  # fmt: skip


def test_the_error_of_an_auroc_is_that_of_exponential_scores():
    """30 right and 8 wrong answers, whose scores are exponential, in 4,000 studies."""
    rng = np.random.default_rng(0)
    right, wrong = 3 * rng.exponential(size=(4_000, 30, 1)), rng.exponential(size=(4_000, 1, 8))
    aurocs = (right > wrong).mean(axis=(1, 2))
    assert aurocs.mean() == pytest.approx(0.75, abs=0.01)
    assert auroc_error(0.75, 30, 8) == pytest.approx(aurocs.std(), rel=0.05)


def entropy_of(z):
    log_p = log_softmax(z)
    return -np.exp(log_p) @ log_p


def rows_of(logits, targets, groups):
    """Rows of different lengths; n is the length, a cluster is a group, and all are of split 0."""
    about = {"clusters": [f"cluster {i}" for i in range(max(groups) + 1)]}
    rows = [
        Row(np.asarray(z), np.arange(len(z)) == target, len(z), group, group)
        for z, target, group in zip(logits, targets, groups, strict=True)
    ]
    return HeadRows.of(rows, np.zeros(max(groups) + 1, int), about)


@pytest.fixture(scope="module")
def rows():
    """2,000 rows in 50 groups, whose targets are drawn at the temperature of PLANTED."""
    rng = np.random.default_rng(0)
    logits, targets = [], []
    for _ in range(2_000):
        z = 3 * rng.standard_normal(rng.integers(5, 60))
        H, log_n = np.array([entropy_of(z)]), np.log([len(z)])
        beta = PLANTED.beta_at(H, log_n)[0]
        logits.append(z)
        targets.append(rng.choice(len(z), p=np.exp(log_softmax(beta * z))))
    return rows_of(logits, targets, np.arange(2_000) // 40)


@pytest.fixture(scope="module")
def calibration(rows):
    return fit_all(rows, "made")


def test_ets_finds_the_planted_numbers(calibration):
    """Within some 3 standard errors, which bootstraps of these rows give as 0.06 and 0.1."""
    assert calibration.rules[ETS].coefficients == pytest.approx(PLANTED.coefficients, abs=0.3)


def test_no_ets_nearby_has_a_higher_likelihood(rows, calibration):
    a, b = calibration.rules[ETS].coefficients
    near = [(a + x, b + y) for x, y in ((0, 0), (0.02, 0), (-0.02, 0), (0, 0.02), (0, -0.02))]
    rules = {str(i): Ets(pair) for i, pair in enumerate(near)}
    log_p = score(rows, rules).log_p
    best, *others = (log_p[name].mean() for name in rules)
    assert all(best > other for other in others)


def test_every_rule_is_fitted_and_gains_on_its_own_rows(rows, calibration):
    found = evaluate(rows, calibration.rules)
    assert set(found["rules"]) == {"baseline", *calibration.rules}
    assert all(found["improvement"][f"{rule} over baseline"][1] > 0 for rule in ("constant", ETS))
    assert calibration.refusal == ""


def test_scores_are_those_of_a_softmax(rows):
    found = score(rows, {"constant": one_constant(1.7)})
    starts = np.cumsum(rows.lengths) - rows.lengths
    for i in (0, 7, 1_999):
        item = slice(starts[i], starts[i] + rows.lengths[i])
        log_p = log_softmax(1.7 * rows.logits[item].astype(float))
        right = rows.right[item]
        assert found.log_p["constant"][i] == pytest.approx(log_p[right][0], abs=1e-4)
        assert found.confidence["constant"][i] == pytest.approx(np.exp(log_p.max()), abs=1e-4)
        assert found.right_on_top[i] == right[log_p.argmax()]


def test_rules_of_a_record_are_the_fitted_ones(rows, calibration):
    again = rules_of(json.loads(json.dumps(record_of_rules(calibration.rules))))
    first, second = (score(rows, rules).log_p for rules in (calibration.rules, again))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_rows_are_read_as_they_were_written_with_the_split_of_their_cluster(here):
    one, two = Row(np.array([1.0, 2]), np.array([False, True]), 2, 4, 2), np.array([True] * 3)
    rows = [one, Row(np.array([3.0, 4, 5]), two, 64, 5, 0)]
    HeadRows.of(rows, np.array([0, 1, 2], np.int8), {"clusters": ["a"]}).write(here)
    read = HeadRows.read(here)
    assert (read.logits.tolist(), read.right.tolist()) == ([1, 2, 3, 4, 5], [False] + 4 * [True])
    of_first = read.of_split(2)
    assert (of_first.logits.tolist(), of_first.n.tolist()) == ([1, 2], [2])
    assert (of_first.group.tolist(), of_first.cluster.tolist()) == ([4], [2])
    assert read.about == {"clusters": ["a"]}


def test_the_bootstrap_draws_groups_and_not_rows():
    """The interval of 40 equal rows a group is that of the groups."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(100)
    mean, low, high = bootstrap(np.repeat(values, 40), np.repeat(np.arange(100), 40))
    assert mean == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 10, rel=0.1)


@pytest.mark.parametrize(
    ("score_of_each", "right", "precision", "threshold"),
    [
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1], 0.75, 0.6),
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 0], 0.75, 0.8),
        ([0.9, 0.8, 0.8, 0.6], [1, 1, 0, 0], 0.9, 0.9),  # equal scores are accepted together
        ([0.9, 0.8], [0, 1], 0.9, 0.8),  # nothing is that precise: the most precise
    ],
)
def test_the_lowest_threshold_of_a_precision_is_chosen(score_of_each, right, precision, threshold):
    assert choose_threshold(np.array(score_of_each), np.array(right), precision) == threshold


def test_precision_and_recall_of_matches():
    matches = Matches(
        np.array([0.9, 0.5, 0.2, 0.05]), np.array([True, False, True, True]),
        np.array([0, 0, 1, 1]), {0: 2, 1: 3},
    )  # fmt: skip
    assert matches.counts(0.1) == {"accepted": 3, "precision": 2 / 3, "recall": 2 / 5}
    assert matches.counts(0.1, image=1) == {"accepted": 1, "precision": 1, "recall": 1 / 3}
    assert matches.counts(1.0) == {"accepted": 0, "precision": 0, "recall": 0}


def pair_of(split, shift=0.0):
    """Two keypoints in each image, matched right; the second similarity is lower by `shift`."""
    similarity = np.array([[4.0, 0.0], [0.0, 4.0 - shift]], np.float32)
    places = np.array([[0.0, 0.0], [50.0, 50.0]], np.float32)
    matchable = np.full(2, 10, np.float32)
    return MatchedPair(similarity, matchable, matchable, places, places, split, split, 2)


def test_the_threshold_is_chosen_on_calibration_pairs(tmp_path):
    """All matches are right, so the lowest score of the calibration pair is the threshold."""
    write_pairs(tmp_path / "pairs.npz", [pair_of(0, shift=3.0), pair_of(1, shift=3.5)])
    found = match_record(tmp_path, {"constant": one_constant(2.0)}, ["a", "b"])
    q = 1 / (1 + np.exp(-2.0))
    assert found["constant"]["threshold"] == pytest.approx(q * q, abs=1e-3)
    assert found["constant"]["chosen"]["recall"] == 0.5
    assert found["baseline"]["library"] == {"accepted": 2, "precision": 1, "recall": 1}
    assert set(found["constant"]["images"]) == {"b"}


def test_answers_are_accepted_by_their_confidence():
    rows = rows_of([[3.0, 0.0], [0.1, 0.0], [0.0, 3.0]], [0, 0, 0], np.arange(3))
    found = accepted_answers(rows, {})["baseline"]
    assert found == {"accepted": 1.0, "precision": pytest.approx(2 / 3)}


@pytest.mark.parametrize("head", ["rxnmapper", "chython-rxnmap"])
def test_the_shipped_fit_is_the_constant_of_the_record(head):
    record = record_of("deployed-heads")["heads"][head]
    fit = calibrate.load(head)
    assert fit.rule.kind == "constant"
    assert fit.coefficients == pytest.approx(record["fits"]["constant"]["coefficients"], rel=1e-6)
