"""The study of SmolLM2, on a tiny model in a package of its own, and its tables."""

import argparse
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
from study_pages import RESULTS, page_of, record_of
from tiny_gguf import logits_of, small_model, write_gguf

from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.store.saving import save_to_store
from calibrate.transformers.folders import ModelFolder

SCRIPTS = Path(__file__).parents[1] / "scripts"
OPTIONS = argparse.Namespace(examples=4, fit_examples=8, only="unseen,text,long", jobs=1)


@pytest.fixture
def study():
    """The script as a module that works in the test's folder, on texts of at most 256 tokens."""
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPTS / "studies" / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RUNS, module.RESULT = Path("runs").absolute(), Path("smollm2.json").absolute()
    module.LENGTH, module.TEN_LAYERS = "200", range(1, 2)
    module.UNSEEN = ("json", "list")  # the tokenizer does not know the words of the others
    module.HELD_OUT = {
        "unseen": (("json", "list"), "200", 1.0), "text": ((), "200,250", 0.5),
        "long": (("json", "list"), "256", 0.5),
    }  # fmt: skip
    module.STEPS_OF_FIT = module.HEAD_SCALE_STEPS = module.DIAGNOSED = 1
    module.BETAS, module.LONG_TEXTS, module.LETTERS = (1.001, 1.01, 9.0), 8, 100
    return module


def pack(folder, licence="Apache-2.0", of_model="apache-2.0"):
    model = small_model()
    file = write_gguf(Path("gguf"), model, licence=of_model) / "tiny.gguf"
    folder.mkdir(parents=True)
    with ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.write(file, "tiny/tiny.gguf")
        wheel.writestr("tiny-1.dist-info/LICENSE", "terms")
        wheel.writestr(
            "tiny-1.dist-info/METADATA", f"Name: tiny\nVersion: 1\nLicense: {licence}\n\ntext"
        )
    return model


@pytest.mark.slow
def test_every_step_on_a_tiny_model(study, monkeypatch, capsys):
    model = pack(study.RUNS / "package")
    study.get_model(OPTIONS)
    printed = capsys.readouterr().err
    assert "tiny 1: licence Apache-2.0" in printed
    assert "tiny.gguf: licence apache-2.0" in printed
    folder = study.RUNS / study.MODEL_NAME
    assert (folder / "LICENSE").read_text() == "terms"
    loaded = ModelFolder(folder).load("float32")
    torch.testing.assert_close(logits_of(loaded), logits_of(model))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    study.get_model(OPTIONS)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written

    done = []

    def command(name, *arguments):
        done.append(name)
        no_gain = name == "fit" and study.CONSTANT in arguments
        call("model", name, *arguments, code=3 if no_gain else 0)
        study.add_time(name, 60.0)

    monkeypatch.setattr(study, "command", command)
    for step in ("collect", "fit", "baselines", "head-scale"):
        study.STEPS[step](OPTIONS)
    assert done == ["collect"] * 4 + ["fit", "fit", "collect"]
    study.evaluate(OPTIONS)
    without = json.loads(study.RESULT.read_text())
    assert list(without["verdicts"]) == ["own-polynomial"]
    assert all("own" not in row["rules"] for row in without["found"])
    assert study.markdown(without)

    constants = Fit(RuleForm.constant(), (Entry((1.5,), (), layer=1, head=2),))
    quartic = Entry((0.0, 0.0, 0.0, 0.1, 1.0), (0.0, 9.0), layer=1, head=2)
    polynomials = Fit(RuleForm(0.0), (quartic,))
    for name, rules in zip(study.KINDS_OF_FITS, (constants, polynomials), strict=True):
        planted = replace(
            rules, name=name, source={"options": {"interpolation": 0.25}},
            evidence={"verdict": "planted"},
        )  # fmt: skip
        save_to_store(planted, study.RUNS / "fits")
    study.STEPS["fit"](OPTIONS)
    assert done.count("fit") == 2
    study.evaluate(OPTIONS)
    record = json.loads(study.RESULT.read_text())
    np.testing.assert_allclose(record["baselines"]["own-looser"], [[1 + 0.5 * 0.5303 / 0.25]] * 2)
    looser = [0.0, 0.0, 0.0, 0.1 * 0.5261 / 0.25, 1.0]
    np.testing.assert_allclose(record["baselines"]["own-polynomial-looser"], [looser] * 2)
    assert record["baselines"]["layers"] == [[1.01], [1.01]]
    rows = {(row["kind"], row["template"], row["length"]): row for row in record["found"]}
    assert set(rows["held-out", "all", 200]["rules"]) >= {
        "baseline", "own", "own-looser", "own-polynomial", "own-polynomial-looser", "layers",
    }  # fmt: skip
    assert set(rows["held-out", "all", 256]["rules"]) == {"baseline", "own", "own-polynomial"}
    lead = rows["held-out", "all", 200]["rules"]["own-polynomial"]["log_p"]
    gain = rows["held-out", "all", 200]["rules"]["own"]["log_p"]["gain"]
    assert lead["lead"][0] == pytest.approx(lead["gain"][0] - gain[0], abs=1e-6)
    text = rows["text", "all", 200]["rules"]
    assert text["own"]["kl"]["mean"][0] > text["layers"]["kl"]["mean"][0] > 0
    harms = {(row["length"], row["rule"]): row for row in record["harm"]}
    assert {rule for length, rule in harms if length == 200} == set(text) - {"baseline"}
    harm = harms[200, "own"]
    assert harm["kl"] == pytest.approx(text["own"]["kl"]["mean"][0])
    assert harm["kl_999"] > harm["kl"]
    assert 0 < harm["same_top"] <= 1
    assert {part["text"] for part in harm["domains"]} == set(study.DOMAINS)
    for part in harm["domains"]:
        of_domain = rows["text", part["text"], 200]["rules"]["own"]
        assert part["kl"] == pytest.approx(of_domain["kl"]["mean"][0])
        assert part["perplexity"] == pytest.approx(np.exp(-of_domain["log_p"]["mean"][0]))
    times = record["times"]
    study.evaluate(argparse.Namespace(**vars(OPTIONS) | {"only": "text"}))
    again = json.loads(study.RESULT.read_text())
    assert sorted(map(str, again["found"])) == sorted(map(str, record["found"]))
    assert again["times"] == times
    assert Path("smollm2.png").read_bytes().startswith(b"\x89PNG")
    assert record["times"]["collect"] == 5
    assert record["times"]["evaluate"] > 0
    assert record["verdicts"] == {"own": "planted", "own-polynomial": "planted"}


