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
from tiny_causal import SIZES, causal_model, save  # noqa: E402

from calibrate.files.examples import Cell, Example, ExampleSet  # noqa: E402
from calibrate.model import answering  # noqa: E402
from calibrate.model import derivatives as differentiating  # noqa: E402
from calibrate.model.derivatives import Derivatives, derivatives  # noqa: E402
from calibrate.model.first_look import DIFFUSE, SHARPER, UNCLEAR, first_look  # noqa: E402
from calibrate.transformers import register  # noqa: E402
from calibrate.transformers.betas import head_betas  # noqa: E402

torch.set_num_threads(1)
KINDS = ["llama", "gemma2", "gpt_oss"]  # grouped keys; a soft-cap and a window; sinks
LENGTHS = (20, 20, 20, 33)


def some_examples(lengths=LENGTHS, text=False):
    rng = np.random.default_rng(0)
    return ExampleSet(
        (Cell("some", 32, False), Cell("text", 32, True))[: 1 + text],
        tuple(
            Example(rng.integers(3, 500, n).astype(np.int32), 1 if i % 2 and text else n - 3,
                    i % 2 if text else 0)
            for i, n in enumerate(lengths)
        ),
    )  # fmt: skip


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
    monkeypatch.setattr(answering, "TOKENS_AT_ONCE", 1)  # one at a time
    monkeypatch.setattr(differentiating, "MOST_KEPT_BYTES", 0)  # with checkpoints
    again = derivatives(causal_model(kind), examples)
    np.testing.assert_allclose(again.slope, found.slope, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(again.log_p, found.log_p, rtol=1e-5)


def test_checkpoints_take_less_memory_and_go_away():
    model = causal_model()
    forward = type(model.model.layers[0]).forward
    kept = {}
    for checkpoints in (False, True):
        sizes = []
        with head_betas(model) as heads:
            heads.betas = torch.ones(1, 8, requires_grad=True)
            context = differentiating.checkpointed(model) if checkpoints else torch.no_grad()
            pack = torch.autograd.graph.saved_tensors_hooks(
                lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
            )
            with pack:
                if checkpoints:
                    with context:
                        model.model(torch.zeros(1, 64, dtype=torch.long), use_cache=False)
                else:
                    model.model(torch.zeros(1, 64, dtype=torch.long), use_cache=False)
        kept[checkpoints] = sum(sizes)
    assert kept[True] < kept[False] / 3
    assert type(model.model.layers[0]).forward is forward
    assert "forward" not in vars(model.model.layers[0])


def test_bfloat16_is_near(monkeypatch):
    examples = some_examples()
    exact = derivatives(causal_model(), examples)
    rough = derivatives(causal_model().bfloat16(), examples)
    assert np.corrcoef(exact.slope.ravel(), rough.slope.ravel())[0, 1] > 0.95


# --- a model of which it is known what its heads want --------------------------------------------

ITEMS, MARKED, QUERY = 10, 20, 30  # tokens: an item of one of eight classes, marked or not


def planted_model():
    """Head 0 finds the marked item, too diffusely; head 2 finds the others, and misleads.

    The first features are the class, one for marked items, one for the query, one for the others;
    heads write the class they find into features 16 to 23, which the logits are read from. The last
    pair of a head's channels is hardly rotated.
    """
    config = transformers.LlamaConfig(
        **SIZES | {"vocab_size": 64},
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for x in model.parameters():
        x.fill_(1.0) if x.ndim == 1 else x.zero_()
    embedding, first = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    for i in range(8):
        embedding[ITEMS + i, [i, 10]] = embedding[MARKED + i, [i, 8]] = 1.0
        model.lm_head.weight[ITEMS + i, 16 + i] = 2.0
        for head in range(4):
            first.o_proj.weight[16 + i, 8 * head + i] = 0.25
        for group in range(2):
            first.v_proj.weight[8 * group + i, i] = 1.0
    embedding[QUERY, 9] = 2**0.5
    for head, strength in ((0, 0.15), (2, 0.15)):
        first.q_proj.weight[8 * head + 3, 9] = strength
    first.k_proj.weight[3, 8] = first.k_proj.weight[8 + 3, 10] = 2**0.5
    return model


def planted_examples(lengths=(12, 24), count=12):
    """Items, the marked one among them, and the query; the answer is the marked item's class."""
    rng, made = np.random.default_rng(3), []
    for cell, n in enumerate(lengths):
        for _ in range(count):
            classes = rng.integers(0, 8, n)
            tokens, at = ITEMS + classes, rng.integers(0, n)
            tokens[at] += MARKED - ITEMS
            tokens = np.array([*tokens, QUERY, ITEMS + classes[at]], np.int32)
            made.append(Example(tokens, n + 1, cell))
    return ExampleSet(tuple(Cell("marked", n, False) for n in lengths), tuple(made))


def test_a_head_that_must_be_sharpened_comes_out_on_top():
    examples = planted_examples()
    found = derivatives(planted_model(), examples)
    look = first_look(found, examples)
    first, second, *others = look.heads
    assert (first.layer, first.head, first.wants) == (0, 0, SHARPER)
    assert (second.layer, second.head, second.wants) == (0, 2, DIFFUSE)
    assert {head.wants for head in others} == {UNCLEAR}
    assert look.wanting(SHARPER) == [first]
    betas = torch.ones(1, 8)
    betas[0, 0] = 1.1
    with head_betas(model := planted_model()) as heads, torch.no_grad():
        heads.betas = betas
        after = np.mean([answering.answer(model, [e]).log_p.item() for e in examples.examples])
    gain = after - look.answers.log_p
    assert gain == pytest.approx(first.gain, rel=0.1)
    by_length = {n: mean.slope[0] for n, mean in look.by_length.items()}
    assert list(by_length) == [12, 24]
    assert np.mean(list(by_length.values())) == pytest.approx(first.answers[0])


# --- means and errors ----------------------------------------------------------------------------


def noise(counts, n_heads=1, shift=0.0, text=()):
    """Derivatives drawn from a normal distribution, so many in each cell."""
    rng = np.random.default_rng(len(counts) + n_heads)
    cells = tuple(Cell(f"t{i % 2}", 64 << (i // 2), i in text) for i in range(len(counts)))
    tokens = np.zeros(4, np.int32)
    examples = [Example(tokens, 2, i) for i, count in enumerate(counts) for _ in range(count)]
    cell = np.repeat(np.arange(len(counts)), counts)
    slope = shift * (cell[:, None] + 1) + rng.standard_normal((len(cell), n_heads))
    heads = [(i // 8, i % 8) for i in range(n_heads)]
    return Derivatives(heads, -1.0 * cell, slope), ExampleSet(cells, tuple(examples))


def test_templates_and_lengths_count_alike():
    found, examples = noise([100, 3, 50, 10], shift=1.0)
    look = first_look(found, examples)
    cell = np.array([e.cell for e in examples.examples])
    means = [found.slope[cell == i].mean() for i in range(4)]
    squares = [found.slope[cell == i].var(ddof=1) / (cell == i).sum() for i in range(4)]
    assert look.heads[0].answers == pytest.approx((np.mean(means), np.sqrt(np.sum(squares)) / 4))
    assert look.answers.log_p == pytest.approx(-1.5)
    assert look.by_length[64].slope[0] == pytest.approx(np.mean(means[:2]))
    assert look.by_template["t1"].slope[0] == pytest.approx(np.mean(means[1::2]))
    assert look.by_template["t1"].examples == 13


def test_text_is_kept_apart():
    found, examples = noise([20, 20, 20], shift=1.0, text=(1,))
    look = first_look(found, examples)
    assert look.text.log_p == -1.0
    assert look.answers.log_p == -1.0
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
    tokens = [e.tokens for e in examples.examples]
    three = tuple(Example(x, 2, i) for i in range(3) for x in tokens)
    found = Derivatives(one.heads, np.tile(one.log_p, 3), np.tile(one.slope, (3, 1)))
    look, alone = first_look(found, ExampleSet(cells, three)), first_look(one, examples)
    np.testing.assert_allclose(look.text.error, alone.text.error)
    np.testing.assert_array_equal(look.text.freedom, 11)
    assert {head.wants for head in look.heads} == {UNCLEAR}


def test_noise_is_not_taken_for_a_wish_and_one_example_tells_nothing():
    for counts in ([4, 4], [30, 5, 12]):
        found, examples = noise(counts, n_heads=400)
        look = first_look(found, examples)
        assert sum(head.wants != UNCLEAR for head in look.heads) <= 2
    found, examples = noise([5, 1], n_heads=3, shift=100.0)
    look = first_look(found, examples)
    assert {head.wants for head in look.heads} == {UNCLEAR}
    assert np.isnan(look.answers.error).all()


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "tiny", causal_model())


def test_the_first_look_at_a_collection(model, here):
    Path("text.txt").write_text("The apple is on the table. " * 60)
    collected(model, text=Path("text.txt"))
    record = json.loads(call("diagnose", "runs/a", "--json").stdout)
    assert len(record["heads"]) == 8
    assert record["model"] == "tiny"
    assert record["answers"]["examples"] == 16
    assert record["text"]["examples"] == 8
    assert set(record["heads"][0]["by_length"]) == {"64", "96"}
    assert set(record["heads"][0]["by_template"]) == {"numbers", "list"}
    gains = [head["gain"] for head in record["heads"]]
    assert gains == sorted(gains, reverse=True)
    assert json.loads(Path("runs/a-diagnosis/first-look.json").read_text()) == record
    assert Path("runs/a-diagnosis/heads.png").read_bytes().startswith(b"\x89PNG")
    out = call("diagnose", "runs/a", "--out", "look").stdout
    assert "First look at tiny" in out
    assert "of 8 heads want" in out
    plain = call("collect", "--model", model, "--task", "retrieval:numbers,list", "--text",
                 "text.txt", "--lengths", "64,96", "--examples", "4", "--out", "runs/a",
                 "--json").stdout  # fmt: skip
    answers = [c["log_p"] for c in json.loads(plain)["plain"] if not c["text"]]
    assert record["answers"]["log_p"] == pytest.approx(np.mean(answers), rel=1e-5)


def test_a_planted_model_in_words(here):
    save(Path("planted"), planted_model(), tokenizer=False)
    lines = [
        {"prompt_ids": e.tokens[: e.start].tolist(), "answer_ids": e.tokens[e.start :].tolist()}
        for e in planted_examples().examples
    ]
    prompts = write_lines("p.jsonl", lines)
    arguments = ("--model", "planted", "--prompts", prompts)
    out = call("diagnose", *arguments).stdout
    assert "1 of 8 heads wants to be sharper: L0H0\n" in out
    assert "1 of 8 heads wants to be more diffuse: L0H2\n" in out
    assert Path("runs/planted-diagnosis/first-look.json").exists()
    call("collect", *arguments, "--out", "runs/p")
    same = call("diagnose", "runs/p").stdout
    assert same.replace("runs/p-", "runs/planted-") == out


def test_the_model_of_a_collection(model, here):
    moved = Path(shutil.copytree(model, "moved"))
    collected(moved, templates=("towns",), lengths=(64,), count=2)
    moved.rename("elsewhere")
    line = refusal("diagnose", "runs/a")
    assert line.endswith("runs/a does not know where its model is; name its folder with --model")
    call("diagnose", "runs/a", "--model", "elsewhere")
    other = save(Path("other"), causal_model(rms_norm_eps=1e-4))
    line = refusal("diagnose", "runs/a", "--model", other)
    assert "is not the model that runs/a was made with, or has changed since" in line
    assert "give that one with --model, or collect again" in line
    line = refusal("diagnose", "runs/a", "--model", model, "--out", "runs/a/look")
    assert "runs/a/look is a collection's folder" in line


def test_what_diagnose_refuses(model, here):
    collected(model, templates=("towns",), lengths=(64,), count=2)
    for arguments, message in (
        ((), "nothing to look at; give RUN, or --model FOLDER"),
        (("--model", model), "--model needs examples"),
        (("runs/a", "--task", "retrieval"), "--task cannot be used with a collection, which has"),
        (("runs/a", "--eps", "0.4"), "--eps cannot be used with examples of a model"),
        (("nowhere", "--model", model), "--model cannot be used with a collection of rows"),
    ):
        result = call("diagnose", *arguments, code=2)
        assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "nowhere is not a collection" in refusal("diagnose", "nowhere")


def test_memory_and_numbers_that_run_out(model, here, monkeypatch):
    examples = some_examples()

    def exhausted(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] ... can't allocate memory: you")

    with monkeypatch.context() as patch:
        patch.setattr(differentiating, "answer", exhausted)
        with pytest.raises(CalibrateError, match="out of memory at 3 x 20 tokens; give shorter"):
            derivatives(causal_model(), examples)
    broken = causal_model()
    broken.model.layers[1].self_attn.q_proj.weight[0, 0] = float("inf")
    with pytest.raises(CalibrateError, match="logits are not finite"):
        derivatives(broken, examples)
    with pytest.raises(CalibrateError, match="this model knows 0 to 99"):
        derivatives(causal_model(vocab_size=100), examples)
