"""`calibrate.fit_model`: fits of models by a log-likelihood of the user's own."""

import numpy as np
import pytest
import torch
from tiny_causal import planted_examples, planted_model

import calibrate
from calibrate.errors import CalibrateError, QualityError


def batches_of(count=64, size=4):
    """Tokens of several prompts of one length, each with its answer at the end."""
    examples = planted_examples(count=count).examples
    by_length = [[e.tokens for e in examples if len(e.tokens) == n] for n in (14, 26)]
    return [
        torch.from_numpy(np.stack(tokens[i : i + size])).long()
        for tokens in by_length for i in range(0, len(tokens), size)
    ]  # fmt: skip


def log_p(model, tokens):
    logits = model(tokens[:, :-1]).logits[:, -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, -1:])[:, 0]


OPTIONS = {"kind": "constant", "steps": 10, "size": 20}


def test_the_planted_head_is_found(tmp_path):
    """A batch without a gradient, such as one without a labelled item, counts as gradient 0."""
    empty = torch.zeros(4, 14, dtype=torch.long)

    def measure(model, tokens):
        return torch.full((4,), -1.0) if tokens is empty else log_p(model, tokens)

    batches = [*batches_of(), empty]
    fit = calibrate.fit_model(planted_model(), batches, measure, **OPTIONS, name="mine")
    betas = {(e.layer, e.head): e.coefficients[-1] for e in fit.entries}
    assert betas[0, 0] > 1.5
    (held_out,) = fit.evidence["held_out"]
    assert (held_out["n"], held_out["inputs"]) == (20, 8)  # a quarter of 33 batches
    assert held_out["nll_after"] < held_out["nll_before"]
    assert fit.verdict.startswith("mine is significantly better")
    assert "on 8 batches" in fit.verdict
    assert "exact match" not in fit.verdict
    assert fit.source["options"]["interpolation"] == 1
    assert calibrate.load(fit.save(tmp_path / "mine.json")) == fit


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"size": 1}, "size is 1"),
        ({"template": ["a"]}, "1 names for 32"),
        ({"template": ["a"] * 25 + ["b"] * 7}, "7 batches are 'b'"),
        ({"name": "a/b"}, "a/b"),
    ],
)
def test_wrong_arguments_are_refused(options, value):
    with pytest.raises(CalibrateError, match=value):
        calibrate.fit_model(planted_model(), batches_of(), log_p, **{**OPTIONS, **options})


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(CalibrateError, match=r"\.eval\(\)"):
        calibrate.fit_model(planted_model().train(), batches_of(), log_p, **OPTIONS)


def test_a_measure_that_no_head_changes_gets_no_fit():
    def same(model, tokens):
        return model(tokens).logits.sum((1, 2)) * 0 - 1

    with pytest.raises(QualityError, match=r"[+-]0\.\d{3} ± "):
        calibrate.fit_model(planted_model(), batches_of(), same, **{**OPTIONS, "steps": 2})
