"""Selection: a head for each outcome."""

import re

import numpy as np
import pytest
import reference
from planted import NO_GAIN, planted_rows

from calibrate.core.rule import Rule, beta_of
from calibrate.core.rule_kinds import KINDS
from calibrate.defaults import MIN_BETA_LIMIT
from calibrate.errors import QualityError
from calibrate.evidence.evidence import OWN
from calibrate.evidence.prior import cautious_gain
from calibrate.evidence.publish_threshold import MIN_IMPROVEMENT
from calibrate.evidence.selection_criterion import Gain
from calibrate.fitting.cross_validate import cross_validate
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select, select_rule
from calibrate.fitting.verdict_clauses import without_gain
from calibrate.fitting.verdict_of_fit import bound_note
from calibrate.rows.heads import load_head
from calibrate.solver.solved_rows import concatenate_rows, solve_rows
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

OPTIONS = Options(q=0.0)  # planted rules are calibrated: sharper ones would not come back


def test_a_bound_is_named_by_shares_of_sizes_and_not_of_rows():
    """Four of five rows are of one size of three, and only those have a beta at a bound."""
    few = planted_rows(lambda H, n: np.ones_like(H), (16, 32), 50)
    rows = concatenate_rows([few, planted_rows(lambda H, n: np.ones_like(H), (64,), 400)])
    low, high = Rule.log_size(MIN_BETA_LIMIT), Rule.log_size()
    for rule, line in ((low, (-0.5, 2.0)), (high, (90.0, 64 - 90 * np.log(64)))):
        fit = Coefficients(rule, (Entry(line, (0.0, 9.0)),))
        at_bound = rule.min_beta if rule is low else rule.max_beta
        assert np.isclose(applied_beta(fit, rows), at_bound).mean() == 0.8
        assert bound_note(rows, fit) == ""
        of_64 = rows.take(rows.size == 64)
        assert "bound" in bound_note(of_64, fit)


def test_the_polynomial_where_beta_depends_on_entropy():
    selection = fit_and_select(
        planted_rows(lambda H, n: 1 + 8 * np.exp(-((H - 2.5) ** 2))), OPTIONS
    )
    assert selection.published.kind == "polynomial"
    assert "polynomial gains" in selection.verdict
    assert selection.published.gain.low > 0
    for size in selection.held_out_evidence.gain_records():
        assert size["after"] > size["before"]


def test_a_multiple_of_log_n_where_beta_depends_on_the_size():
    rows = planted_rows(lambda H, n: np.full_like(H, 1.5 * np.log(n) - 3), count=2_000)
    selection = fit_and_select(rows, OPTIONS)
    assert selection.published.kind == "log-size"
    assert selection.published.coefficients.only.coefficients == pytest.approx((1.5, -3), abs=0.3)


def test_entropy_and_size_where_beta_depends_on_both():
    rows = planted_rows(lambda H, n: 1 + 1.2 * (np.log(n) - H), count=2_000)
    selection = fit_and_select(rows, OPTIONS)
    assert selection.published.kind == "entropy-and-size"
    assert "entropy-and-size gains" in selection.verdict
    H, log_n = np.array([1.5, 2.0, 3.5]), np.log([16, 16, 256])
    entry, rule = selection.published.coefficients.only, selection.published.coefficients.rule
    beta = beta_of(H, log_n, entry.coefficients, entry.domain, rule, np)
    np.testing.assert_allclose(beta, 1 + 1.2 * (log_n - H), rtol=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": 1.0, "trained_up_to": 8}, r"; q=1\.0 .*\b0\.0 constant .*\b0\.5"),
        ({"min_entropy": 10.0}, r"^0 .*; min_entropy=10\.0 .*\b0\.0 "),
    ],
)
def test_the_option_without_which_a_rule_gains_is_named(options, message):
    with pytest.raises(QualityError, match=message):
        fit_and_select(flat_rows(), OPTIONS._replace(**options))


def test_rows_that_are_too_few_without_the_others_are_the_cause():
    rows = flat_rows()
    few = rows.take(~rows.misranked | (np.cumsum(rows.misranked) < 90))
    with pytest.raises(QualityError, match=r'rows="misranked" is the cause'):
        fit_and_select(few, OPTIONS._replace(rows="misranked"))


def flat_rows():
    """One beta serves all."""
    return planted_rows(lambda H, n: np.full_like(H, 2.5))


def test_one_constant_where_nothing_else_does_better():
    selection = fit_and_select(flat_rows(), OPTIONS)
    assert selection.published.kind == "constant"
    assert selection.verdict.startswith("constant gains ")
    *zeros, b = selection.published.coefficients.only.coefficients
    assert zeros == [0, 0, 0, 0]
    assert b == pytest.approx(2.5, abs=0.15)


