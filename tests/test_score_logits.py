"""Scores of fits on logits on disk: those of a plain loop in float64, head by head."""

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from scipy.special import stdtrit

import calibrate
from calibrate.errors import CalibrateError, QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths import reference
from calibrate.maths.rule import ENTROPY_AND_SIZE, Rule
from calibrate.report.fit_verdict import outcome_on_logits, verdict_on_logits
from calibrate.rows import group_sums, work_units
from calibrate.rows.group_sums import GroupSums
from calibrate.rows.logits_files import Arrays
from calibrate.rows.moments import Moments
from calibrate.rows.score_logits import LogitScores, score_logits

HEADS = ((0, 0), (0, 3), (2, 1))
LINES = (Entry((0.5, 0.2), (2.0, 5.0), 0, 0), Entry((0.0, 3.0), (2.0, 5.0), 2, 1))
BENT = (0.02, -0.2, 0.5, 0.6, 0.4)
FITS = {
    "lines": Coefficients(Rule.log_size(), LINES, name="lines"),
    "bent": Coefficients(Rule(0.3), (Entry(BENT, (1.0, 3.5), 0, 3),), name="bent"),
    "both": Coefficients(
        Rule(0.0, kind=ENTROPY_AND_SIZE),
        (
            Entry((*BENT, -0.05, -0.1, 0.4), (1.0, 3.5, 2.6, 3.5), 0, 3),
            Entry((*BENT, 0.1, 0.0, -0.2), (0.5, 3.0, 2.4, 3.9), 2, 1),
        ),
        name="both",
    ),
    "by layer": Coefficients(Rule.log_size(), (Entry((0.0, 2.0), (2.0, 5.0), layer=0),)),
    "all alike": Coefficients(Rule(outside="identity"), (Entry(BENT, (1.0, 3.0)),)),
}


def planted(rows=120, n=48, seed=0, heads=HEADS, several=False):
    """Arrays of several heads; rows differ in how many of their items are real."""
    rng = np.random.default_rng(seed)
    total = rows * len(heads)
    logits = rng.uniform(0.3, 3, (total, 1)) * rng.standard_normal((total, n))
    n_real = rng.choice([12, 16, n - 5, n], (total, 1), p=[0.1, 0.1, 0.4, 0.4])
    mask = np.arange(n) < n_real
    target = np.where(mask, logits + rng.standard_normal((total, n)), -np.inf).argmax(axis=1)
    if several:
        target = (np.arange(n) == target[:, None]) | ((rng.random((total, n)) < 0.05) & mask)
    layer, head = np.repeat(heads, rows, axis=0).T
    shuffled = rng.permutation(total)
    columns = {"logits": logits, "target": target, "mask": mask, "layer": layer, "head": head}
    return {name: column[shuffled] for name, column in columns.items()}


def save(path, columns):
    np.savez(path, **columns)
    return Arrays(path)


def entry_of(fit, layer, head):
    """In other words than those of the code: the runtime's rule of who has which entry."""
    found = [e for e in fit.layer(layer).entries if e.head in (None, head)]
    named = any(e.layer in (None, layer) for e in fit.entries)
    return found[0] if named and found else None


def by_loop(columns, fit):
    """(rows, 2) p under plain softmax and under the fit, a row at a time."""
    p = np.empty((len(columns["logits"]), 2))
    target = columns["target"]
    for i, z in enumerate(columns["logits"]):
        z, where = z.astype(np.float32), columns["mask"][i]
        entry = entry_of(fit, int(columns["layer"][i]), int(columns["head"][i]))
        plain = reference.softmax(z, where=where)
        sharp = plain if entry is None else reference.adaptive_softmax(
            z, entry.coefficients, entry.domain, fit.rule, where=where
        )  # fmt: skip
        p[i] = [np.sum(np.where(where, x, 0)[target[i]]) for x in (plain, sharp)]
    return p


def by_t(rows):
    """How much wider Student's t makes the errors of so many rows."""
    return stdtrit(rows - 1, 0.975) / 1.959964


def mean_and_error(x):
    return x.mean(), by_t(len(x)) * x.std(ddof=1) / np.sqrt(len(x))


