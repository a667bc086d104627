"""The dial of sharpness q: the score (p^q - 1) / q, and how `select_rule` selects q."""

from dataclasses import replace

import numpy as np
import pytest
from planted import NO_GAIN, planted_rows
from reference import entropy, softmax

from calibrate.core.rule_kinds import KINDS
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.evidence import PLAIN, Evidence, Scored, Stratum
from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.evidence.verdict import worse_sizes
from calibrate.fitting.cross_validate import fit_candidate
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.fit_rule import applied_beta, fit_kind
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.report.before_after import nll_warning, with_metrics
from calibrate.rows.collect import collect
from calibrate.rows.heads import load_head
from calibrate.rows.score_head import score_head
from calibrate.solver.likelihood_profile import plain_power, profile
from calibrate.solver.solved_rows import concatenate_rows, solve_rows

QS = (0.25, 0.5, 1.0)
BETAS = (1.0, 1.3, 4.7, 33.0, 64.0)


@pytest.fixture(scope="module")
def head_rows():
    """A head with one right answer, that disperses."""
    head, parts = load_head("max-retrieval-3"), []
    for n in (16, 64, 256):
        batch = head.sample(n, n, 300)
        z = np.asarray(head.attend(batch).logits, np.float32)
        parts.append(solve_rows(z, np.asarray(batch.target), entropy(z), n))
    return concatenate_rows(parts)


@pytest.mark.parametrize("q", QS)
def test_scores_and_what_plain_softmax_expects_of_them(q):
    rng = np.random.default_rng(0)
    z, target = (3 * rng.standard_normal((30, 200))).astype(np.float32), rng.integers(0, 200, 30)
    of_target, plain, mean, *_ = profile(z, target, 1.0, 64.0)
    score, expected = of_target.power(q), plain_power(plain, mean, q)
    for beta in BETAS:
        at = np.full(len(z), beta)
        p = softmax(z, beta=beta) ** q
        np.testing.assert_allclose(score.log_p(at), (p[range(30), target] - 1) / q, atol=1e-6)
        mean_score = ((softmax(z) * p).sum(axis=1) - 1) / q
        np.testing.assert_allclose(expected.log_p(at), mean_score, atol=2e-5)
        inside, h = np.clip(at, 1.01, 63.9), 1e-3
        slope = (expected.log_p(inside + h) - expected.log_p(inside - h)) / (2 * h)
        np.testing.assert_allclose(expected.derivatives(inside)[1], slope, atol=1e-5)