def row_of(kind, length, **rules):
    return {"kind": kind, "template": "all", "length": length, "examples": 4, "rules": rules}


def record_of_sets(*found, harm=(), verdict="use it"):
    same = {"package": "tiny", "fingerprint": "sha256:0", "verdicts": {"own": verdict}}
    more = {"baselines": {}, "times": {"evaluate": 1.0}}
    return same | more | {"found": list(found), "harm": list(harm)}


def test_an_evaluation_of_some_sets_replaces_these_in_the_record():
    before = record_of_sets(row_of("held-out", 256), row_of("text", 250), row_of("text", 900))
    del before["harm"]  # as records had none
    harm = {"length": 250, "rule": "own"}
    now = record_of_sets(row_of("text", 250, own={}), harm=[harm])
    now["times"] = {"evaluate": 2.0}
    found = smollm2_results.joined(now, before)
    assert [(row["kind"], row["length"]) for row in found["found"]] == [
        ("text", 250), ("held-out", 256), ("text", 900),
    ]  # fmt: skip
    assert found["found"][0]["rules"] == {"own": {}}
    assert found["harm"] == [harm]
    assert found["times"] == before["times"]


def test_a_record_of_other_fits_is_replaced():
    before = record_of_sets(row_of("held-out", 256), verdict="keep the baseline")
    now = record_of_sets(row_of("text", 250))
    assert smollm2_results.joined(now, before) == now
    assert smollm2_results.joined(now, None) == now


def test_the_table_of_harm_has_each_fit_and_length():
    def numbers(x):
        return {
            "n_tokens": 1000, "kl_999": x, "same_top": 1 - x, "perplexity": 10 + x,
            "baseline_perplexity": 10.0,
        }  # fmt: skip

    harm = [
        {"length": length, "rule": rule, **numbers(x), "domains": []}
        for length, rule, x in ((250, "own", 0.2), (250, "version-2", 0.1), (900, "own", 0.4))
    ]
    record = record_of_sets(row_of("held-out", 256), harm=harm)
    without = smollm2_results.markdown(record_of_sets(row_of("held-out", 256)))
    added = [line for line in smollm2_results.markdown(record) if line not in without]
    assert added == [
        "| constants | 250 | 1,000 | 10.00 | 10.20 | 0.200 | 80.00 |",
        "| constants | 900 | 1,000 | 10.00 | 10.40 | 0.400 | 60.00 |",
    ]


def test_the_figure_has_a_row_of_one_scale_for_each_measure_and_the_published_fits():
    record = json.loads((RESULTS / "smollm2.json").read_text())
    figure = smollm2_results.figure_of(record)
    shown = [ax for ax in figure.axes if ax.axison]
    lengths = [f"templates, {n} tokens" for n in ("250", "900", "2,000")]
    titles = [ax.get_title() for ax in shown]
    assert titles == [*lengths, *lengths, "text, 250 tokens", "text, 900 tokens"]
    for row in (shown[:3], shown[3:6], shown[6:]):
        assert len({ax.get_xlim() for ax in row}) == 1
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["baseline", "constants", "polynomials"]


@pytest.mark.parametrize(
    ("licences", "message"),
    [(("Other",), "^tiny 1 .*Other, .*Apache-2.0"),
     (("Apache-2.0", "other"), r"^tiny\.gguf .*other, .*Apache-2.0")],
)  # fmt: skip
def test_a_package_under_other_terms(study, licences, message):
    pack(study.RUNS / "package", *licences)
    with pytest.raises(SystemExit, match=message):
        study.get_model(OPTIONS)
    assert not (study.RUNS / study.MODEL_NAME).exists()


def test_held_out_texts_are_prose_of_three_domains(study):
    study.write_texts()
    texts = {path.stem: path.read_text() for path in (study.RUNS / "texts").iterdir()}
    assert set(texts) == set(study.DOMAINS)
    assert min(map(len, texts.values())) > 50_000
    of_head_scale = (study.RUNS / "long-texts.jsonl").read_text()
    for paragraph in texts["documentation"].split("\n\n"):
        assert ">>>" not in paragraph
        assert json.dumps(paragraph)[1:-1] not in of_head_scale


def test_the_answer_of_the_page_has_errors_over_templates():
    rows = [row for row in record_of("smollm2")["found"] if row["length"] == 256]
    rows = [row["rules"]["own"] for row in rows if row["template"] != "all"]
    exact, nats = (np.array([row[name]["gain"][0] for row in rows]) for name in ("right", "log_p"))
    errors = [values.std(ddof=1) / np.sqrt(len(values)) for values in (exact, nats)]
    page = " ".join(page_of("smollm2").split())
    assert f"± {100 * errors[0]:.1f} over templates" in page
    assert f"{nats.mean():.2f} ± {errors[1]:.2f} nats over templates" in page
