"""The study of SmolLM2, on a tiny model in a package of its own, and its tables."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import smollm2_results
import torch
from commands import call
from study import mean_and_error
from study_pages import STUDIES, page_of, record_of
from tiny_gguf import logits_of, small_model, write_gguf

from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.store.saving import save_to_store
from calibrate.transformers.folders import ModelFolder


@pytest.fixture
def study(monkeypatch):
    """The script as a module that works in the test's folder, on a few short examples."""
    spec = importlib.util.spec_from_file_location("smollm2", STUDIES / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RUN, module.RESULT = Path("runs").absolute(), Path("smollm2.json").absolute()
    module.HELD_OUT = {
        "unseen": module.HeldOut(False, 200, 4),
        "text": module.HeldOut(True, 200, 2),
        "long": module.HeldOut(False, 256, 2),
    }
    module.JOBS = 1
    module.FIT_EXAMPLES, module.FIT_LENGTH, module.MAX_STEPS = 8, 200, 1

    def run_calibrate(*arguments):
        no_gain = arguments[:2] == ("model", "fit") and module.CONSTANT in arguments
        call(*arguments, code=3 if no_gain else 0)

    monkeypatch.setattr(module, "run_calibrate", run_calibrate)
    return module


def pack(folder):
    """Puts the wheel of a tiny model where the study downloads one."""
    model = small_model()
    folder.mkdir(parents=True)
    with ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.write(write_gguf(Path("gguf"), model) / "tiny.gguf", "tiny/tiny.gguf")
        wheel.writestr("tiny-1.dist-info/LICENSE", "terms")
    return model


def test_the_model_of_a_package_is_saved_with_its_licence(study):
    model = pack(study.RUN / "package")
    study.get_model()
    folder = study.RUN / study.MODEL_NAME
    assert (folder / "LICENSE").read_text() == "terms"
    torch.testing.assert_close(logits_of(ModelFolder(folder).load("float32")), logits_of(model))


@pytest.mark.slow
def test_every_step_on_a_tiny_model(study):
    pack(study.RUN / "package")
    for step in study.STEPS.values():
        step()
    record = json.loads(study.RESULT.read_text())
    assert list(record["verdicts"]) == ["own-polynomial"]  # a constant has no gain here
    assert all("own" not in row["rules"] for row in record["found"])
    assert study.markdown(record)
    assert Path("smollm2.png").read_bytes().startswith(b"\x89PNG")

    (study.RUN / "fits").rename(study.RUN / "other-fits")
    constants = Fit(RuleForm.constant(), (Entry((1.5,), (), layer=1, head=2),))
    quartic = Entry((0.0, 0.0, 0.0, 0.1, 1.0), (0.0, 9.0), layer=1, head=2)
    for name, fit in zip(study.FITS, (constants, Fit(RuleForm(0.0), (quartic,))), strict=True):
        planted = replace(fit, name=name, evidence={"verdict": "planted"})
        save_to_store(planted, study.RUN / "fits")
    study.evaluate()
    record = json.loads(study.RESULT.read_text())
    assert record["verdicts"] == {"own": "planted", "own-polynomial": "planted"}
    means = [row["rules"] for row in record["found"]
             if row["kind"] == "held-out" and row["template"] == "all"]  # fmt: skip
    assert len(means) == 2
    for rules in means:
        log_p = {rule: numbers["log_p"] for rule, numbers in rules.items()}
        lead = log_p["own-polynomial"]["gain"][0] - log_p["own"]["gain"][0]
        assert log_p["own-polynomial"]["lead"][0] == pytest.approx(lead, abs=1e-6)


def test_the_figure_has_a_row_of_one_scale_for_each_measure_and_the_published_fits():
    figure = smollm2_results.figure_of(record_of("smollm2"))
    shown = [ax for ax in figure.axes if ax.axison]
    lengths = [f"templates, {n} tokens" for n in ("250", "900", "2,000")]
    titles = [ax.get_title() for ax in shown]
    assert titles == [*lengths, *lengths, "text, 250 tokens", "text, 900 tokens"]
    for row in (shown[:3], shown[3:6], shown[6:]):
        assert len({ax.get_xlim() for ax in row}) == 1
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["baseline", "constants", "polynomials"]


def test_held_out_texts_are_prose_of_three_domains(study):
    study.write_texts()
    texts = {path.stem: path.read_text() for path in (study.RUN / "texts").iterdir()}
    assert set(texts) == set(study.DOMAINS)
    assert min(map(len, texts.values())) > 50_000
    assert ">>>" not in texts["documentation"]


def test_the_page_has_the_numbers_of_the_record_that_no_table_has():
    record, page = record_of("smollm2"), " ".join(page_of("smollm2").split())
    rows = [row["rules"]["own"] for row in record["found"]
            if row["length"] == 256 and row["template"] != "all"]  # fmt: skip
    gains = np.array([[row["right"]["gain"][0], row["log_p"]["gain"][0]] for row in rows])
    mean, error = mean_and_error(gains)
    assert f"{100 * mean[0]:+.1f} ± {100 * error[0]:.1f} points over these templates" in page
    assert f"{mean[1]:+.2f} ± {error[1]:.2f} nats over four templates" in page
    text = {row["length"]: row["rules"] for row in record["found"]
            if row["kind"] == "text" and row["template"] == "all"}  # fmt: skip
    perplexity = {
        (rule, n): np.exp(-of[rule]["log_p"]["mean"][0]) for n, of in text.items() for rule in of
    }
    for n in (250, 900):
        assert f"from {perplexity['baseline', n]:.2f} to {perplexity['own', n]:.2f}" in page
    short, long = (perplexity["own-polynomial", n] for n in (250, 900))
    assert f"polynomials to {short:.2f} and {long:.2f}" in page