@pytest.mark.parametrize(
    "q", [0.5, *(pytest.param(q, marks=pytest.mark.slow) for q in (0.25, 1.0))]
)
def test_on_a_calibrated_head_the_best_constant_is_1_over_1_minus_q(q):
    rows = planted_rows(lambda H, n: np.ones_like(H), (16, 256), count=4_000)
    options = Options(q=q, prior_rows=0)
    beta = fit_kind(rows, "constant", options).only.coefficients[-1]
    if q == 1:
        assert beta > 10
    else:
        assert beta == pytest.approx(1 / (1 - q), rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sharper_the_more_often_p_and_the_less_log_p(head_rows, kind):
    def means(q):
        fit = fit_kind(head_rows, kind, Options(q=q, prior_rows=0))
        log_p = head_rows.log_p(applied_beta(fit, head_rows))
        return [head_rows.shares() @ s for s in (log_p, np.exp(log_p / 2), np.exp(log_p))]

    found = np.array([means(q) for q in (0.0, 0.5, 1.0)])
    for column, best in enumerate((0, 1, 2)):  # each is best at its own q
        assert found[:, column].argmax() == best
    assert (np.diff(found[:, 0]) < 0).all()
    assert (np.diff(found[:, 2]) > 0).all()


def planted_accuracy(best):
    """Evidence of a head that is right most often under the rule called `best`."""

    def accuracy(rules):
        asked.append(list(rules))
        shares = [0.5, *(0.9 if name == best else 0.7 for name in rules)]
        right = np.array([np.arange(100) < 100 * share for share in shares], np.float32)
        columns = np.zeros(100, int), np.full(100, -1), np.ones(100)
        return Evidence(
            (PLAIN, *rules), {RIGHT: right}, (Stratum(16),), *columns, Scored("planted")
        )

    asked = []
    accuracy.asked = asked
    return accuracy


def test_without_a_head_q_is_0_and_with_one_that_of_the_highest_accuracy(head_rows):
    alone = fit_and_select(head_rows, Options())
    assert (alone.published.q, len(alone.by_q)) == (0, 1)
    accuracy = planted_accuracy("constant, q = 0.5")
    selection = fit_and_select(head_rows, Options(), accuracy)
    tried = [c.q for c in selection.by_q]
    assert accuracy.asked == [[c.name for c in selection.by_q]]
    assert (selection.published.q, tried[:3]) == (0.5, [0, 0.25, 0.5])
    assert "fitted with q = 0.5" in selection.verdict
    assert selection.validation.mean("constant, q = 0.5", RIGHT).mean == pytest.approx(0.9)
    assert fit_and_select(head_rows, Options(q=0.25), accuracy).published.q == 0.25
    assert len(accuracy.asked) == 1


def test_the_verdict_of_a_head_has_its_metrics_and_warns_as_run_does():
    """Sets of 16 want beta = 4 and sets of 64 none: more accuracy costs log p at 64."""
    rows = planted_rows(lambda H, n: (4 if n == 16 else 1) + 0 * H, sizes=(16, 64), count=2_000)
    accuracies = planted_accuracy("none")

    def accuracy(rules):
        evidence = accuracies(rules)
        ranks = np.arange(len(rules) + 1)[:, None] * 5 + 50 > np.arange(100)
        return replace(evidence, values={RIGHT: ranks.astype(np.float32)}, fits=rules)

    selection = fit_and_select(rows, Options(kind="constant"), accuracy)
    (baseline, *_, best) = selection.validation.values[RIGHT].mean(axis=1)
    fit = replace(selection.published.coefficients, quality={"verdict": selection.verdict})
    verdict = with_metrics(fit, selection).quality["verdict"]
    assert f"accuracy {100 * baseline:.1f} -> {100 * best:.1f} %" in verdict
    worse = worse_sizes(selection.held_out_by_q, selection.published.name, LOG_P)
    assert list(worse) == [64]
    warning = nll_warning(selection.validation, selection.published.name, selection.held_out_by_q)
    assert verdict.endswith(warning.removesuffix("."))
    assert f"{(-worse[64]).shown('+.3f')} nats at n = 64" in warning
    remedies = [
        c.q for c in selection.by_q if not worse_sizes(selection.held_out_by_q, c.name, LOG_P)
    ]
    assert ("it is not" in warning) == bool(remedies)
    alone = fit_and_select(rows, Options(kind="constant"))
    assert with_metrics(fit, alone) is fit


def test_the_sharpest_rule_costs_no_log_p_and_a_sharper_one_would(head_rows):
    by_q = fit_and_select(head_rows, Options(), planted_accuracy("none")).by_q
    last = by_q[-1]
    assert all(c.gain.mean >= 0 for c in by_q)
    assert 0.5 < last.q < 1
    sharper = Options(q=last.q + 1 / 16)
    assert fit_candidate(head_rows, last.fitted.kind, sharper).gain.mean < 0


def test_a_head_chooses_by_sets_of_its_own_stream(tmp_path):
    head = load_head("max-retrieval-3")
    collection = collect(head, [16, 64, 256], 300, 0, tmp_path / "run")
    found = fit_collection(collection, "x", head=head)
    rules = {c.name: c.coefficients for c in found.selection.by_q}
    on_choosing = score_head(head, [16, 64, 256], 1024, 0, rules, stream="sharpness")
    assert on_choosing.best(RIGHT, list(rules)) == found.selection.published.name
    assert found.selection.published.q > 0
    with pytest.raises(CalibrateError, match="'max-retrieval-3'"):
        fit_collection(collection, "x", head=load_head("max-retrieval-4"))


def test_a_calibrated_head_is_refused():
    calibrated = planted_rows(lambda H, n: np.ones_like(H))
    with pytest.raises(QualityError, match=NO_GAIN):
        fit_and_select(calibrated, Options())
    with pytest.raises(QualityError, match=NO_GAIN):
        fit_and_select(calibrated, Options(q=0.5))