@pytest.mark.parametrize("draw", [2, 7])
def test_a_richer_kind_that_leads_on_one_split_alone_is_not_chosen(draw):
    """Of ten draws of this head, a line in log n led a constant on the first split of two."""
    wants = {"beta_of": lambda H, n: np.full_like(H, 2 + 0.12 * np.log(n / 16)), "count": 400}
    rows, kinds = planted_rows(**wants, seed=draw), ("constant", "log-size")
    validation = cross_validate(rows, [KINDS[kind] for kind in kinds], OPTIONS)
    constant, line = validation.candidates
    both = constant.evidence.renamed({OWN: "constant"}).with_rule(OWN, line.held_out_scores)
    assert cautious_gain(both, OWN, "constant").is_at_least(MIN_IMPROVEMENT)
    selection = select_rule(validation, kinds)
    assert selection.published.kind == "constant"


def test_a_kind_that_is_named_is_published_with_its_verdict():
    selection = fit_and_select(flat_rows(), OPTIONS._replace(kind="polynomial"))
    assert selection.published.kind == "polynomial"
    assert re.search(r"on request.* than constant \(", selection.verdict)


def test_nothing_where_softmax_is_right_as_it_is():
    """But a kind that is named, and its verdict says so."""
    rows = planted_rows(lambda H, n: np.ones_like(H))
    with pytest.raises(QualityError, match=NO_GAIN):
        fit_and_select(rows, OPTIONS)
    selection = fit_and_select(rows, OPTIONS._replace(kind="polynomial"))
    assert selection.published.kind == "polynomial"
    assert re.search(r"on request.* baseline's \(", selection.verdict)


def test_a_loss_is_called_one():
    assert without_gain(Gain(-0.05, -0.06, -0.03, 1.0)) == "significantly worse"
    assert without_gain(Gain(0.01, -0.06, 0.08, 0.4), " than it").endswith("than it (p-value 0.4)")


def test_nothing_for_shuffled_targets():
    """A target that any item may be wants the least beta that is allowed: plain softmax."""
    rows = planted_rows(lambda H, n: np.zeros_like(H))
    with pytest.raises(QualityError, match="targets"):
        fit_and_select(rows, OPTIONS)


def test_one_size_alone_leaves_log_n_out():
    selection = fit_and_select(planted_rows(lambda H, n: np.full_like(H, 3.0), (64,)), OPTIONS)
    assert {c.kind for c in selection.candidates} == {"constant", "polynomial"}
    left_out = r"without log-size .* and entropy-and-size: .*\b1 number"
    assert re.search(left_out, selection.verdict)


def test_a_kind_that_is_forced_and_cannot_be_fitted_is_refused():
    rows = planted_rows(lambda H, n: np.full_like(H, 3.0))
    with pytest.raises(QualityError, match="polynomial"):
        fit_and_select(
            rows._replace(entropy=np.resize([2.0, 3.0], len(rows.size))),
            OPTIONS._replace(kind="polynomial"),
        )


def test_scores_are_of_rows_that_the_fit_has_not_seen():
    """With few rows the polynomial follows them: what it gains on its own rows is no gain."""
    rows = planted_rows(lambda H, n: np.full_like(H, 2.5), (16, 64), count=60)
    polynomial = next(c for c in fit_and_select(rows, OPTIONS).candidates if c.kind == "polynomial")
    own = rows.log_p(applied_beta(polynomial.coefficients, rows))
    assert rows.shares() @ own > polynomial.mean_log_p


@pytest.mark.parametrize(("wants", "best"), [(0.3, 0.3), (0.6, 0.6)])
def test_rows_that_want_less_beta_are_refused_unless_less_is_allowed(wants, best):
    rows = {
        least: planted_rows(lambda H, n: np.full_like(H, wants), min_beta=least)
        for least in (1.0, 1 / 8)
    }
    with pytest.raises(QualityError, match=r"\bmin_beta=$") as failed:
        fit_and_select(rows[1.0], OPTIONS)
    assert "min_beta" in failed.value.parameters
    with pytest.raises(QualityError, match=rf"^(?!.*min_beta).*{NO_GAIN}"):  # it is not why
        fit_and_select(planted_rows(lambda H, n: np.ones_like(H)), OPTIONS)
    selection = fit_and_select(rows[1 / 8], OPTIONS._replace(min_beta=1 / 8))
    assert selection.published.kind == "constant"
    assert selection.published.coefficients.only.coefficients[-1] == pytest.approx(best, abs=0.04)
    assert selection.published.coefficients.rule.min_beta == 1 / 8


def test_a_sharp_head_of_few_rows_gets_no_rule():
    """Right in nearly all rows, it looks as if it gained by any beta; on fresh sets it loses."""
    head = load_head("max-retrieval-8")
    parts = []
    for n in (2, 4, 8):
        batch = head.sample(12_000 + n, n, 40)
        z = np.asarray(head.attend(batch).logits, np.float32)
        parts.append(solve_rows(z, np.asarray(batch.target), reference.entropy(z), n))
    rows = concatenate_rows(parts)
    assert fit_and_select(rows, Options(prior_rows=0)).published.gain.low > 0.01
    with pytest.raises(QualityError, match=NO_GAIN):
        fit_and_select(rows, OPTIONS)
