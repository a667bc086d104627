"""Fit: a collection becomes a file that loads, with its evidence; or a reason why not."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ToyHead, as_users

import calibrate
from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import KINDS
from calibrate.errors import CalibrateError, QualityError
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.options import Options
from calibrate.rows.collect import collect
from calibrate.store.coefficient_file import dumps, read
from calibrate.store.publishing import publish


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    collect(ToyHead(noise=0.2), [16, 64, 256], 600, 0, folder)
    return folder


@pytest.fixture(scope="module")
def misranked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    collect(ToyHead(noise=0.2), [16, 64, 256], 600, 0, folder, keep="misranked")
    return folder


def test_a_collection_becomes_a_file_that_loads(folder, tmp_path):
    fit = fit_collection(folder, "toy", Options(kind="polynomial"))
    published, _ = publish(fit.coefficients, tmp_path)
    loaded = calibrate.load("toy", tmp_path)
    assert loaded == fit.coefficients
    assert loaded.source["head"] == "toy"
    assert loaded.source["fingerprint"] == "sha256:toy-0.2"
    assert loaded.source["options"] == {
        "degree": 4, "force": "polynomial", "rows": "all", "gate": 0.0, "prior_rows": 10.0,
    }  # fmt: skip
    rows = loaded.quality["rows"]
    assert rows["kept"] == 1_800
    assert rows["used"] + rows["gated"] == 1_800
    assert rows["sharp"] + rows["interior"] + rows["flat"] + rows["unsolved"] == 1_800
    assert read(published.path) == loaded
    H = np.linspace(*loaded.only.domain, 50)
    assert float(np.max(calibrate.inverse_temperature(H, loaded))) > 1


def test_the_file_holds_the_evidence_and_a_refit_is_the_same(folder, tmp_path):
    fit = fit_collection(folder, "toy")
    quality = fit.coefficients.quality
    assert [size["size"] for size in quality["held_out"]] == [16, 64, 256]
    assert {c["kind"] for c in quality["candidates"]} == set(KINDS)
    assert quality["verdict"] == fit.selection.verdict
    assert len(quality["standard_errors"][0]) == len(fit.coefficients.only.coefficients)
    assert quality["condition"] >= 1
    chosen = fit.selection.published
    with_r_squared = [c["kind"] for c in quality["candidates"] if "log_beta_r_squared" in c]
    assert with_r_squared == ["polynomial"]
    taken = next(c for c in quality["candidates"] if (c["kind"], c["q"]) == (chosen.kind, chosen.q))
    gains = [size["after"] - size["before"] for size in quality["held_out"]]
    assert np.mean(gains) == pytest.approx(taken["gain"])
    assert taken["low"] < taken["gain"] < taken["high"]
    again = fit_collection(folder, "toy").coefficients
    one, two = (dumps(x).replace(x.provenance["created"], "") for x in (fit.coefficients, again))
    assert one == two
    first, _ = publish(fit.coefficients, tmp_path)
    assert publish(again, tmp_path) == (first, False)
    gated = replace(again, source={**again.source, "options": {"gate": 0.25}})
    assert publish(gated, tmp_path)[0].version == 2


def test_the_papers_procedure(folder, misranked):
    for place in (folder, misranked):
        fit = fit_collection(place, "toy", Options.of_the_paper())
        assert not fit.selection.is_of_likelihood
        assert fit.coefficients.rule == Rule(min_entropy=0.5)
        assert fit.coefficients.source["options"] == {
            "degree": 4, "rows": "misranked", "gate": 0.5, "force": "polynomial",
            "loss": "log-least-squares", "prior_rows": 10.0,
        }  # fmt: skip
        residuals = fit.coefficients.quality["residuals"]
        assert residuals["beta_rms"] > 0
        assert 0 < residuals["log_beta_r_squared"] < 1
        constant, polynomial = fit.coefficients.quality["candidates"]
        assert (constant["kind"], constant["loss"]) == ("constant", "likelihood")
        assert (polynomial["kind"], polynomial["loss"]) == ("polynomial", "log-least-squares")
        assert polynomial["coefficients"] == list(fit.coefficients.only.coefficients)
        assert polynomial["log_beta_r_squared"] == fit.coefficients.r_squared
        rows = fit.coefficients.quality["rows"]
        assert 100 < rows["used"] <= rows["misranked"]
        verdict = fit.coefficients.quality["verdict"]
        assert "entropy explains" in verdict
        assert verdict.startswith("on misranked rows") == (place is misranked)
        assert ("of the same rows" in verdict) == (place is misranked)
    assert len(fit.rows.beta) == fit.coefficients.quality["rows"]["misranked"]


def test_all_rows_need_a_collection_that_keeps_them(misranked):
    with pytest.raises(CalibrateError, match="misranked"):
        fit_collection(misranked, "toy", Options(rows="all"))
    fit = fit_collection(misranked, "toy", Options(kind="constant"))
    assert fit.coefficients.source["options"]["rows"] == "misranked"


def test_too_few_rows_are_exit_3_with_advice(tmp_path):
    collect(ToyHead(), [8], 50, 0, tmp_path / "run")
    for options, message in (
        (None, r"^\d+ usable rows.* 100 "),
        (Options.of_the_paper(), r"^\d+ misranked rows.* polynomial .*100"),
    ):
        with pytest.raises(QualityError, match=message) as caught:
            fit_collection(tmp_path / "run", "toy", options)
        assert caught.value.exit_code == 3


def test_the_shipped_fit_is_of_the_present_default():
    fit = calibrate.load("max-retrieval")
    assert (fit.version, fit.schema_version) == (4, "1.3")
    assert fit.source["options"] == {
        "degree": 4, "rows": "all", "gate": 0.0, "prior_rows": 10.0, "trained_up_to": 16,
    }  # fmt: skip
    assert fit.quality["q"] == 0.5625


@pytest.mark.slow
def test_the_shipped_fit_is_what_calibrate_fit_publishes(tmp_path):
    """By the commands as they are, without an option."""
    shipped = calibrate.load("max-retrieval")
    run, store = tmp_path / "run", tmp_path / "fits"
    for words in (["collect", "--out", run], ["fit", run, "--name", "again", "--store", store]):
        command = [sys.executable, "-m", "calibrate", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True, env=as_users())
    again = calibrate.load("again", store)
    assert again.rule == shipped.rule
    assert again.quality["q"] == shipped.quality["q"]
    assert again.source["options"] == shipped.source["options"]
    # Another processor rounds the head's logits otherwise.
    np.testing.assert_allclose(again.only.coefficients, shipped.only.coefficients, rtol=2e-3)
