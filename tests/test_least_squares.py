"""The verdict of a polynomial of optimal betas: its gain, what the entropy explains, and limits."""

import re
import warnings

import numpy as np
import pytest
from conftest import ToyHead
from planted import planted_rows

import calibrate
from calibrate.cli.row_scoring import solved_head
from calibrate.datasets.logits_files import Arrays
from calibrate.errors import QualityError
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.fitting.verdict_of_fit import explained
from calibrate.report.labels import label
from calibrate.rows.collect import collect_in_memory
from calibrate.solver.solved_rows import solve_collection

PAPER = Options.of_the_paper()
ONLY = "only ones kept"


@pytest.fixture(scope="module")
def misranked():
    """Logits and targets of which none is the largest logit."""
    rng = np.random.default_rng(5)
    logits = rng.uniform(0, 6, (1_000, 64)).astype(np.float32)
    return logits, logits.argsort(1)[np.arange(1_000), -1 - rng.integers(1, 4, 1_000)]


def test_rows_that_all_are_misranked_are_not_the_only_ones_kept(misranked):
    fit = calibrate.fit(*misranked, kind="polynomial", loss="log-least-squares", rows="misranked")
    assert ONLY not in fit.quality["verdict"]
    logits, target = (np.concatenate([x, x]) for x in misranked)
    head = np.repeat([0, 1], 1_000)
    columns = {"head": head, "kind": "polynomial", "loss": "log-least-squares"}
    fits = calibrate.fit(logits, target, **columns, rows="misranked")
    assert ONLY not in fits.quality["verdict"]


def test_a_constant_stands_beside_a_polynomial_on_held_out_rows(misranked):
    fit = calibrate.fit(*misranked, kind="polynomial", loss="log-least-squares", rows="misranked")
    constant = fit.evidence.fits["constant"]
    assert constant.only.coefficients[-1] == fit.candidates["constant"]["coefficients"][-1]
    assert label("constant") in {record[2] for record in fit.table}


def test_logits_without_information_are_refused_by_any_loss():
    rng = np.random.default_rng(0)
    logits, target = 200 * rng.standard_normal((2_000, 16)), rng.integers(0, 16, 2_000)
    for loss in ("likelihood", "least-squares", "log-least-squares"):
        with pytest.raises(QualityError, match="no information"):
            calibrate.fit(logits, target, kind="polynomial", loss=loss)


def test_a_polynomial_that_is_drawn_beside_a_fit_warns_of_nothing():
    """The fit beside it warns of its own bound."""
    logits = 1e-4 * np.random.default_rng(5).standard_normal((1_000, 64), np.float32)
    target = logits.argsort(1)[:, -2]
    rows = collect_in_memory(Arrays.in_memory("mine", {"logits": logits, "target": target}))
    with pytest.warns(UserWarning, match="64"):
        calibrate.fit_polynomial(calibrate.solve(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solved_head(rows, solve_collection(rows), "mine").polynomial is not None


def test_a_collection_that_keeps_misranked_rows_alone_is_said_to():
    for keep, said in (("all", False), ("misranked", True)):
        rows = calibrate.collect(ToyHead(noise=0.3), [64, 256], 400, keep=keep)
        verdict = calibrate.fit_polynomial(calibrate.solve(rows)).quality["verdict"]
        assert (ONLY in verdict) == said


def test_a_polynomial_that_loses_is_significantly_worse():
    rows = planted_rows(lambda H, n: np.ones_like(H), (64,))
    result = fit_and_select(rows, PAPER)
    assert result.published.gain.high < 0
    assert "significantly worse;" in result.verdict
    assert "not significantly" not in result.verdict


def test_a_share_below_0_explains_nothing():
    rows = planted_rows(lambda H, n: np.full_like(H, 3.0), (64,))
    result = fit_and_select(rows, PAPER)
    assert "significantly worse" not in result.verdict
    assert "-0.14" in explained(-0.14)
    assert explained(result.published.powers.r_squared) in result.verdict


def test_a_polynomial_at_its_upper_bound_names_bound_and_remedy():
    rng = np.random.default_rng(5)
    score = 1e-3 * rng.standard_normal((1_000, 64))
    logits = (score + 5e-4 * rng.standard_normal(score.shape)).astype(np.float32)
    target, advice = score.argmax(1), r"\b64\b.* logits .*\b64\b"
    options = {"kind": "polynomial", "loss": "log-least-squares", "rows": "misranked"}
    with pytest.warns(UserWarning, match=advice):
        fit = calibrate.fit(logits, target, **options)
    assert re.search(advice, fit.quality["verdict"])
    with pytest.warns(UserWarning, match=advice):
        fit_solved_rows(logits, target)


def fit_solved_rows(logits, target):
    """As the command `fit --paper` does."""
    arrays = Arrays.in_memory("mine", {"logits": logits, "target": target})
    return calibrate.fit_polynomial(calibrate.solve(collect_in_memory(arrays)))


def test_the_verdict_has_the_loss_at_trained_sizes():
    rows = planted_rows(lambda H, n: np.full_like(H, 3.0), (16, 64))
    verdict = fit_and_select(rows, PAPER._replace(trained_up_to=16)).verdict
    assert re.search(r"; in distribution \(n <= 16\): [+-]0\.\d{4} ± .*nats", verdict)
    for limit in (None, 8):
        assert (
            "in distribution"
            not in fit_and_select(rows, PAPER._replace(trained_up_to=limit)).verdict
        )
