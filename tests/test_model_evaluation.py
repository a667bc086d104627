"""Scores of examples under fits, their comparison, and `calibrate evaluate` of whole models."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import calibrate
from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import Rule

torch = pytest.importorskip("torch", reason="needs the extra torch")
transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

from test_first_look import some_examples  # noqa: E402
from tiny_causal import causal_model  # noqa: E402

from calibrate.examples import score_fits as scoring  # noqa: E402
from calibrate.examples.score_fits import Kept, score_fits  # noqa: E402
from calibrate.transformers import register, verify  # noqa: E402

torch.set_num_threads(1)


def constant(beta, layer=None, head=None, **named):
    entry = Entry((0.0, beta), (0.0, 9.0), layer=layer, head=head)
    return Coefficients(Rule.log_size(min_beta=0.5), (entry,), **named)


# --- scores under fits ---------------------------------------------------------------------------


def by_hand(model, examples, which):
    """log p of the answers, token by token."""
    found = []
    for i in which:
        tokens = torch.tensor(examples.examples[i].tokens.tolist())[None]
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0].log_softmax(-1)
        at = torch.arange(examples.examples[i].start, tokens.shape[1])
        found.append(logits[at - 1, tokens[0, at]].sum().item())
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_scores_are_those_of_the_registered_fit(kind):
    examples, which = some_examples(text=True), [3, 0, 1]
    fits = {"plain": calibrate.identity(), "one": constant(1.7, layer=1, head=2)}
    fits["paper"] = calibrate.load("paper")
    model = causal_model(kind)
    found = score_fits(lambda: model, examples, which, fits)
    np.testing.assert_allclose(found["plain"].log_p, by_hand(model, examples, which), rtol=1e-4)
    assert np.abs(found["one"].log_p - found["plain"].log_p).max() > 1e-3
    for label in ("one", "paper"):
        register("by-hand", fits[label])
        model.set_attn_implementation("by-hand")
        verify(model)
        np.testing.assert_allclose(found[label].log_p, by_hand(model, examples, which), rtol=1e-4)


def never():
    raise AssertionError("the model is loaded")


def test_kept_scores_are_scored_once(monkeypatch):
    monkeypatch.setattr(scoring, "UNIT_TOKENS", 40)
    examples, model = some_examples(), causal_model()
    kept, fits = Kept(Path("run"), "sha256:a"), {"a": constant(1.2), "b": constant(1.4)}
    first = score_fits(lambda: model, examples, range(4), fits, kept)
    files = sorted(Path("run/.scores").rglob("*.npz"))
    assert len(files) == 4  # two units of two fits
    told = []
    again = score_fits(never, examples, range(4), fits, kept, lambda *step: told.append(step))
    np.testing.assert_equal(again, first)
    assert told == [(40, True), (20, True), (33, True)] * 2
    renamed = {"c": replace(fits["b"], name="other", source={"seed": 1})}  # of the same betas
    np.testing.assert_equal(score_fits(never, examples, range(4), renamed, kept)["c"], first["b"])
    others = ((range(4), kept._replace(collection="sha256:b")), (range(3), kept))
    for which, other in others:
        with pytest.raises(AssertionError, match="the model is loaded"):
            score_fits(never, examples, which, fits, other)
    lost, damaged = files[0], files[-1]
    lost.unlink()
    os.truncate(damaged, 50)
    with pytest.warns(UserWarning, match=f"{damaged.name} is damaged"):
        repaired = score_fits(lambda: model, examples, range(4), fits, kept)
    np.testing.assert_equal(repaired, first)
    shutil.rmtree("run")
    assert not Path("run").exists()
    score_fits(lambda: model, examples, range(4), fits)
    assert not Path("run").exists()


def test_a_killed_scoring_loses_a_unit_at_most(monkeypatch):
    monkeypatch.setattr(scoring, "UNIT_TOKENS", 40)
    examples, model, kept = some_examples(), causal_model(), Kept(Path("run"), "sha256:a")
    fits, score, calls = {"a": constant(1.2), "b": constant(1.4)}, scoring.score, []

    def die(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(scoring, "score", die)
    with pytest.raises(KeyboardInterrupt):
        score_fits(lambda: model, examples, range(4), fits, kept)
    found = score_fits(lambda: model, examples, range(4), fits, kept)
    assert len(calls) == 5
    monkeypatch.setattr(scoring, "score", score)
    np.testing.assert_equal(found, score_fits(lambda: model, examples, range(4), fits))


def test_all_fits_are_verified_before_any_is_scored(monkeypatch):
    model = causal_model()
    monkeypatch.setattr(scoring, "score", lambda *_: pytest.fail("scored"))
    for fit, message in (
        (constant(1.2, layer=2), r"has entries for layers \[2\], which LlamaForCausalLM does not"),
        (constant(1.2, layer=0, head=4), "has an entry for head 4, and there are 4 heads"),
    ):
        with pytest.raises(CoefficientsError, match=message):
            score_fits(lambda: model, some_examples(), [0], {"ok": constant(1.1), "bad": fit})
    with pytest.raises(CoefficientsError, match="Bloom"):
        score_fits(lambda: causal_model("bloom"), some_examples(), [0], {"ok": constant(1.1)})
