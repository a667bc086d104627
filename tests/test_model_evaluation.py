"""Scores of examples under fits, their comparison, and `calibrate evaluate` of whole models."""

import json
import os
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
from calibrate.cli.model_scoring import score_fit
from calibrate.core.rule import Rule
from calibrate.datasets.collection import open_collection
from calibrate.datasets.examples import Cell, Example, ExampleSet, Scores
from calibrate.errors import CoefficientsError
from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.model.collect_examples import collect_examples, plan
from calibrate.model.objective import compare
from calibrate.model.scoring import result_cache, score_fits
from calibrate.model.splits import TEST, splits_of
from calibrate.prompts.make_examples import ExampleSpec
from calibrate.prompts.retrieval_task import TEMPLATES
from calibrate.store.entry import Entry
from calibrate.store.fit import Fit
from calibrate.store.publishing import publish
from calibrate.transformers import apply


def constant(beta, layer=None, head=None, **named):
    return Fit(Rule.constant(min_beta=0.5), (Entry((beta,), (), layer=layer, head=head),), **named)


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
def test_scores_are_those_of_the_registered_fit(kind):
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


def kept_by(digest):
    return result_cache(SimpleNamespace(folder=Path("run"), digest=digest), "cpu")


def test_an_interrupt_keeps_what_is_done():
    """A unit under a rule is kept before progress advances by its last batch."""
    runner, examples = runner_of(causal_model()), some_examples()
    fits = {"a": constant(1.2), "b": constant(1.4)}
    for stop, n_kept in enumerate((1, 2, 2, 2, 3, 4), 1):
        told = stopping_after(stop)
        shutil.rmtree("run", ignore_errors=True)
        with pytest.raises(KeyboardInterrupt):
            score_fits(runner, examples, range(4), fits, kept_by("sha256:a"), told, unit_tokens=40)
        tokens = [work for work, _ in told.steps]
        assert tokens == [40, 40, 20, 20, 33, 33][:stop]  # one batch in a unit, and two
        assert len(list(Path("run/.passes").glob("*.npz"))) == n_kept


def test_kept_scores_are_scored_once():
    examples, model, score = some_examples(), causal_model(), partial(score_fits, unit_tokens=40)
    kept, fits = kept_by("sha256:a"), {"a": constant(1.2), "b": constant(1.4)}
    first = score(runner_of(model), examples, range(4), fits, kept)
    files = sorted(Path("run/.passes").glob("*.npz"))
    assert len(files) == 4  # two units of two fits
    told, nothing = Told(), runner_of(never)
    again = score(nothing, examples, range(4), fits, kept, told)
    np.testing.assert_equal(again, first)
    assert told.steps == [(40, True)] * 2 + [(20, True), (33, True)] * 2  # unit by unit
    renamed = {"c": replace(fits["b"], name="other", source={"seed": 1})}  # of the same betas
    np.testing.assert_equal(score(nothing, examples, range(4), renamed, kept)["c"], first["b"])
    others = ((range(4), kept_by("sha256:b")), (range(3), kept))
    for indices, cache in others:
        with pytest.raises(AssertionError, match="the model is loaded"):
            score(nothing, examples, indices, fits, cache)
    lost, damaged = files[0], files[-1]
    lost.unlink()
    os.truncate(damaged, 50)
    with pytest.warns(UserWarning, match=damaged.name):
        repaired = score(runner_of(model), examples, range(4), fits, kept)
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