@pytest.mark.parametrize("several", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scores_are_those_of_a_loop_in_float64(several, here, monkeypatch):
    monkeypatch.setattr(
        work_units, "ITEMS_PER_UNIT", 1
    )  # pieces of 64 rows, so that some are merged
    columns = planted(several=several)
    arrays = save(here / "held-out.npz", columns)
    scores = score_logits(arrays, FITS)
    assert scores.rules == ["plain", "paper", *FITS]
    assert scores.heads == list(HEADS)
    n_real = columns["mask"].sum(axis=1)
    of_size = np.array([min(s for s in arrays.sizes if s >= n) for n in n_real])
    for name, fit in FITS.items():
        rule, p = scores.rules.index(name), by_loop(columns, fit)
        samples = {
            "log_p": np.log(p[:, 1]), "p": p[:, 1],
            "log_p_gain": np.log(p[:, 1]) - np.log(p[:, 0]), "p_gain": p[:, 1] - p[:, 0],
        }  # fmt: skip
        for i, size in enumerate(arrays.sizes):
            for j, (layer, head) in [(None, (None, None)), *enumerate(HEADS)]:
                mine = of_size == size
                if j is not None:
                    mine &= (columns["layer"] == layer) & (columns["head"] == head)
                found = scores.estimate(i, j)
                assert found.rows == mine.sum()
                for measure, x in samples.items():
                    np.testing.assert_allclose(
                        found.of(rule, measure), mean_and_error(x[mine]), rtol=2e-5, atol=1e-6
                    )
    for j, (layer, head) in enumerate(HEADS):
        unnamed = entry_of(FITS["lines"], layer, head) is None
        found = scores.estimate(head=j).of(scores.rules.index("lines"), "log_p_gain")
        assert (found == (0.0, 0.0)) == unnamed
        assert scores.names(scores.rules.index("lines"), j) != unnamed


def test_rows_count_by_their_weights(here):
    """One that counts three times has the mean of three of it, and not their certainty."""
    columns = planted()
    n_rows = len(columns["target"])
    weight = np.where(np.arange(n_rows) % 3 == 0, 3.0, 1.0)
    weighed = score_logits(save(here / "weighed.npz", columns | {"weight": weight}), FITS)
    thrice = np.repeat(np.arange(n_rows), weight.astype(int))
    repeated = {name: column[thrice] for name, column in columns.items()}
    repeated = score_logits(save(here / "repeated.npz", repeated), FITS)
    for head in (None, 0, 3):
        for i, _ in enumerate(weighed.sizes):
            found, other = (scores.estimate(i, head) for scores in (weighed, repeated))
            np.testing.assert_allclose(found.mean, other.mean, rtol=1e-5, atol=1e-7)
            if found.rows > 20:
                assert (found.error[1:, 2] >= other.error[1:, 2]).all()


def test_rows_without_weight_are_as_none(here):
    """Also where they would make a size count more."""
    columns = planted(rows=60)
    n_rows = len(columns["target"])
    kept = np.arange(n_rows) % 2 == 0
    alone = score_logits(save(here / "alone.npz", {k: x[kept] for k, x in columns.items()}), FITS)
    among = score_logits(save(here / "among.npz", columns | {"weight": 1.0 * kept}), FITS)
    assert among.sizes == alone.sizes
    weight = 1.0 * (columns["mask"].sum(axis=1) == 48)
    one = score_logits(save(here / "one.npz", columns | {"weight": weight}), FITS)
    assert [one.estimate(i).rows for i, _ in enumerate(one.sizes)] == [0, weight.sum()]
    for head in (None, 1):
        for found, other in zip(among.estimate(head=head), alone.estimate(head=head), strict=True):
            np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-7)


def test_over_all_sizes_count_alike(here):
    columns = planted()
    arrays = save(here / "held-out.npz", columns)
    scores = score_logits(arrays, FITS)
    rule = scores.rules.index("lines")
    for j in (None, 2):
        parts = [scores.estimate(i, j) for i in range(len(arrays.sizes))]
        weight = np.array([min(part.rows, 100) for part in parts])
        weight = weight / weight.sum()
        assert len(set(weight)) > 1  # a size of few rows counts less
        mean, error = np.array([part.of(rule, "log_p_gain") for part in parts]).T
        alone = np.array([by_t(part.rows) for part in parts])
        together = by_t(1 / np.sum(weight**2 / [part.rows for part in parts]))
        expected = weight @ mean, together * np.sqrt(weight**2 @ (error / alone) ** 2)
        np.testing.assert_allclose(scores.estimate(head=j).of(rule, "log_p_gain"), expected)


