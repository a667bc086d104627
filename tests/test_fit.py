"""Fits of a head: what is saved and what is refused, the verdict, and the evidence of the file."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import ToyHead
from planted import planted_rows, weighted_and_repeated
from reference import entropy
from scipy.special import log_softmax

import calibrate
from calibrate.core.rule import KINDS
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.estimate import MIN_GAIN
from calibrate.fitting.fit_collection import fit_collection, fit_head, fit_solved
from calibrate.fitting.fit_rule import N_FOLDS, deal_folds, fit_rule
from calibrate.fitting.head_fit import find_refusal, kinds_sentence
from calibrate.fitting.held_out import score_held_out
from calibrate.fitting.least_squares import r_squared_of_log_beta
from calibrate.fitting.options import FitOptions
from calibrate.rows.solve import concatenate_solved, solve_collection, solve_rows
from calibrate.store.fit import dumps
from calibrate.store.loading import loads
from calibrate.store.saving import save_to_store

OPTIONS = FitOptions().resolved()
SIZES = [16, 64, 256]


@pytest.fixture(scope="module")
def collection():
    return calibrate.collect(ToyHead(noise=0.2), SIZES, 400)


@pytest.fixture(scope="module")
def result(collection):
    return fit_collection(collection, "toy")


def rising(H, n):
    return 0.5 + 1.2 * H


def head_of(rows, procedures=("constant", "polynomial"), **options):
    return fit_head(rows, FitOptions(**options).resolved(), procedures=procedures)


def refusal_of(head, options=OPTIONS):
    gain = head.gain(options.procedure)
    return find_refusal(head, options, bool(gain.significant))


def test_the_default_is_a_polynomial_of_all_inputs(result, collection):
    fit = result.fit
    assert fit.rule.kind == "polynomial"
    assert len(fit.coefficients) == 5
    assert 1 <= fit.effective_degrees <= 5
    options = fit.source["options"]
    assert (options["kind"], options["loss"], options["min_entropy"]) == (
        "polynomial",
        "likelihood",
        0,
    )
    inputs = fit.evidence["inputs"]
    assert inputs["seen"] == inputs["fitted"] == 1_200
    optima = [inputs[f"optimum_{x}"] for x in ("infinite", "zero", "finite")]
    assert sum(optima) == 1_200
    assert inputs["misranked"] == sum(size["misranked"] for size in collection.manifest["sizes"])


def test_the_evidence_is_of_held_out_rows(result):
    """Its means are those of rows, by n and by kind, and add up."""
    evidence = result.fit.evidence
    assert [record["n"] for record in evidence["held_out"]] == SIZES
    kinds = {record["kind"]: record for record in evidence["kinds"]}
    assert list(kinds) == ["baseline", *KINDS, "least-squares"]
    after = [record["nll_after"] for record in evidence["held_out"]]
    before = [record["nll_before"] for record in evidence["held_out"]]
    assert np.mean(after) == pytest.approx(kinds["polynomial"]["nll"])
    assert np.mean(before) == pytest.approx(kinds["baseline"]["nll"])
    (head,) = evidence["heads"]
    assert head["gain"] == pytest.approx(kinds["baseline"]["nll"] - kinds["polynomial"]["nll"])
    assert head["gain"] == pytest.approx(kinds["polynomial"]["gain"])
    for record in kinds.values():
        over_fit = kinds["polynomial"]["nll"] - record["nll"]
        assert record["gain_over_fit"] == pytest.approx(over_fit, abs=1e-12)
    assert kinds["baseline"]["se_over_fit"] == pytest.approx(head["se"])  # paired
    assert kinds["polynomial"]["se_over_fit"] == 0
    assert kinds["log-size"]["se_over_fit"] < kinds["log-size"]["se"] / 2
    at_beta_1 = -result.solved.log_p(1.0).mean()
    assert kinds["baseline"]["nll"] == pytest.approx(at_beta_1)
    assert f"{kinds['polynomial']['nll']:.3f}" in result.fit.verdict


def test_held_out_scores_are_of_rules_that_have_not_seen_the_rows():
    """Each row has the log p of the rule that is fitted to the other folds alone."""
    rows = planted_rows(rising, sizes=(8, 16), count=150)
    held_out = score_held_out(rows, KINDS, OPTIONS)
    fold = deal_folds(rows)
    for i in range(N_FOLDS):
        train, test = rows.take(fold != i), rows.take(fold == i)
        for kind in KINDS:
            log_p = test.log_p(fit_rule(train, kind, OPTIONS).beta(test))
            np.testing.assert_allclose(held_out.log_p[kind][fold == i], log_p, rtol=1e-6)


def test_a_fit_is_a_file_that_loads(result, tmp_path):
    fit = result.fit
    saved, _ = save_to_store(fit, tmp_path)
    loaded = calibrate.load("toy", tmp_path)
    assert loaded == saved == fit
    assert loaded.verdict == fit.verdict
    assert json.dumps(loaded.evidence) == json.dumps(fit.evidence)
    again = fit_collection(calibrate.collect(ToyHead(noise=0.2), SIZES, 400), "toy").fit
    text, other = (dumps(x).replace(x.provenance["created"], "") for x in (fit, again))
    assert text == other
    assert save_to_store(again, tmp_path) == (saved, False)
    assert loads(dumps(fit).encode()) == fit


def test_r_squared_is_of_log_beta_of_misranked_inputs(result):
    rows, fit = result.solved, result.fit
    used = rows.take(rows.misranked & np.isfinite(rows.beta) & (rows.beta > 0))
    beta = fit.only.beta_at(used.entropy, np.log(used.n), fit.rule)
    residual = np.var(np.log(used.beta) - np.log(beta))
    assert fit.r_squared == pytest.approx(1 - residual / np.var(np.log(used.beta)), rel=1e-9)


def test_weights_count_in_every_number():
    """Rows of weight 0 count for nothing, in the coefficients, the R^2 and the verdict."""
    rows = planted_rows(rising, count=300)
    chosen = np.arange(len(rows.beta)) % 2 == 0
    one = head_of(rows._replace(weight=chosen.astype(float)))
    two = head_of(rows.take(chosen))
    assert one.rule.coefficients == two.rule.coefficients
    assert one.r_squared == two.r_squared
    half, whole = head_of(rows._replace(weight=np.where(chosen, 1.0, 0.5))), head_of(rows)
    assert half.r_squared != whole.r_squared
    assert half.misranked != whole.misranked


def test_nothing_is_saved_where_softmax_is_right_as_it_is():
    rows = planted_rows(lambda H, n: 1.0 + 0 * H, count=300)
    head = head_of(rows)
    gain = head.gain("polynomial")
    assert not (gain.significant and gain.mean >= MIN_GAIN)
    assert refusal_of(head)
    for kind in KINDS:  # one that is named is saved
        named = FitOptions(kind).resolved()
        assert not refusal_of(fit_head(rows, named, procedures=[kind]), named)


def test_a_rule_that_gains_is_saved():
    assert not refusal_of(head_of(planted_rows(rising, count=300)))


def test_logits_that_tell_nothing_are_refused_for_every_kind():
    rng = np.random.default_rng(0)
    z, target = rng.normal(size=(400, 8)).astype(np.float32), rng.integers(0, 8, 400)
    with pytest.raises(QualityError):
        calibrate.fit(z, target, group=np.arange(400) % 15, kind="constant")
    with pytest.raises(QualityError):
        calibrate.fit(np.zeros((400, 8)), target, group=np.arange(400) % 15, kind="constant")
    rows = solve_rows(z, target, entropy(z), 8)
    for kind in KINDS:
        assert refusal_of(head_of(rows, [kind], kind=kind), FitOptions(kind).resolved())


def test_a_loss_at_trained_sizes_is_refused_of_the_default_alone():
    """Small sets are as they should be, large ones need more beta."""
    small = planted_rows(lambda H, n: 1.0 + 0 * H, sizes=(16,), count=900)
    large = planted_rows(lambda H, n: 4.0 + 0 * H, sizes=(64,), count=900)
    rows = concatenate_solved([small, large])
    options = FitOptions(trained_up_to=16).resolved()
    head = fit_head(rows, options, procedures=["polynomial"])
    assert -head.held_out.gain("polynomial", some=rows.size == 16).mean > options.tolerance
    assert refusal_of(head, options)
    assert not refusal_of(head, replace(options, tolerance=1.0))
    assert not refusal_of(head, replace(options, trained_up_to=None))
    named = replace(options, kind="polynomial")
    assert not refusal_of(head, named)


def test_the_trained_size_is_the_collections_unless_it_is_given():
    collection = calibrate.collect("max-retrieval", [16, 64], 200)
    fit = fit_collection(collection, "a", FitOptions("constant")).fit
    assert fit.source["options"]["trained_up_to"] == 16
    assert "n <= 16" in fit.verdict
    other = fit_collection(collection, "a", FitOptions("constant", trained_up_to=64)).fit
    assert other.source["options"]["trained_up_to"] == 64


def test_few_inputs_or_groups_are_refused_with_their_number():
    rows = planted_rows(rising, sizes=(16,), count=99)
    with pytest.raises(QualityError, match=r"^99 .*100"):
        head_of(rows)
    rows = planted_rows(rising, sizes=(16,), count=200)
    with pytest.raises(QualityError, match=r"\b9 groups.*10"):
        head_of(rows._replace(group=np.arange(200) % 9))
    assert head_of(rows._replace(group=np.arange(200) % 10)).rule.penalty == float("inf")
    with pytest.raises(QualityError):
        head_of(rows._replace(weight=np.zeros(200)))


def test_the_verdict_says_that_every_target_is_on_top():
    z = np.random.default_rng(0).normal(size=(400, 8))
    fit = calibrate.fit(z, z.argmax(axis=1))
    assert "targets made from the same logits" in fit.verdict
    assert fit.evidence["heads"][0]["penalty"] == "infinite"


@pytest.mark.parametrize(("scale", "bound"), [(1e-3, "max"), (4e3, "min")])
def test_a_bound_that_is_reached_is_named_with_its_remedy(scale, bound):
    rng, group = np.random.default_rng(0), np.arange(1_000) % 15
    z = rng.normal(size=(1_000, 8)) / 3
    target = (3 * z + rng.gumbel(size=z.shape)).argmax(axis=1)
    fit = calibrate.fit(scale * z, target, group=group, kind="constant")
    assert "by 64" in fit.verdict
    assert fit.evidence["heads"][0]["at_bound"] == bound
    again = calibrate.fit(z, target, group=group, kind="constant")
    assert again.evidence["heads"][0]["at_bound"] == ""
    assert again.coefficients[0] == pytest.approx(3, rel=0.15)


@pytest.mark.slow
def test_the_sentence_on_kinds_names_a_better_one_or_a_constant_as_good():
    by_size = head_of(planted_rows(lambda H, n: 0.2 + 0.6 * np.log(n) + 0 * H, count=1_500,
                                   scale=(0.5, 0.9)), KINDS, kind="constant")  # fmt: skip
    better = {k: by_size.held_out.gain(k, over="constant") for k in KINDS if k != "constant"}
    best = max(better, key=lambda kind: better[kind].mean)
    assert better[best].significant
    assert f"--kind {best}`" in kinds_sentence(by_size.held_out, "constant", 2.0)
    alike = head_of(planted_rows(lambda H, n: 2.0 + 0 * H, count=400))
    assert "--kind constant`" in kinds_sentence(alike.held_out, "polynomial", alike.constant)
    assert f"beta = {alike.constant:.3g}" in kinds_sentence(
        alike.held_out, "polynomial", alike.constant
    )
    entropic = head_of(planted_rows(rising, count=1_500))
    assert entropic.held_out.gain("constant", over="polynomial").mean < -MIN_GAIN
    assert kinds_sentence(entropic.held_out, "polynomial", entropic.constant) == ""


def test_a_threshold_of_entropy_bounds_the_rows_that_are_fitted(collection):
    rows = solve_collection(collection)
    options = FitOptions("polynomial", min_entropy=1.0).resolved()
    head = fit_head(rows, options, procedures=["polynomial"])
    assert head.fitted == int((rows.entropy > 1).sum())
    assert (head.rule.beta(rows)[rows.entropy <= 1] == 1).all()
    with pytest.raises(CalibrateError):
        FitOptions("constant", min_entropy=1.0).resolved()


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "quartic"), ("loss", "huber"), ("min_entropy", -1), ("min_beta", 0),
     ("min_beta", 1.5), ("max_beta", 0.5), ("tolerance", float("nan")), ("trained_up_to", -1),
     ("seed", -1)],
)  # fmt: skip
def test_options_out_of_range_are_named(name, value):
    with pytest.raises(CalibrateError, match=name):
        FitOptions(**{name: value}).resolved()


def test_a_planted_beta_of_arrays_comes_back_whatever_the_groups():
    """The beta of a deployed head was shrunk to a quarter once, by pseudo-observations."""
    z = np.random.default_rng(0).normal(size=(1200, 12)) / 3
    target = (8 * z + np.random.default_rng(1).gumbel(size=z.shape)).argmax(axis=1)
    nll = [-log_softmax(b * z, axis=1)[np.arange(1200), target].mean() for b in (7.5, 8, 8.5)]
    assert nll[1] < max(nll[0], nll[2])
    for group in (np.repeat(np.arange(40), 30), None):
        fit = calibrate.fit(z, target, group=group, kind="constant")
        assert fit.coefficients[0] == pytest.approx(8, rel=0.08)


def test_a_rule_that_would_not_be_saved_is_returned_with_a_warning_in_python():
    head = ToyHead(noise=1.0)
    solved = calibrate.solve(calibrate.collect(head, [64], 400))
    rows = planted_rows(lambda H, n: 1.0 + 0 * H, sizes=(64,), count=400)
    with pytest.warns(UserWarning, match="gain"):
        fit = fit_solved(solved.collection, rows, "a", refuse=False).fit
    assert len(fit.coefficients) == 5
    with pytest.raises(QualityError):
        fit_solved(solved.collection, rows, "a")


@pytest.mark.slow
def test_the_shipped_fit_is_that_of_the_quickstart():
    """Of the collection that README states; another processor rounds the logits otherwise."""
    shipped = calibrate.load("max-retrieval@1")
    rows = calibrate.collect("max-retrieval", [16 << i for i in range(9)], 1_024)
    again = fit_collection(rows, "max-retrieval").fit
    assert again.rule == shipped.rule
    assert again.source["options"] == shipped.source["options"]
    H = np.linspace(0.1, 3.7, 50)
    one, two = (fit.only.beta_at(H, None, fit.rule) for fit in (again, shipped))
    np.testing.assert_allclose(one, two, rtol=5e-3)
    assert again.r_squared == pytest.approx(shipped.r_squared, abs=5e-3)


def test_r_squared_counts_rows_by_their_weight():
    rows = planted_rows(rising, count=300)
    rule = head_of(rows).rule
    weighted, repeated = weighted_and_repeated(rows)
    r_squared = [
        r_squared_of_log_beta(given, rule.beta(given)) for given in (weighted, repeated, rows)
    ]
    assert r_squared[0] == pytest.approx(r_squared[1], rel=1e-9)
    assert r_squared[0] != pytest.approx(r_squared[2], rel=1e-6)


def test_the_bound_that_most_rows_reach_is_counted_by_weight():
    rows = planted_rows(rising, count=300)
    rule = head_of(rows).rule
    beta = rule.beta(rows)
    rule = replace(rule, form=rule.form._replace(max_beta=float(np.quantile(beta, 0.7))))
    assert rule.bound_reached(rows) == ""
    heavy = rows._replace(weight=np.where(beta > rule.form.max_beta, 9.0, 1.0))
    assert rule.bound_reached(heavy) == "max"


@pytest.mark.parametrize(("factor", "is_saved"), [(1.01, True), (0.99, False)])
def test_the_default_kind_must_gain_as_much_as_a_user_would_notice(factor, is_saved):
    head = head_of(planted_rows(rising, count=300))
    log_p = dict(head.held_out.log_p)
    gain = log_p["polynomial"] - log_p["baseline"]
    log_p["polynomial"] = log_p["baseline"] + factor * MIN_GAIN / gain.mean() * gain
    head = replace(head, held_out=head.held_out._replace(log_p=log_p))
    assert (refusal_of(head) == "") == is_saved


def test_the_constant_that_tells_whether_logits_tell_something_knows_no_bounds():
    rows = planted_rows(lambda H, n: 0.2 + 0 * H, sizes=(16,), count=300)
    free, bounded = (
        score_held_out(rows, ["constant"], FitOptions("constant", min_beta=least).resolved())
        for least in (None, 1.0)
    )
    np.testing.assert_array_equal(free.unbounded, bounded.unbounded)
    assert free.nll("constant") < bounded.nll("constant")