def test_means_by_hand():
    """Answers have equal weight, and so have lengths of text, per token, in tokens right."""
    cells = [Cell(*cell) for cell in (("a", 32, False), ("a", 64, False), ("text", 32, True))]
    tokens, empty = np.zeros(12, np.int32), Cell("empty", 32, False)
    members = [Example(tokens, 2, cell) for cell in (0, 0, 0, 1, 1, 2, 2)]
    examples = ExampleSet((*cells, empty), tuple(members))
    plain = Scores.of_plain(np.full(7, -90.0), np.int32([10, 10, 8, 9, 8, 5, 6]))
    own = Scores.of_plain(
        plain.log_p + np.array([1, 2, 3, 5, 7, 1, 2]), np.int32([10] * 5 + [7, 8])
    )
    evidence = compare(examples, range(7), {"own": own, "baseline": plain})
    assert evidence.rules == ("baseline", "own")
    assert evidence.strata[0] == (32, "a", False, False)
    assert evidence.answers.gain("own", LOG_P).mean == pytest.approx((3 * 2 + 2 * 6) / 5)
    assert evidence.text.gain("own", LOG_P).mean == pytest.approx(1.5 / 10)
    assert evidence.answers.mean("baseline", RIGHT).mean == pytest.approx(2 / 5)
    assert evidence.answers.mean("own", RIGHT).mean == pytest.approx(1)
    assert evidence.text.by("size")[32].mean("baseline", RIGHT).mean == pytest.approx(5.5 / 10)
    assert {n: part.n for n, part in evidence.answers.by("size").items()} == {32: 3, 64: 2}


def scored(*arguments):
    return json.loads(call("model", "evaluate", *arguments, "--json").stdout)


def test_a_planted_model_is_sharpened_and_a_constant_is_not_as_good(here):
    """Head 0 of layer 0 finds the answer, too diffusely; head 2 misleads."""
    collection = planted("runs/p", count=40)
    publish(constant(3.0, layer=0, head=0, name="head"), Path("fits"))
    source = {"collection": collection.digest, "fingerprint": collection.fingerprint}
    publish(constant(3.0, layer=0, head=0, name="own", source=source), Path("fits"))
    record = scored("runs/p", "--fits", "head")
    rules = [rule["rule"] for rule in record["rules"]]
    assert rules == ["baseline", "head@1", "paper"]
    assert record["all"]["items"] == 80
    by_rule = record["all"]["rules"]
    assert by_rule["head@1"]["log_p"]["gain"] > 3 * by_rule["head@1"]["log_p"]["gain_error"] > 0
    verdict = record["verdicts"]["head@1"]
    assert verdict["outcome"] == "gain"
    assert verdict["text"].startswith("head@1 is significantly better")
    plain = by_rule["baseline"]["log_p"]["mean"]
    assert plain == pytest.approx(collection.scores.log_p.mean())
    of_test = scored("runs/p", "--fits", "own,head")
    in_test = splits_of(collection.set) == TEST
    assert of_test["all"]["items"] == in_test.sum() < 30
    assert of_test["scored"] == (
        f"{in_test.sum()} of the 80 examples of runs/p: the test split of own@1"
    )
    test_rules, log_p = of_test["all"]["rules"], collection.scores.log_p[in_test]
    assert test_rules["baseline"]["log_p"]["mean"] == pytest.approx(log_p.mean())
    assert test_rules["own@1"] == test_rules["head@1"]


def test_text_alone_is_measured_by_domain(model, here):
    """As a user measures text that the model has memorised, under a fit that is published."""
    Path("texts").mkdir()
    for name, text in (
        ("licences", "The apple is on the table. "),
        ("poems", "The apple on the table. "),
    ):
        Path(f"texts/{name}.txt").write_text(text * 60)
    options = ("--retention-text", "texts", "--lengths", "32", "--examples", "4", "--out", "text")
    call("model", "collect", "--model", model, *options)
    publish(constant(3.0, layer=0, head=0, name="head"), Path("fits"))
    harm = scored("text", "--fits", "head")["text_harm"]["head@1"]
    assert [domain["text"] for domain in harm["domains"]] == ["licences", "poems"]
    assert all(domain["kl"] > 0 for domain in harm["domains"])


