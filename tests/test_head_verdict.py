"""Verdicts on heads: they agree with the fit, and sinks are named."""

import numpy as np
import pytest
import reference
from planted import grouped_nulls

from calibrate.errors import QualityError
from calibrate.evidence.prior import Gain
from calibrate.rows.choose_rule import choose
from calibrate.rows.head_verdict import (
    FEW,
    NOT_WORTH,
    ROBUST,
    SINK,
    WORTH,
    Headroom,
    RuleGain,
    Sink,
    attended,
    find_sink,
    judge_head,
    measure_headroom,
    refuse_few_groups,
)
from calibrate.rows.row_problem import fit_rule
from calibrate.rows.rule_fitting import Options, applied_beta
from calibrate.rows.solved_rows import solve_rows

N = 24
LESS = "best beta is below 1, the least allowed"


def drawn(parts, seed=0):
    """Rows of one size whose targets are drawn from softmax(beta z): (spread of z, beta, rows)."""
    rng = np.random.default_rng(seed)
    z = np.concatenate([s * rng.standard_normal((count, N)) for s, _, count in parts])
    beta = np.concatenate([np.full(count, beta) for _, beta, count in parts])
    p = reference.softmax(z, beta=beta[:, None])
    target = np.minimum((p.cumsum(axis=1) <= rng.random((len(z), 1))).sum(axis=1), N - 1)
    H = np.array([reference.entropy(row) for row in z])
    return solve_rows(z.astype(np.float32), target, H, N)


HEADS = {  # name: rows, the word, and the kind of rule that a fit gives it
    # A constant gains nothing: half of the rows are overconfident, and half are blurred.
    "only by entropy": ([(6, 0.3, 300), (1, 2.0, 300)], WORTH, "polynomial"),
    "blurred": ([(2, 2.0, 600)], WORTH, "constant"),
    "seldom on top": ([(0.6, 2.0, 600)], WORTH, "constant"),
    "calibrated": ([(2, 1.0, 600)], NOT_WORTH, None),
    "overconfident": ([(6, 0.1, 600)], NOT_WORTH, None),
}


@pytest.mark.parametrize("name", HEADS)
def test_verdicts_agree_with_the_fit(name):
    parts, word, kind = HEADS[name]
    rows = drawn(parts)
    room, on_top = measure_headroom(rows), 1 - rows.misranked.mean()
    verdict = judge_head(len(rows.size), None, on_top, room, None)
    assert verdict.word == word
    refused = ""
    said = LESS if name == "overconfident" else f"top logit in {on_top:.0%} of rows"
    assert said in verdict.reason
    try:
        chosen = choose(rows, Options(rows="all")).chosen
    except QualityError as failure:
        assert kind is None
        refused = str(failure)
    else:
        assert chosen.kind == kind
        assert (chosen.kind, chosen.gain) == room.gains[0]
    assert (LESS in refused) == (name == "overconfident")


def test_a_rule_of_entropy_may_gain_what_no_constant_does():
    room = measure_headroom(drawn(HEADS["only by entropy"][0]))
    polynomial, constant = room.gains  # one size determines no line in log n
    assert constant.gain.mean == pytest.approx(0, abs=1e-3)
    assert 0.05 < polynomial.gain.mean < room.ceiling
    reason = judge_head(600, None, 0.4, room, None).reason
    assert f"the polynomial gains {polynomial.gain.mean:.3f}" in reason
    assert "nats, one constant 0.000" in reason


def test_gains_are_of_rows_that_the_rule_has_not_seen():
    """Five coefficients follow 100 rows: on those rows they gain more."""
    rows = drawn([(2, 2.0, 100)])
    held_out = dict(measure_headroom(rows).gains)["polynomial"]
    beta = applied_beta(fit_rule(rows, "polynomial"), rows)
    seen = rows.profile.log_p(beta) - rows.profile.log_p(np.ones(100))
    assert held_out.mean < seen.mean() - 0.01


def test_gains_from_few_prompts_are_not_evident():
    """A calibrated head, by luck of eight prompts; fewer than five get no verdict."""
    rows = grouped_nulls(11)
    alone = measure_headroom(rows._replace(group=np.full(len(rows.size), -1))).gains[0]
    by_prompt = dict(measure_headroom(rows).gains)[alone.kind]
    assert alone.gain.evident
    assert not by_prompt.evident
    assert refuse_few_groups(rows) is None
    word, reason = refuse_few_groups(rows._replace(group=rows.group % 4))
    assert word == FEW
    assert reason.startswith("too few rows: the rows come from 4 groups (prompts), fewer than")


