"""Scores of examples under fits, their cache, and `calibrate model evaluate`."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from browser import CHROMIUM
from commands import call, refusal
from fake_progress import Told, stopping_after
from test_model_examples import collected
from test_model_fit import planted
from test_report import Text, check_in_a_browser
from tiny_causal import causal_model, runner_of, save, some_examples

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.errors import CoefficientsError
from calibrate.model.scoring import result_cache, score_fits
from calibrate.model.splits import TEST, assign_splits
from calibrate.prompts.examples import ExampleCollection
from calibrate.rows.collection import open_collection
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.store.saving import save_to_store
from calibrate.transformers import apply


def constant(beta, layer=None, head=None, **named):
    return Fit(
        RuleForm.constant(min_beta=0.5), (Entry((beta,), (), layer=layer, head=head),), **named
    )


def by_hand(model, examples, indices):
    log_p = []
    for i in indices:
        tokens = torch.tensor(examples.examples[i].tokens.tolist())[None]
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0].float().log_softmax(-1)
        positions = torch.arange(examples.examples[i].start, tokens.shape[1])
        log_p.append(logits[positions - 1, tokens[0, positions]].sum().item())
    return log_p


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_scores_are_those_of_an_applied_fit(kind):
    examples, indices = some_examples(text=True), [3, 0, 1]
    fits = {"baseline": calibrate.identity(), "one": constant(1.7, layer=1, head=2)}
    fits["paper"] = calibrate.load("paper")
    model = causal_model(kind)
    scores = score_fits(runner_of(model), examples, indices, fits)
    np.testing.assert_allclose(
        scores["baseline"].log_p, by_hand(model, examples, indices), rtol=1e-4
    )
    assert np.abs(scores["one"].log_p - scores["baseline"].log_p).max() > 1e-3
    for label in ("one", "paper"):
        apply(model, fits[label])
        np.testing.assert_allclose(
            scores[label].log_p, by_hand(model, examples, indices), rtol=1e-4
        )


def never():
    raise AssertionError("the model is loaded")


def cache_of(digest):
    return result_cache(SimpleNamespace(folder=Path("run"), digest=digest), "cpu")


def test_an_interrupt_keeps_the_finished_units():
    """A unit is kept under all fits before progress advances."""
    runner, examples = runner_of(causal_model()), some_examples()
    fits = {"a": constant(1.2), "b": constant(1.4)}
    for stop, n_kept in enumerate((2, 2, 4, 4), 1):
        told = stopping_after(stop)
        shutil.rmtree("run", ignore_errors=True)
        with pytest.raises(KeyboardInterrupt):
            score_fits(runner, examples, range(4), fits, cache_of("sha256:a"), told, unit_tokens=40)
        tokens = [work for work, _ in told.steps]
        assert tokens == [40, 40, 53, 53][:stop]
        assert len(list(Path("run/.passes").glob("*.npz"))) == n_kept


def test_cached_scores_are_not_computed_again():
    examples, model, score = some_examples(), causal_model(), partial(score_fits, unit_tokens=40)
    cache, fits = cache_of("sha256:a"), {"a": constant(1.2), "b": constant(1.4)}
    first = score(runner_of(model), examples, range(4), fits, cache)
    files = sorted(Path("run/.passes").glob("*.npz"))
    assert len(files) == 4  # two units of two fits
    told, nothing = Told(), runner_of(never)
    again = score(nothing, examples, range(4), fits, cache, told)
    np.testing.assert_equal(again, first)
    assert told.steps == [(40, True)] * 2 + [(53, True)] * 2  # unit by unit
    renamed = {"c": replace(fits["b"], name="other", source={"seed": 1})}  # of the same betas
    np.testing.assert_equal(score(nothing, examples, range(4), renamed, cache)["c"], first["b"])
    others = ((range(4), cache_of("sha256:b")), (range(3), cache))
    for indices, other in others:
        with pytest.raises(AssertionError, match="the model is loaded"):
            score(nothing, examples, indices, fits, other)
    files[0].unlink()
    repaired = score(runner_of(model), examples, range(4), fits, cache)
    np.testing.assert_equal(repaired, first)


def test_all_fits_are_verified_before_any_is_scored():
    model, told = causal_model(), Told()
    for fit, message in (
        (constant(1.2, layer=2), r"layers \[2\].* LlamaForCausalLM "),
        (constant(1.2, layer=0, head=4), r"head 4\b.* 4 heads"),
    ):
        with pytest.raises(CoefficientsError, match=message):
            score_fits(
                runner_of(model), some_examples(), [0], {"ok": constant(1.1), "bad": fit},
                progress=told,
            )  # fmt: skip
    with pytest.raises(CoefficientsError, match="Bloom"):
        score_fits(runner_of(causal_model("bloom")), some_examples(), [0], {"ok": constant(1.1)})
    assert told.steps == []


def scored(*arguments):
    return json.loads(call("model", "evaluate", *arguments, "--json").stdout)


def test_a_fit_to_the_collection_is_evaluated_on_its_test_split(here):
    """Head 0 of layer 0 attends to the answer, but too diffusely."""
    collection = planted("runs/p", count=40)
    source = {"collection": collection.digest, "fingerprint": collection.fingerprint}
    for name, of in (("head", {}), ("own", source)):
        save_to_store(constant(3.0, layer=0, head=0, name=name, source=of), Path("fits"))
    record = scored("runs/p", "head")
    assert list(record["rules"]) == ["baseline", "head@1", "paper"]
    assert record["all"]["items"] == 80
    gain = record["all"]["rules"]["head@1"]["log_p"]
    assert gain["gain"] > 3 * gain["gain_error"] > 0
    assert record["verdicts"]["head@1"]["outcome"] == "gain"
    baseline = record["all"]["rules"]["baseline"]["log_p"]["mean"]
    assert baseline == pytest.approx(collection.scores.log_p.mean())
    on_test = scored("runs/p", "own", "head")
    in_test = assign_splits(collection.set) == TEST
    assert on_test["all"]["items"] == in_test.sum() < 30
    assert on_test["scored"].startswith(f"{in_test.sum()} of the 80 examples of runs/p")
    rules, log_p = on_test["all"]["rules"], collection.scores.log_p[in_test]
    assert rules["baseline"]["log_p"]["mean"] == pytest.approx(log_p.mean())
    assert rules["own@1"] == rules["head@1"]


def test_text_alone_is_measured_by_domain(model, here):
    Path("texts").mkdir()
    for name, text in (("licences", "is on the table. "), ("poems", "on the table. ")):
        Path(f"texts/{name}.txt").write_text(f"The apple {text}" * 60)
    options = ("--retention-text", "texts", "--lengths", "32", "--examples", "4", "--out", "text")
    call("model", "collect", "--model", model, *options)
    save_to_store(constant(3.0, layer=0, head=0, name="head"), Path("fits"))
    parts = scored("text", "head")["strata"]
    assert [part["template"] for part in parts] == ["licences", "poems"]
    assert all(part["rules"]["head@1"]["kl"]["mean"] > 0 for part in parts)


def test_the_same_command_prints_the_same_and_computes_nothing(model, here):
    Path("text.txt").write_text("The apple is on the table. " * 60)
    collected(model, text=Path("text.txt"))
    out = call("model", "evaluate", "runs/a").stdout
    for words in ("all 24 examples of runs/a", "Exact match, %", "NLL, nats", "\n text "):
        assert words in out
    passes = {path: path.stat().st_ino for path in Path("runs/a/.passes").iterdir()}
    assert call("model", "evaluate", "runs/a").stdout == out
    assert {path: path.stat().st_ino for path in Path("runs/a/.passes").iterdir()} == passes


def test_a_fit_of_another_model_is_scored_with_a_warning(model, here):
    collected(model, templates=("list",), lengths=(64,), count=2)
    result = call("model", "evaluate", "runs/a", "max-retrieval@1")
    assert "warning: max-retrieval@1 " in result.stderr


@pytest.fixture
def reported(model, here):
    Path("text.txt").write_text("The apple is on the table. " * 60)
    collection = collected(model, text=Path("text.txt"), count=8)
    source = {
        "collection": collection.digest, "fingerprint": collection.fingerprint, "head": "tiny",
        "options": {"through": "model", "trained_up_to": 64},
    }  # fmt: skip
    entries = (*constant(1.5, 0, 1).entries, *constant(0.7, 1, 2).entries)
    kinds = [{"kind": "constant", "gain": 0.25, "se": 0.0125}]
    evidence = {"kinds": kinds, "verdict": "good"}
    fit = Fit(RuleForm.constant(min_beta=0.5), entries, "own", source=source, evidence=evidence)
    return save_to_store(fit, Path("fits"))[0]


@pytest.mark.slow
def test_the_report_of_a_fit_of_a_model(reported):
    record = json.loads(call("report", "own", "--out", "p.html", "--json").stdout)
    text = Path("p.html").read_text()
    page = " ".join(Text(text).words)
    scores = scored("runs/a", "own")
    assert record["verdict"] == reported.verdict
    assert record["verdict"] in page
    n = sum(stratum["items"] for stratum in scores["strata"])
    n_all = len(open_collection(Path("runs/a"), ExampleCollection).set.examples)
    assert 0 < n < n_all
    for words in (
        f"{n} of the {n_all} examples of runs/a: the test split of own@1", "log n / log 64",
        "transformers.apply(model, fit)", "Exact match, %",
        reported.source["fingerprint"],
    ):  # fmt: skip
        assert words in page
    if CHROMIUM:
        check_in_a_browser(Path("p.html").resolve(), 400, "dark")


@pytest.mark.slow
def test_the_report_of_a_collection_elsewhere(reported):
    Path("runs/a").rename("elsewhere")
    line = refusal("report", "own", "--out", "p.html")
    assert " own@1 " in line
    assert line.endswith("--run")
    call("report", "own", "--out", "p.html", "--run", "elsewhere")
    assert Path("p.html").exists()


def test_a_collection_knows_its_model_and_refuses_another_one(model, here):
    moved = Path(shutil.copytree(model, "moved"))
    collected(moved, templates=("towns",), lengths=(64,), count=2)
    moved.rename("elsewhere")
    line = refusal("model", "evaluate", "runs/a")
    assert line.endswith("--model")
    call("model", "evaluate", "runs/a", "--model", "elsewhere")
    other = save(Path("other"), causal_model(rms_norm_eps=1e-4))
    line = refusal("model", "evaluate", "runs/a", "--model", other)
    assert "other is not the model" in line
    assert "--model" in line


def test_each_kind_of_collection_has_its_own_command(model, here):
    collected(model, templates=("towns",), lengths=(64,), count=2)
    for command in (("diagnose",), ("fit", "--name", "x")):
        assert "`calibrate model fit`" in refusal(*command, "runs/a")
    call("collect", "--sizes", "16", "--sets", "8", "--out", "runs/rows")
    for command in (("fit", "--name", "x"), ("evaluate",)):
        assert "`calibrate fit`" in refusal("model", *command, "runs/rows")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("nowhere",), "nowhere is not a collection"),
        (("runs/a", "nothing"), "'nothing'"),
        (("runs/a", "deep"), "layers [7]"),
        (("runs/a", "own"), "test split of own@1"),
    ],
)
def test_absent_and_unsuitable_fits_and_collections_are_refused(model, here, arguments, value):
    digest = collected(model, templates=("towns",), lengths=(64,), count=1).digest
    save_to_store(constant(1.2, layer=7, name="deep"), Path("fits"))
    save_to_store(constant(1.2, name="own", source={"collection": digest}), Path("fits"))
    assert value in refusal("model", "evaluate", *arguments)
