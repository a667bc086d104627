"""calibrate run on logits and on a model of one's own: one command, from arrays to the report."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from test_array_fit import SIZES, by_size
from test_cli import call, refusal

import calibrate
from calibrate.cli import model_steps
from calibrate.evaluation.score_logits import score_logits
from calibrate.heads.logits_files import Arrays
from calibrate.report.blocks import as_json
from calibrate.report.logits_record import LogitsRecord


@pytest.fixture
def own_rows(here):
    """A folder whose name is not one of a fit."""
    folder = here / "Own Rows"
    folder.mkdir()
    for n, logits, target in zip(SIZES, *by_size(), strict=True):
        np.savez(folder / f"{n}.npz", logits=logits, target=target)
    return folder


def test_logits_are_fitted_and_judged_by_rows_held_out(own_rows):
    """As calibrate.fit does of the same arrays."""
    done = call("run", "--logits", "Own Rows", "--seed", "3", "--json")
    record, fit = json.loads(done.stdout), calibrate.fit(*by_size(), seed=3)
    published = calibrate.load("own-rows")
    assert record["reference"] == published.reference == "own-rows@1"
    assert published == fit
    assert published.source | {"head": "", "collection": ""} == fit.source | {
        "head": "", "collection": "",
    }  # fmt: skip
    ours = as_json(LogitsRecord(fit.scores))["all"]["rules"]
    for name, theirs in (("plain", "plain"), ("own-rows@1", "this fit")):
        found = record["scores"]["all"]["rules"][name]
        for measure in found:
            assert found[measure]["mean"] == pytest.approx(ours[theirs][measure]["mean"])
    assert "120 rows of Own Rows, which it was not made of" in record["verdict"]
    page = Path(record["report"]).read_text(encoding="utf-8")
    assert record["verdict"].split(":")[0] in page
    again = call("run", "--logits", "Own Rows", "--seed", "3")
    assert "runs/own-rows is already complete" in again.stderr
    assert "own-rows@1 is unchanged" in again.stderr
    assert "fits/own-rows/1.html" in again.stdout
    assert "calibrate.load(" in again.stdout
    with pytest.warns(UserWarning, match="own-rows was made of these very rows"):
        score_logits(Arrays(own_rows), {"own-rows": published})
    assert "seed is 3 in the folder and 0 in this call" in refusal("run", "--logits", "Own Rows")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--logits", "Own Rows", "--sizes", "16"], 2, "--sizes cannot be used with --logits"),
        (["--logits", "Own Rows", "--held-out", "1"], 1, "held_out is 1.0; give a share"),
        (["--logits", "Own Rows", "--held-out", "0.875"], 3, "give at least 800 rows"),
        (["--held-out", "0.1"], 2, "--held-out cannot be used with a head"),
        (["--task", "retrieval"], 2, "--task cannot be used with a head or logits; they need --m"),
        (["--model", "m"], 2, "--model needs examples: --prompts FILE.jsonl"),
        (["--model", "m", "--task", "retrieval", "--sets", "2"], 2, "--sets cannot be used with"),
    ],
)
def test_what_does_not_go_together_is_refused(own_rows, arguments, code, message):
    assert message in refusal("run", *arguments, code=code)
    assert not Path("runs").exists()


def test_a_model_is_fitted_through_itself_and_judged_by_its_answers(here, monkeypatch):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    from test_first_look import planted_examples, planted_model
    from tiny_causal import save

    save(here / "Planted", planted_model(), tokenizer=False)
    lines = [
        {"prompt_ids": e.tokens[: e.start].tolist(), "answer_ids": e.tokens[e.start :].tolist()}
        for e in planted_examples(count=24).examples
    ]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    quick = partial(model_steps.ModelFitRequest, kind="constant", steps=5)
    monkeypatch.setattr(model_steps, "ModelFitRequest", quick)
    record = json.loads(
        call("run", "--model", "Planted", "--prompts", "p.jsonl", "--json").stdout
    )  # fmt: skip
    fit = calibrate.load("planted@1")
    assert {(entry.layer, entry.head) for entry in fit.entries} >= {(0, 0)}
    assert record["scores"]["scored"].endswith("planted@1 was made of the others")
    gain = record["scores"]["answers"]["scores"]["planted@1"]["log_p"]["gain"]
    assert gain["mean"] > 2 * gain["error"] > 0
    assert record["verdict"].startswith("answers right")
    assert Path("fits/planted/1.html").stat().st_size > 10_000
    assert json.loads((Path("runs/planted") / "manifest.json").read_text())["status"] == "complete"