A_SINK = Sink(0, 0.93, 400)


@pytest.mark.parametrize(
    ("slope", "on_top", "gain", "sink", "word", "said"),
    [
        (0.2, 0.91, (0.12, 0.1), None, WORTH, "one constant gains 0.120"),
        (-0.06, 0.08, (0.12, 0.1), None, WORTH, "8% of rows; commitment falls 0.06 per unit"),
        (0.95, 0.91, (0.12, 0.1), None, WORTH, "commitment grows 0.95 per unit of log n"),
        (None, 0.91, (0.12, 0.1), None, WORTH, "top logit in 91% of rows"),
        (0.2, 0.3, (0.0, 0.0), None, NOT_WORTH, "top logit in 30% of rows"),
        (0.95, 0.3, (0.0, 0.0), None, NOT_WORTH, "no rule gains 0.01 nats on average and beyond"),
        (0.95, 0.9, (0.004, 0.002), None, ROBUST, "(best: one constant, 0.004"),
        (0.2, 0.9, (0.03, -0.01), None, NOT_WORTH, "constant, 0.030 (-0.010 to 0.140))"),
        (0.95, 0.1, (0.0, 0.0), A_SINK, SINK, "sink: 93% of its attention is on the first item"),
        (0.95, 0.9, (0.0, 0.0), A_SINK, SINK, "whatever the target; no rule gains 0.01 nats"),
        (0.5, 0.4, (0.12, 0.1), A_SINK, WORTH, "worth calibrating: 93% of its attention is on"),
        (0.95, 0.99, (0.0, 0.0), Sink(-1, 0.93, 4), ROBUST, "on the last item, which is the"),
    ],
)  # fmt: skip
def test_verdicts(slope, on_top, gain, sink, word, said):
    room = Headroom(-1, [RuleGain("constant", Gain(*gain, 0.14, 0.5))], None, 2, 0.2)
    verdict = judge_head(100, slope, on_top, room, sink)
    assert verdict.word == word
    assert verdict.reason.startswith(f"{word}: ")
    assert said in verdict.reason
    assert judge_head(99, slope, on_top, room, sink).word == FEW


@pytest.mark.parametrize(
    ("position", "said"),
    [(0, "the first item"), (2, "item 3,"), (-1, "the last item"), (-3, "item 3 from the end")],
)
def test_positions_are_named(position, said):
    room = Headroom(-1, [], "too few", 1, 0)
    assert said in judge_head(100, None, 0.1, room, Sink(position, 0.8, 90)).reason


def looks_at(place, share, target, items):
    """Logits (rows, 40) with that share of the attention on one place of each row."""
    rng, count = np.random.default_rng(0), len(items)
    z = np.where(np.arange(40) < items[:, None], 0.1 * rng.standard_normal((count, 40)), -np.inf)
    at, place = np.arange(count), np.broadcast_to(place, count)
    z[at, place] = -np.inf
    z[at, place] = np.log(share / (1 - share) * np.exp(z).sum(axis=1))
    return find_sink(*attended(z.astype(np.float32), target), items)


def test_sinks_are_found_whatever_the_target():
    rng = np.random.default_rng(1)
    items = rng.integers(20, 41, 300)
    target = rng.integers(0, items)
    for place, position in ((0, 0), (2, 2), (items - 1, -1), (items - 3, -3)):
        sink = looks_at(place, 0.8, target, items)
        assert sink.position == position
        assert sink.attention == pytest.approx(0.8, abs=0.01)
        assert sink.rows == (target != place).sum()
        assert sink.certain
    assert looks_at(0, 0.4, target, items) is None  # less than half
    assert looks_at(target, 0.9, target, items) is None  # it finds its targets
    assert looks_at(0, 0.9, np.where(np.arange(300) < 200, 0, target), items).certain


def test_targets_in_one_place_are_not_a_sink():
    items = np.full(300, 40)
    mostly = np.where(np.arange(300) < 200, 0, 7)
    assert looks_at(mostly, 0.9, mostly, items) is None  # it finds the others, too
    always = looks_at(0, 0.9, np.zeros(300, int), items)
    assert (always.position, always.rows, always.certain) == (0, 0, False)


def test_one_of_several_targets_is_not_a_sink():
    z = np.zeros((50, 6), np.float32)
    z[:, 1] = 9
    targets = np.zeros((50, 6), bool)
    targets[:, :3] = True
    assert not find_sink(*attended(z, targets), np.full(50, 6)).certain
    assert find_sink(*attended(z, targets[:, ::-1]), np.full(50, 6)).certain