def test_the_runtime_gives_the_same_probabilities(here):
    """adaptive_softmax with fit.layer(i), on logits (heads, queries, items)."""
    rng = np.random.default_rng(3)
    logits = (2 * rng.standard_normal((3, 4, 50, 24))).astype(np.float32)
    target = rng.integers(0, 24, (3, 4, 50))
    layer, head, _ = np.indices(target.shape)
    columns = {"logits": logits.reshape(-1, 24), "target": target.ravel()}
    columns |= {"layer": layer.ravel(), "head": head.ravel()}
    scores = score_logits(save(here / "held-out.npz", columns), FITS)
    for name, fit in FITS.items():
        rule = scores.rules.index(name)
        for i in range(3):
            probs = np.asarray(calibrate.adaptive_softmax(logits[i], fit.layer(i)))
            p = np.take_along_axis(probs, target[i][..., None], axis=-1)[..., 0]
            for j in range(4):
                found = scores.estimate(head=scores.heads.index((i, j)))
                log_p = mean_and_error(np.log(p[j]).astype(float))
                np.testing.assert_allclose(found.of(rule, "log_p"), log_p, rtol=1e-4)
                np.testing.assert_allclose(found.of(rule, "p")[0], p[j].mean(), rtol=1e-5)


def test_bad_rows_are_counted_and_left_out(here):
    columns = planted()
    spoilt = {name: column.copy() for name, column in columns.items()}
    spoilt["mask"][:3, 0] = True
    spoilt["logits"][0, 0], spoilt["logits"][1, 0] = np.nan, np.inf
    spoilt["mask"][2, spoilt["target"][2]] = False
    scores = score_logits(save(here / "spoilt.npz", spoilt), FITS)
    totals = {key: sum(size[key] for size in scores.counts) for key in scores.counts[0]}
    assert [totals[key] for key in ("rows", "nan", "inf", "masked_target")] == [360, 1, 1, 1]
    assert scores.estimate().rows == 357
    assert np.isfinite(scores.estimate().mean).all()
    spoilt["logits"][10:20, :5] = np.nan
    with pytest.raises(QualityError, match=r"rows are bad \(11 nan"):
        score_logits(save(here / "spoilt.npz", spoilt), FITS)


def moments(x, weight=None, pieces=1):
    """Of one cell, one measure of one rule; of several pieces, merged."""
    found = [
        Moments.of(
            x[i::pieces, None, None], np.zeros(len(x[i::pieces]), int), 1,
            None if weight is None else weight[i::pieces],
        )
        for i in range(pieces)
    ]  # fmt: skip
    return reduce(Moments.merge, found)


def error_of(*sizes):
    """The standard error over sizes, each a Moments of one cell."""
    cells = [Moments(*(np.tile(part, (1, 3, 4)[: part.ndim]) for part in size)) for size in sizes]
    counts = [{}] * len(sizes)
    scores = LogitScores("toy", "", ["plain"] * 3, [], [(0, 0)], [16] * len(sizes), cells, counts)
    return scores.estimate().of(2, "log_p_gain")[1]


