"""Scores of fits on logits on disk, against a loop in float64, head by head."""

from dataclasses import replace

import numpy as np
import pytest
import reference

from calibrate.core.rule import ENTROPY_AND_SIZE, RuleForm
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.baselines import one_constant, paper
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, P
from calibrate.rows.logits_files import Arrays
from calibrate.rows.score import score_logits
from calibrate.rows.units import UnitSizes
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, identity

HEADS = ((0, 0), (0, 3), (2, 1))
LINES = (Entry((0.5, 0.2), (2.0, 5.0), 0, 0), Entry((0.0, 3.0), (2.0, 5.0), 2, 1))
BENT = (0.02, -0.2, 0.5, 0.6, 0.4)
FITS = {
    "lines": Fit(RuleForm.log_size(), LINES, name="lines"),
    "bent": Fit(RuleForm(0.3), (Entry(BENT, (1.0, 3.5), 0, 3),), name="bent"),
    "both": Fit(
        RuleForm(0.0, kind=ENTROPY_AND_SIZE),
        (
            Entry((*BENT, -0.05, -0.1, 0.4), (1.0, 3.5, 2.6, 3.5), 0, 3),
            Entry((*BENT, 0.1, 0.0, -0.2), (0.5, 3.0, 2.4, 3.9), 2, 1),
        ),
        name="both",
    ),
    "by layer": Fit(RuleForm.log_size(), (Entry((0.0, 2.0), (2.0, 5.0), layer=0),)),
    "all alike": Fit(RuleForm(outside="identity"), (Entry(BENT, (1.0, 3.0)),)),
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
    return Arrays.read(path)


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


def mean_and_error(x):
    return x.mean(), x.std(ddof=1) / np.sqrt(len(x))


@pytest.mark.parametrize("several", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scores_are_those_of_a_loop_in_float64(several, here):
    columns = planted(several=several)
    arrays = save(here / "held-out.npz", columns)
    evidence = score_logits(arrays, FITS, unit_sizes=UnitSizes(max_sets=64))
    assert evidence.rules == ("baseline", "paper", *FITS)
    assert evidence.heads == HEADS
    n_real = columns["mask"].sum(axis=1)
    of_size = np.array([min(s for s in arrays.sizes if s >= n) for n in n_real])
    for name, fit in FITS.items():
        p = by_loop(columns, fit)
        log_p, gain = np.log(p[:, 1]), np.log(p[:, 1]) - np.log(p[:, 0])
        for size, part in evidence.by("size").items():
            for head, found in {None: part, **part.by("head")}.items():
                mine = of_size == size
                if head is not None:
                    mine &= (columns["layer"] == head[0]) & (columns["head"] == head[1])
                assert found.n == mine.sum()
                for estimate, x in (
                    (found.mean(name, LOG_P), log_p), (found.mean(name, P), p[:, 1]),
                    (found.gain(name, LOG_P), gain), (found.gain(name, P), p[:, 1] - p[:, 0]),
                ):  # fmt: skip
                    np.testing.assert_allclose(
                        estimate[:2], mean_and_error(x[mine]), rtol=2e-5, atol=1e-6
                    )
    for head, part in evidence.by("head").items():
        unnamed = entry_of(FITS["lines"], *head) is None
        assert (part.gain("lines", LOG_P).mean == 0) == unnamed
        assert evidence.names("lines", head) != unnamed


def test_rows_without_weight_are_left_out(here):
    columns = planted(rows=60)
    kept = np.arange(len(columns["target"])) % 2 == 0
    alone = score_logits(save(here / "alone.npz", {k: x[kept] for k, x in columns.items()}), FITS)
    among = score_logits(save(here / "among.npz", columns | {"weight": 1.0 * kept}), FITS)
    assert among.of.left_out["without_weight"] == (~kept).sum()
    for rule in among.rules:
        assert among.mean(rule, LOG_P) == alone.mean(rule, LOG_P)


def test_every_row_has_the_same_weight_whatever_its_size(here):
    """500 rows of 12 items and one of 40: the one does not count for half of the mean."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((501, 40))
    mask = np.arange(40) < np.where(np.arange(501) < 500, 12, 40)[:, None]
    target = np.where(mask, logits + rng.gumbel(size=logits.shape), -np.inf).argmax(1)
    columns = {"logits": logits, "target": target, "mask": mask}
    evidence = score_logits(save(here / "rows.npz", columns), {"twice": one_constant(2.0)})
    assert evidence.n == 501
    expected = mean_and_error(evidence.scores("twice", LOG_P).astype(float))
    assert evidence.mean("twice", LOG_P)[:2] == pytest.approx(expected)


def test_bad_rows_are_counted_and_left_out(here):
    columns = planted()
    spoilt = {name: column.copy() for name, column in columns.items()}
    spoilt["mask"][:3, 0] = True
    spoilt["logits"][0, 0], spoilt["logits"][1, 0] = np.nan, np.inf
    spoilt["mask"][2, spoilt["target"][2]] = False
    evidence = score_logits(save(here / "spoilt.npz", spoilt), FITS)
    left_out = {"nan": 1, "inf": 1, "masked_target": 1, "without_weight": 0}
    assert evidence.of.left_out == left_out
    assert evidence.n == 357
    assert np.isfinite(evidence.values[LOG_P]).all()
    spoilt["logits"][10:20, :5] = np.nan
    with pytest.raises(QualityError, match="11 nan"):
        score_logits(save(here / "spoilt.npz", spoilt), FITS)


def test_calibration_rows_are_warned_of(here):
    arrays = save(here / "seen.npz", planted())
    made_of_it = replace(FITS["lines"], source={"fingerprint": arrays.fingerprint})
    with pytest.warns(UserWarning, match=r"lines .*\(seen\)"):
        score_logits(arrays, FITS | {"lines": made_of_it})


def test_the_papers_numbers_are_scored_once(here):
    arrays = save(here / "rows.npz", planted())
    assert score_logits(arrays, {"paper@1": paper()}).rules == ("baseline", "paper@1")
    assert score_logits(arrays, {"baseline": identity()}).rules == ("baseline", "paper")


def test_fits_of_other_heads_are_refused(here):
    columns = planted()
    unnamed = {name: columns[name] for name in ("logits", "target", "mask")}
    arrays = save(here / "unnamed.npz", unnamed)
    scores = score_logits(arrays, {"all alike": FITS["all alike"]})
    assert scores.heads == ((None, None),)
    for name in ("lines", "bent", "by layer"):
        with pytest.raises(CalibrateError, match=f"{name} .*`layer`"):
            score_logits(arrays, {name: FITS[name]})
    other = save(here / "other.npz", planted(heads=((7, 0), (7, 1))))
    message = r"^lines .*\b2 heads .*layer 7, head 0"
    with pytest.raises(CalibrateError, match=message):
        score_logits(other, {"lines": FITS["lines"]})


def test_no_rows_or_none_of_any_weight_are_refused(here):
    columns = planted()
    with pytest.raises(CalibrateError, match=r"none\.npz"):
        score_logits(save(here / "none.npz", {k: x[:0] for k, x in columns.items()}), {})
    with pytest.raises(QualityError, match=r"weightless\.npz "):
        save(here / "weightless.npz", columns | {"weight": np.zeros(360)})


@pytest.mark.parametrize("several", [False, True])
def test_confidence_is_the_probability_of_the_top_item(several, here):
    columns = planted(rows=30, several=several)
    evidence = score_logits(save(here / "rows.npz", columns), {"twice": one_constant(2.0)})
    z = np.where(columns["mask"], columns["logits"], -np.inf).astype(np.float32)
    top, target = z.argmax(axis=1), columns["target"]
    ranked = np.take_along_axis(target, top[:, None], 1)[:, 0] if several else target == top
    confidence = [reference.softmax(2.0 * row).max() for row in z]
    for measure, expected in zip((CONFIDENCE, RANKED), (confidence, ranked), strict=True):
        found = np.sort(evidence.scores("twice", measure))
        np.testing.assert_allclose(found, np.sort(expected), rtol=1e-5)


def ece(logits, target, weight=None):
    columns = {"logits": logits, "target": target}
    columns |= {} if weight is None else {"weight": weight}
    diagram = reliability_of(score_logits(Arrays.in_memory("rows", columns), {}), "baseline")
    return expected_calibration_error(diagram), diagram.chance


def test_calibrated_logits_with_ties_have_the_calibration_error_of_chance():
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, (4000, 8)).astype(float)
    target = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    found, chance = ece(z, target)
    assert found < 2 * chance < 0.04
    assert ece(3 * z, target)[0] > 0.1


def test_the_calibration_error_does_not_depend_on_the_order_of_rows_or_items():
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, (4000, 8)).astype(float)
    target = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    found, _ = ece(z, target)
    is_ranked = z[np.arange(4000), target] == z.max(axis=1)
    for order in (rng.permutation(4000), np.argsort(target), np.argsort(is_ranked)):
        assert ece(z[order], target[order])[0] == pytest.approx(found)
    assert ece(z[:, ::-1], 7 - target)[0] == pytest.approx(found)
    twice = np.tile(z, (2, 1)), np.tile(target, 2), np.full(8000, 0.5)
    assert ece(*twice)[0] == pytest.approx(found)
    assert ece(z, target, np.full(4000, 3.0))[0] == pytest.approx(found)
