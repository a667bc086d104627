"""The derivative of a model's answers by log beta of every head, and what is made of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_progress import Told
from test_cli import call, refusal
from test_model_evaluation import constant
from test_model_examples import collected
from test_model_fit import planted
from tiny_causal import (
    causal_model,
    planted_examples,
    planted_model,
    runner_of,
    save,
    some_examples,
)

from calibrate.datasets.examples import Cell, Example, ExampleSet, Scores
from calibrate.errors import CalibrateError
from calibrate.model import sensitivity as looking
from calibrate.model.scoring import score, score_fits
from calibrate.model.sensitivity import ExampleDerivatives, derivatives, sensitivity
from calibrate.transformers.betas import checkpointed, head_betas

KINDS = ["llama", "gemma2", "gpt_oss"]  # grouped keys; a soft-cap and a window; sinks


def by_differences(model, examples, h=0.02):
    """The derivatives from log p under fits of beta e^h and e^-h of one head at a time."""
    heads = [divmod(i, 4) for i in range(8)]
    ends = [{head: constant(np.exp(sign * h), *head) for head in heads} for sign in (1, -1)]
    indices, runner = range(len(examples.examples)), runner_of(model)
    up, down = (score_fits(runner, examples, indices, fits) for fits in ends)
    slopes = np.stack([(up[head].log_p - down[head].log_p) / (2 * h) for head in heads], axis=1)
    n_tokens = [len(e.tokens) - e.start if examples.cells[e.cell].text else 1
                for e in examples.examples]  # fmt: skip
    return slopes / np.array(n_tokens)[:, None]


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_finite_differences(kind):
    examples = some_examples(text=True)
    told = Told()
    together = derivatives(runner_of(causal_model(kind)), examples, told)
    work = [tokens for tokens, _ in told.steps]
    assert told.stages == [("differentiating", len(work), sum(work))]
    exact = by_differences(causal_model(kind), examples)
    np.testing.assert_allclose(together.slope, exact, rtol=5e-3, atol=4e-3 * np.abs(exact).max())
    assert np.abs(exact).max() > 0.05
    with_checkpoints = runner_of(causal_model(kind), kept_bytes=0)
    for i in range(len(examples.examples)):
        alone = derivatives(with_checkpoints, examples.only([i]))
        np.testing.assert_allclose(alone.slope[0], together.slope[i], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(alone.scores.log_p, together.scores.log_p[i], rtol=1e-5)


def test_checkpoints_take_less_memory_and_go_away():
    model, kept = causal_model(), []
    layer = model.model.layers[0]
    forward = type(layer).forward
    for context in (torch.enable_grad(), checkpointed(model)):
        sizes = []
        pack = torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        )
        with head_betas(model) as heads, pack, context:
            heads.betas = torch.ones(1, 8, requires_grad=True)
            model.model(torch.zeros(1, 64, dtype=torch.long), use_cache=False)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3
    assert type(layer).forward is forward
    assert "forward" not in vars(layer)


def test_memory_and_numbers_that_run_out():
    def exhausted(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] ... can't allocate memory: you")

    examples, runner = some_examples(), runner_of(causal_model())
    runner.load().model.lm_head.register_forward_pre_hook(exhausted)
    with pytest.raises(CalibrateError, match="3 x 20 tokens"):
        derivatives(runner, examples)
    broken = causal_model()
    broken.model.layers[1].self_attn.q_proj.weight[0, 0] = float("inf")
    with pytest.raises(CalibrateError, match=r"\b20 tokens .*\bnan\b"):
        derivatives(runner_of(broken), examples)
    largest = max(int(example.tokens.max()) for example in examples.examples)
    with pytest.raises(CalibrateError, match=rf"\b{largest}\b.* {largest - 1};"):
        derivatives(runner_of(causal_model(vocab_size=largest)), examples)


def test_a_head_that_must_be_sharpened_comes_out_on_top():
    examples = planted_examples()
    look = sensitivity(derivatives(runner_of(planted_model()), examples), examples)
    first, second, *others = look.heads
    assert (first.layer, first.head, first.wants) == (0, 0, looking.SHARPER)
    assert (second.layer, second.head, second.wants) == (0, 2, looking.DIFFUSE)
    assert {head.wants for head in others} == {looking.UNCLEAR}
    assert look.with_direction(looking.SHARPER) == [first]
    runner = runner_of(planted_model())
    heads = runner.load().heads
    heads.betas = torch.ones(1, 8)
    heads.betas[0, 0] = 1.1
    after = score(runner, examples, range(len(examples.examples))).log_p.mean()
    assert after - look.answers.log_p == pytest.approx(first.gain, rel=0.1)
    by_length = {n: slopes.slope.mean[0] for n, slopes in look.by_length.items()}
    assert list(by_length) == [12, 24]
    assert np.mean(list(by_length.values())) == pytest.approx(first.answers[0])


def noise(counts, n_heads=1, shift=0.0, text=()):
    rng = np.random.default_rng(len(counts) + n_heads)
    cells = tuple(Cell(f"t{i % 2}", 64 << (i // 2), i in text) for i in range(len(counts)))
    tokens = np.zeros(4, np.int32)
    examples = [Example(tokens, 2, i) for i, count in enumerate(counts) for _ in range(count)]
    cell = np.repeat(np.arange(len(counts)), counts)
    slope = shift * (cell[:, None] + 1) + rng.standard_normal((len(cell), n_heads))
    scores = Scores.of_plain(-1.0 * cell, np.zeros(len(cell), np.int32))
    heads = [(i // 8, i % 8) for i in range(n_heads)]
    return ExampleDerivatives(heads, scores, slope), ExampleSet(cells, tuple(examples))


def test_templates_and_lengths_have_equal_weight():
    slopes, examples = noise([100, 3, 50, 10], shift=1.0)
    look = sensitivity(slopes, examples)
    cell = np.array([e.cell for e in examples.examples])
    means = [slopes.slope[cell == i].mean() for i in range(4)]
    assert look.heads[0].answers[0] == pytest.approx(np.mean(means))
    assert look.answers.log_p == pytest.approx(-1.5)
    assert look.by_length[64].slope.mean[0] == pytest.approx(np.mean(means[:2]))
    assert look.by_template["t1"].slope.mean[0] == pytest.approx(np.mean(means[1::2]))
    assert look.by_template["t1"].examples == 13


def test_text_is_kept_apart():
    slopes, examples = noise([20, 20, 20], shift=1.0, text=(1,))
    look = sensitivity(slopes, examples)
    assert look.text.log_p == pytest.approx(-0.5)  # of two tokens
    assert look.answers.log_p == pytest.approx(-1.0)
    assert look.answers.examples == 40
    assert look.heads[0].text[0] == pytest.approx(slopes.slope[20:40].mean())
    alone, examples = noise([20], shift=1.0, text=(0,))
    look = sensitivity(alone, examples)
    assert (look.answers, look.by_length) == (None, {})
    assert look.heads[0].wants == looking.SHARPER


def test_text_at_several_lengths_is_one_text():
    """Windows of three lengths that begin alike tell what those of one do, and no more."""
    single, examples = noise([12], n_heads=200, text=(0,))
    cells = tuple(Cell("text", 64 << i, True) for i in range(3))
    three = tuple(Example(e.tokens, 2, i) for i in range(3) for e in examples.examples)
    scores = Scores(*(np.concatenate([column] * 3) for column in single.scores))
    several = ExampleDerivatives(single.heads, scores, np.tile(single.slope, (3, 1)))
    look = sensitivity(several, ExampleSet(cells, three))
    alone = sensitivity(single, examples)
    np.testing.assert_allclose(look.text.slope.error, alone.text.slope.error)
    assert look.text.slope.freedom == pytest.approx(11)
    assert {head.wants for head in look.heads} == {looking.UNCLEAR}


def test_the_first_look_at_a_collection(model, here):
    Path("text.txt").write_text("The apple is on the table. " * 60)
    collected(model, text=Path("text.txt"))
    record = json.loads(call("model", "diagnose", "runs/a", "--json").stdout)
    assert len(record["heads"]) == 8
    assert record["model"] == "tiny"
    assert record["answers"]["examples"] == 16
    assert record["text"]["examples"] == 8
    gains = [head["gain"] for head in record["heads"]]
    assert gains == sorted(gains, reverse=True)
    assert json.loads(Path("runs/a-diagnosis/first-look.json").read_text()) == record
    assert Path("runs/a-diagnosis/heads.png").read_bytes().startswith(b"\x89PNG")
    out = call("model", "diagnose", "runs/a", "--out", "look").stdout
    assert "First look at tiny" in out
    assert "of 8 heads want" in out


def test_a_planted_model_in_words(here):
    planted("runs/p", count=12)
    out = call("model", "diagnose", "runs/p").stdout
    assert "1 of 8 heads wants to be sharper: L0H0\n" in out
    assert "1 of 8 heads wants to be more diffuse: L0H2\n" in out


def test_the_model_of_a_collection(model, here):
    moved = Path(shutil.copytree(model, "moved"))
    collected(moved, templates=("towns",), lengths=(64,), count=2)
    moved.rename("elsewhere")
    line = refusal("model", "diagnose", "runs/a")
    assert line.endswith("--model")
    call("model", "diagnose", "runs/a", "--model", "elsewhere")
    other = save(Path("other"), causal_model(rms_norm_eps=1e-4))
    line = refusal("model", "diagnose", "runs/a", "--model", other)
    assert "other is not the model" in line
    assert "--model" in line


def test_each_kind_of_collection_has_its_own_command(model, here):
    collected(model, templates=("towns",), lengths=(64,), count=2)
    for command in (("diagnose",), ("fit", "--name", "x")):
        assert "`calibrate model fit`" in refusal(*command, "runs/a")
    call("collect", "--sizes", "16", "--sets", "8", "--out", "runs/rows")
    for command in (("diagnose",), ("fit", "--name", "x"), ("evaluate",)):
        line = refusal("model", *command, "runs/rows")
        assert "`calibrate fit`" in line
    assert "nowhere " in refusal("model", "diagnose", "nowhere")
