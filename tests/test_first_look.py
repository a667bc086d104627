"""The derivative of a model's answers by log beta of every head, and what is made of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import calibrate
from calibrate.errors import CalibrateError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import Rule

torch = pytest.importorskip("torch", reason="needs the extra torch")
transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

from test_cli import call, refusal  # noqa: E402
from test_model_examples import collected, write_lines  # noqa: E402
from tiny_causal import (  # noqa: E402
    causal_model,
    planted_examples,
    planted_model,
    prompt_lines,
    save,
    some_examples,
)

from calibrate.files.examples import Cell, Example, ExampleSet, Scores  # noqa: E402
from calibrate.model import first_look as looking  # noqa: E402
from calibrate.model import passes  # noqa: E402
from calibrate.model.first_look import (  # noqa: E402
    DIFFUSE,
    SHARPER,
    UNCLEAR,
    Derivatives,
    derivatives,
    first_look,
)
from calibrate.transformers import register  # noqa: E402
from calibrate.transformers.betas import checkpointed, head_betas  # noqa: E402

torch.set_num_threads(1)
KINDS = ["llama", "gemma2", "gpt_oss"]  # grouped keys; a soft-cap and a window; sinks

# --- the betas of a model's heads ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_betas_are_those_of_a_fit_with_the_same_constants(kind):
    """Against the runtime, which computes attention by other code."""
    model, tokens = causal_model(kind), torch.randint(3, 500, (2, 20))
    betas = np.random.default_rng(1).uniform(0.6, 1.6, (2, 4))
    entries = tuple(
        Entry((0.0, 0.0, 0.0, 0.0, float(betas[layer, head])), (0.0, 9.0), layer=layer, head=head)
        for layer in range(2) for head in range(4)
    )  # fmt: skip
    rule = Rule(min_entropy=0.0, min_beta=0.5)
    register("constants", Coefficients(rule, entries, name="constants"))
    plain = model(tokens, use_cache=False).logits
    before = model.config._attn_implementation
    with head_betas(model) as heads:
        np.testing.assert_allclose(model(tokens, use_cache=False).logits, plain, atol=1e-4)
        heads.betas = torch.tensor(betas, dtype=torch.float32).reshape(1, 8)
        assert heads.heads == [(layer, head) for layer in range(2) for head in range(4)]
        ours = model(tokens, use_cache=False).logits
        heads.betas = heads.betas[..., None].expand(1, 8, 20)  # one for each query
        np.testing.assert_allclose(model(tokens, use_cache=False).logits, ours, atol=1e-5)
    assert model.config._attn_implementation == before
    model.set_attn_implementation("constants")
    calibrate.transformers.verify(model)
    np.testing.assert_allclose(ours, model(tokens, use_cache=False).logits, atol=1e-4)
    assert (ours - plain).abs().max() > 0.01


def by_differences(model, examples, h=0.02):
    """The derivatives from log p at beta e^h and e^-h of one head at a time.

    The classes' normalisers round to float32 even in float64 models: a smaller h shows that.
    """
    found = np.zeros((len(examples.examples), 8))
    with head_betas(model) as heads, torch.no_grad():
        for row, example in enumerate(examples.examples):
            tokens = torch.tensor(example.tokens.tolist())[None]
            at = torch.arange(example.start, len(example.tokens))
            for i in range(8):
                ends = []
                for sign in (1, -1):
                    heads.betas = torch.ones(1, 8)
                    heads.betas[0, i] = np.exp(sign * h)
                    logits = model(tokens, use_cache=False).logits[0].double().log_softmax(-1)
                    ends.append(logits[at - 1, tokens[0, at]].sum().item())
                found[row, i] = (ends[0] - ends[1]) / (2 * h)
            if examples.cells[example.cell].text:
                found[row] /= len(at)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_finite_differences(kind, monkeypatch):
    examples = some_examples(text=True)
    found = derivatives(causal_model(kind), examples)
    exact = by_differences(causal_model(kind), examples)
    np.testing.assert_allclose(found.slope, exact, rtol=5e-3, atol=4e-3 * np.abs(exact).max())
    assert np.abs(exact).max() > 0.05
    monkeypatch.setattr(passes, "TOKENS_AT_ONCE", 1)  # one at a time
    monkeypatch.setattr(passes, "MOST_KEPT_BYTES", 0)  # with checkpoints
    again = derivatives(causal_model(kind), examples)
    np.testing.assert_allclose(again.slope, found.slope, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(again.scores.log_p, found.scores.log_p, rtol=1e-5)


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


def test_memory_and_numbers_that_run_out(monkeypatch):
    def exhausted(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] ... can't allocate memory: you")

    examples = some_examples()
    with monkeypatch.context() as patch:
        patch.setattr(looking, "answer", exhausted)
        with pytest.raises(CalibrateError, match="out of memory at 3 x 20 tokens; give shorter"):
            derivatives(causal_model(), examples)
    broken = causal_model()
    broken.model.layers[1].self_attn.q_proj.weight[0, 0] = float("inf")
    with pytest.raises(CalibrateError, match="logits are not finite"):
        derivatives(broken, examples)
    largest = max(int(example.tokens.max()) for example in examples.examples)
    with pytest.raises(CalibrateError, match=f"this model knows 0 to {largest - 1}"):
        derivatives(causal_model(vocab_size=largest), examples)


# --- means, errors, and what heads want ----------------------------------------------------------


def test_a_head_that_must_be_sharpened_comes_out_on_top():
    examples = planted_examples()
    look = first_look(derivatives(planted_model(), examples), examples)
    first, second, *others = look.heads
    assert (first.layer, first.head, first.wants) == (0, 0, SHARPER)
    assert (second.layer, second.head, second.wants) == (0, 2, DIFFUSE)
    assert {head.wants for head in others} == {UNCLEAR}
    assert look.wanting(SHARPER) == [first]
    with head_betas(model := planted_model()) as heads:
        heads.betas = torch.ones(1, 8)
        heads.betas[0, 0] = 1.1
        after = passes.score(model, examples, range(len(examples.examples))).log_p.mean()
    assert after - look.answers.log_p == pytest.approx(first.gain, rel=0.1)
    by_length = {n: slopes.slope.mean[0] for n, slopes in look.by_length.items()}
    assert list(by_length) == [12, 24]
    assert np.mean(list(by_length.values())) == pytest.approx(first.answers[0])


def noise(counts, n_heads=1, shift=0.0, text=()):
    """Derivatives drawn from a normal distribution, so many in each cell."""
    rng = np.random.default_rng(len(counts) + n_heads)
    cells = tuple(Cell(f"t{i % 2}", 64 << (i // 2), i in text) for i in range(len(counts)))
    tokens = np.zeros(4, np.int32)
    examples = [Example(tokens, 2, i) for i, count in enumerate(counts) for _ in range(count)]
    cell = np.repeat(np.arange(len(counts)), counts)
    slope = shift * (cell[:, None] + 1) + rng.standard_normal((len(cell), n_heads))
    scores = Scores(-1.0 * cell, np.zeros(len(cell), np.int32))
    heads = [(i // 8, i % 8) for i in range(n_heads)]
    return Derivatives(heads, scores, slope), ExampleSet(cells, tuple(examples))


def test_templates_and_lengths_have_equal_weight():
    found, examples = noise([100, 3, 50, 10], shift=1.0)
    look = first_look(found, examples)
    cell = np.array([e.cell for e in examples.examples])
    means = [found.slope[cell == i].mean() for i in range(4)]
    assert look.heads[0].answers[0] == pytest.approx(np.mean(means))
    assert look.answers.log_p == pytest.approx(-1.5)
    assert look.by_length[64].slope.mean[0] == pytest.approx(np.mean(means[:2]))
    assert look.by_template["t1"].slope.mean[0] == pytest.approx(np.mean(means[1::2]))
    assert look.by_template["t1"].examples == 13


def test_text_is_kept_apart():
    found, examples = noise([20, 20, 20], shift=1.0, text=(1,))
    look = first_look(found, examples)
    assert look.text.log_p == pytest.approx(-0.5)  # of two tokens
    assert look.answers.log_p == pytest.approx(-1.0)
    assert look.answers.examples == 40
    assert look.heads[0].text[0] == pytest.approx(found.slope[20:40].mean())
    alone, examples = noise([20], shift=1.0, text=(0,))
    look = first_look(alone, examples)
    assert (look.answers, look.by_length) == (None, {})
    assert look.heads[0].wants == SHARPER


def test_text_at_several_lengths_is_one_text():
    """Windows of three lengths that begin alike tell what those of one do, and no more."""
    one, examples = noise([12], n_heads=200, text=(0,))
    cells = tuple(Cell("text", 64 << i, True) for i in range(3))
    three = tuple(Example(e.tokens, 2, i) for i in range(3) for e in examples.examples)
    scores = Scores(*(np.tile(column, 3) for column in one.scores))
    found = Derivatives(one.heads, scores, np.tile(one.slope, (3, 1)))
    look, alone = first_look(found, ExampleSet(cells, three)), first_look(one, examples)
    np.testing.assert_allclose(look.text.slope.error, alone.text.slope.error)
    assert look.text.slope.freedom == pytest.approx(11)
    assert {head.wants for head in look.heads} == {UNCLEAR}


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "tiny", causal_model())


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
    save(Path("planted"), planted_model(), tokenizer=False)
    prompts = write_lines("p.jsonl", prompt_lines(planted_examples()))
    arguments = ("--model", "planted", "--prompts", prompts)
    call("model", "collect", *arguments, "--out", "runs/p")
    out = call("model", "diagnose", "runs/p").stdout
    assert "1 of 8 heads wants to be sharper: L0H0\n" in out
    assert "1 of 8 heads wants to be more diffuse: L0H2\n" in out


def test_the_model_of_a_collection(model, here):
    moved = Path(shutil.copytree(model, "moved"))
    collected(moved, templates=("towns",), lengths=(64,), count=2)
    moved.rename("elsewhere")
    line = refusal("model", "diagnose", "runs/a")
    assert line.endswith("runs/a does not know where its model is; name its folder with --model")
    call("model", "diagnose", "runs/a", "--model", "elsewhere")
    other = save(Path("other"), causal_model(rms_norm_eps=1e-4))
    line = refusal("model", "diagnose", "runs/a", "--model", other)
    assert "is not the model that runs/a was made with, or has changed since" in line
    assert "give that one with --model, or collect again" in line


def test_each_kind_of_collection_has_its_own_command(model, here):
    collected(model, templates=("towns",), lengths=(64,), count=2)
    for command in (("diagnose",), ("fit", "--name", "x")):
        assert "runs/a/manifest.json is calibrate.examples" in refusal(*command, "runs/a")
    assert "nowhere is not a collection" in refusal("model", "diagnose", "nowhere")