def test_far_from_zero_nothing_is_lost():
    """Means that are large beside their spread, merged of pieces."""
    rng = np.random.default_rng(0)
    values, cell = 1e6 + rng.standard_normal((1_000, 2)), rng.integers(0, 3, 1_000)
    pieces = [Moments.of(values[i::7], cell[i::7], 3) for i in range(7)]
    found = reduce(Moments.merge, pieces)
    for j in range(3):
        mine = values[cell == j]
        np.testing.assert_allclose(found.squares[j] / len(mine), mine.var(axis=0), rtol=1e-8)
        assert found.rows[j] == len(mine)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_weighted_errors_are_those_of_a_mean_of_such_weights(offset):
    """sum w^2 (x - mean)^2 / (sum w)^2, however the rows come in pieces."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal(400)
    weight = np.exp(x + rng.standard_normal(400))
    weight[::5] = 0
    mean = np.average(x, weights=weight)
    alike = weight.sum() ** 2 / (weight**2).sum()
    expected = np.linalg.norm(weight * (x - mean)) / weight.sum() * np.sqrt(alike / (alike - 1))
    expected *= by_t(alike)
    for pieces in (1, 3, 40):
        found = moments(offset + x, weight, pieces)
        np.testing.assert_allclose(found.mean[0, 0, 0], offset + mean, rtol=1e-12)
        np.testing.assert_allclose(error_of(found), expected, rtol=1e-9 if offset == 0 else 1e-6)


def test_weighted_errors_are_how_far_means_of_other_rows_are():
    """Where rows weigh by what they score, as those of a recorded model do."""
    rng = np.random.default_rng(2)
    means, errors = [], []
    for _ in range(400):
        p = 1 / (1 + np.exp(-2 * rng.standard_normal((100, 4))))
        found = moments(np.log(p[:, 0]), 4 * p[:, 0] / p.sum(axis=1))
        means.append(found.mean[0, 0, 0])
        errors.append(error_of(found))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_a_row_with_all_of_the_weight_has_no_standard_error():
    x = np.random.default_rng(3).standard_normal(50)
    for others in (0.0, 1e-6):
        weight = np.where(np.arange(50) == 7, 1.0, others)
        assert np.isnan(error_of(moments(x, weight)))
    assert error_of(moments(x[:2])) == pytest.approx(by_t(2) * abs(x[0] - x[1]) / 2)


def test_a_single_row_has_no_standard_error(here):
    columns = {name: x[:1] for name, x in planted().items()}
    scores = score_logits(save(here / "one.npz", columns), {})
    found = scores.estimate()
    assert found.rows == 1
    assert np.isfinite(found.mean).all()
    assert np.isnan(found.error).all()
    assert outcome_on_logits(scores, 1) == "unknown"
    assert "chance may have made (too few rows or groups for an err" in verdict_on_logits(scores, 1)


def test_rows_that_a_fit_was_made_of_are_not_held_out(here):
    arrays = save(here / "seen.npz", planted())
    made_of_it = replace(FITS["lines"], source={"fingerprint": arrays.fingerprint})
    with pytest.warns(UserWarning, match=r"lines was made of these very rows \(seen\): they are"):
        scores = score_logits(arrays, FITS | {"lines": made_of_it})
    assert [scores.held_out(i) for i in range(4)] == [True, True, False, True]


def test_fits_of_other_heads_are_refused(here):
    columns = planted()
    unnamed = {name: columns[name] for name in ("logits", "target", "mask")}
    arrays = save(here / "unnamed.npz", unnamed)
    scores = score_logits(arrays, {"all alike": FITS["all alike"]})
    assert scores.heads == [(None, None)]
    assert scores.head_label(0) == "unnamed"
    for name, axis in (("lines", "layer"), ("bent", "layer"), ("by layer", "layer")):
        with pytest.raises(
            CalibrateError, match=rf"{name} has an entry per {axis}, and unnamed do"
        ):
            score_logits(arrays, {name: FITS[name]})
    by_head = Coefficients(Rule.log_size(), (Entry((0.0, 2.0), (2.0, 5.0), head=1),))
    with pytest.raises(CalibrateError, match=r"per head, .* give an array 'head' \(rows,\)"):
        score_logits(arrays, {"by head": by_head})
    other = save(here / "other.npz", planted(heads=((7, 0), (7, 1))))
    with pytest.raises(
        CalibrateError, match=r"names none of the 2 heads .* \(the first is layer 7"
    ):
        score_logits(other, {"lines": FITS["lines"]})


def test_no_rows_or_none_of_any_weight_are_refused(here):
    columns = planted()
    with pytest.raises(CalibrateError, match="has no rows; give some"):
        score_logits(save(here / "none.npz", {k: x[:0] for k, x in columns.items()}), {})
    weightless = save(here / "weightless.npz", columns | {"weight": np.zeros(360)})
    with pytest.raises(QualityError, match="has no row of any weight to score"):
        score_logits(weightless, {})


def by_prompt(columns, group):
    """The error of a mean of (rows,) by its (rows,) group, all of one size: of the groups' sums."""
    weight = np.bincount(group)
    of_group = np.bincount(group, columns - columns.mean())[weight > 0] / len(columns)
    effective = weight.sum() ** 2 / (weight**2).sum()
    return by_t(effective) * np.linalg.norm(of_group) * np.sqrt(effective / (effective - 1))