def test_the_tables_and_the_lines(model, here):
    Path("text.txt").write_text("The apple is on the table. " * 60)
    collected(model, text=Path("text.txt"))
    arguments = ("model", "evaluate", "runs/a")
    out = call(*arguments).stdout
    for words in ("Scores of tiny", "all 24 examples of runs/a", "Exact match, %",
                  "NLL of the answer", " text ", "the paper's published"):  # fmt: skip
        assert words in out
    kept = {path: path.stat().st_ino for path in Path("runs/a/.passes").iterdir()}
    assert call(*arguments).stdout == out
    assert {path: path.stat().st_ino for path in Path("runs/a/.passes").iterdir()} == kept


def test_a_fit_of_another_model_is_scored_with_a_warning(model, here):
    collected(model, templates=("list",), lengths=(64,), count=2)
    result = call("model", "evaluate", "runs/a", "--fits", "max-retrieval@1")
    assert "warning: max-retrieval@1 " in result.stderr


def test_the_answers_that_change_most_are_samples(model, here):
    Path("text.txt").write_text("The apple is on the table. " * 60)
    job = plan(model, ExampleSpec(None, tuple(TEMPLATES), Path("text.txt"), (64, 96), 4, 0))
    collection, decode = collect_examples(job, Path("a")), job.folder.tokenizer().decode
    record = score_fit(constant(1.2, source={"collection": collection.digest}), job, collection)
    examples, stratum_of = collection.set.examples, record.evidence.stratum
    in_test = np.flatnonzero(splits_of(collection.set) == TEST)
    assert len({stratum_of[sample.item] for sample in record.samples}) == len(record.samples) == 8
    change = np.abs(np.subtract(*np.exp(record.evidence.values[LOG_P][:2].astype(float))))
    answers = np.array([not record.evidence.strata[i].protected for i in stratum_of])
    assert change[record.samples[0].item] == change[answers].max()  # no exact match changes
    for item, title, prompt, answer in record.samples:
        example, stratum = examples[in_test[item]], record.evidence.strata[stratum_of[item]]
        assert change[item] == change[stratum_of == stratum_of[item]].max()
        assert title == f"{stratum.template}, {stratum.size} tokens"
        assert (prompt, answer) == tuple(map(decode, np.split(example.tokens, [example.start])))
        assert not stratum.protected


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
    fit = Fit(Rule.constant(min_beta=0.5), entries, "own", source=source, evidence=evidence)
    return publish(fit, Path("fits"))[0]


@pytest.mark.slow
def test_the_report_of_a_fit_of_a_model(reported):
    record = json.loads(call("report", "own", "--out", "p.html", "--json").stdout)
    text = Path("p.html").read_text()
    page = " ".join(Text(text).words)
    scores = scored("runs/a", "--fits", "own")
    assert record["verdict"] == reported.verdict
    assert record["verdict"] in page
    n = sum(stratum["items"] for stratum in scores["strata"])
    n_all = len(open_collection(Path("runs/a")).set.examples)
    assert 0 < n < n_all
    for words in (
        f"{n} of the {n_all} examples of runs/a: the test split of own@1", "log n / log 64",
        "transformers.apply(model, fit)", "Exact match, %",
        "over one constant for all heads", "+0.250", reported.source["fingerprint"],
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


def test_the_model_of_a_collection(model, here):
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


def test_what_evaluate_refuses(model, here):
    digest = collected(model, templates=("towns",), lengths=(64,), count=1).digest
    publish(constant(1.2, layer=7, name="deep"), Path("fits"))
    publish(constant(1.2, name="own", source={"collection": digest}), Path("fits"))
    for arguments, message in (
        (("nowhere",), "nowhere is not a collection; make one with"),
        (("runs/a", "--fits", "nothing"), "no fit is named 'nothing'"),
        (("runs/a", "--fits", "deep"), "deep@1 has entries for layers [7]"),
        (("runs/a", "--fits", "own"), "runs/a has no example in the test split of own@1"),
    ):
        assert message in refusal("model", "evaluate", *arguments)