def test_errors_go_by_group(here, monkeypatch):
    """Whatever pieces the rows come in, within a head and over all of them."""
    monkeypatch.setattr(work_units, "ITEMS_PER_UNIT", 1)
    columns = planted(n=40)
    columns["mask"][:] = True
    group = np.random.default_rng(5).integers(0, 9, 360)
    columns["logits"] += 3 * np.eye(360, 40)[group] + np.sqrt(group)[:, None] * columns["logits"]
    arrays = save(here / "held-out.npz", columns | {"group": 10**9 * group})
    scores = score_logits(arrays, FITS)
    assert scores.n_groups == 9
    rule, p = scores.rules.index("lines"), by_loop(columns, FITS["lines"])
    gain = np.log(p[:, 1]) - np.log(p[:, 0])
    for j, (layer, head) in [(None, (None, None)), *enumerate(HEADS)]:
        mine = (
            (columns["layer"] == layer) & (columns["head"] == head) if j is not None else gain < 9
        )
        for size in (None, 0):
            mean, error = scores.estimate(size, j).of(rule, "log_p_gain")
            assert mean == pytest.approx(gain[mine].mean(), abs=1e-6)
            assert error == pytest.approx(by_prompt(gain[mine], group[mine]), rel=1e-4, abs=1e-9)


def test_one_prompt_in_all_heads_is_one_prompt(here):
    """Over all heads together the error is that of one of them."""
    columns = {name: x[:100] for name, x in planted(heads=((0, 0),)).items()}
    columns["mask"][:] = True
    several = {name: np.concatenate([x] * 4) for name, x in columns.items()}
    several["head"] = np.repeat(np.arange(4), 100)
    of_one, of_four, unknown = (
        score_logits(save(here / f"{i}.npz", given), {}).estimate().error[0, 0]
        for i, given in enumerate((
            columns | {"group": np.arange(100)}, several | {"group": np.tile(np.arange(100), 4)},
            several,
        ))
    )  # fmt: skip
    assert of_four == pytest.approx(of_one)
    assert unknown == pytest.approx(of_one / 2, rel=0.05)


def test_sizes_with_prompts_in_common_are_not_independent(here):
    """Means of 8 prompts at three sizes: as far apart as their errors say, in 200 samples."""
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        effect = rng.standard_normal(8)
        sums = [GroupSums.of_none(1, (1,)) for _ in range(3)]
        for of_size in sums:
            group = np.repeat(np.arange(8), 20)
            x = effect[group] + rng.standard_normal(160)
            of_size.add(x[:, None], group, np.zeros(160, int), np.ones(160))
        mean, error = group_sums.estimate(sums, slice(None), np.full(3, 160))
        found.append((mean.item(), error.item()))
    mean, error = np.transpose(found)
    assert 184 <= (np.abs(mean) < 1.96 * error).sum() <= 197


def test_one_group_has_no_standard_error(here):
    columns = planted()
    arrays = save(here / "one.npz", columns | {"group": np.zeros(360, int)})
    found = score_logits(arrays, {}).estimate()
    assert np.isfinite(found.mean).all()
    assert np.isnan(found.error).all()


def test_few_rows_show_no_more_gains_by_chance_than_many():
    """Beyond two errors: of 2 rows, 5 and 100 alike, in 2,000 samples without any gain."""
    rng = np.random.default_rng(5)
    for rows in (2, 5, 100):
        found = [moments(rng.standard_normal(rows)) for _ in range(2_000)]
        means = np.array([sample.mean[0, 0, 0] for sample in found])
        errors = np.array([error_of(sample) for sample in found])
        assert 0.013 < (means > 2 * errors).mean() < 0.035
