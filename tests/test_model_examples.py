"""Examples of a whole model: made, scored, kept, and read back."""

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import call, refusal
from fake_progress import Told
from tiny_causal import SIZES, causal_model, save

from calibrate.errors import CalibrateError
from calibrate.export.numerical_check import queries_without_weights
from calibrate.model.collect_examples import collect_examples, plan
from calibrate.prompts import examples as files
from calibrate.prompts.make_examples import ExampleSpec
from calibrate.rows.collection import open_collection
from calibrate.transformers.folders import ModelFolder

PROMPTS = [
    {"prompt": "Where does Ada Young live?", "answer": " Oslo"},
    {"prompt_ids": [4, 5, 6], "answer_ids": [7, 8], "template": "ids"},
    {"prompt": "the golden bell belongs to", "answer": " Ada"},
]


OF_KEPT = ExampleSpec(templates=("numbers", "list"), lengths=(128, 250), count=20)


@pytest.fixture
def prompts(here):
    return write_lines("prompts.jsonl", PROMPTS)


def write_lines(name, lines):
    Path(name).write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return Path(name)


def collected(model, folder="runs/a", **options):
    options = {"templates": ("numbers", "list"), "lengths": (64, 96), "count": 4} | options
    return collect_examples(plan(model, ExampleSpec(**options)), Path(folder))


def visible(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name[0] != "."}


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """A complete collection of several files of scores, made once."""
    folder = tmp_path_factory.mktemp("kept") / "a"
    collect_examples(plan(model, OF_KEPT), folder)
    assert Path(folder, files.scores_name(3)).exists()
    return folder


# --- collections ----------------------------------------------------------------------------------


def test_scores_are_those_of_the_model(model, prompts, here):
    Path("text.txt").write_text("The apple is on the table. " * 30)
    collection = collected(model, prompts=prompts, templates=(), text=Path("text.txt"))
    own = transformers.AutoModelForCausalLM.from_pretrained(model)
    scored = zip(collection.set.examples, *collection.scores[:2], strict=True)
    for example, log_p, right in scored:
        with torch.no_grad():
            logits = own(torch.tensor(example.tokens.tolist())[None]).logits[0]
        answer = np.arange(example.start, len(example.tokens))
        each = logits.log_softmax(-1)[answer - 1, example.tokens[answer]]
        np.testing.assert_allclose(log_p, each.sum().item(), rtol=1e-5)
        at_most = logits.argmax(-1)[answer - 1].numpy() == example.tokens[answer]
        assert right == at_most.sum()
    first, ids, last, *windows = collection.set.examples
    cells = collection.set.cells
    assert [cells[e.cell].template for e in (first, ids, last)] == ["prompts", "prompts", "ids"]
    assert {cells[e.cell].text for e in windows} == {True}
    assert {len(e.tokens) for e in windows} == {64, 96}
    assert {(len(e.tokens), e.start) for e in windows} == {(64, 32), (96, 48)}
    tokens = ModelFolder(model).tokenizer()(Path("text.txt").read_text())["input_ids"]
    np.testing.assert_array_equal(windows[0].tokens, tokens[:64])


def test_the_command_reports_the_baseline(model, prompts):
    arguments = ("--prompts", prompts, "--task", "retrieval:list", "--lengths", "64", "--out", "r")
    command = ("model", "collect", "--model", model, *arguments, "--examples", "3")
    call(*command)
    record = json.loads(call(*command, "--json").stdout)
    assert [(c["template"], c["length"], c["examples"]) for c in record["baseline"]] == [
        ("prompts", 8, 2), ("ids", 8, 1), ("list", 64, 3)
    ]  # fmt: skip
    assert record["configuration"]["model"] == "tiny"
    out = call(*command).stdout
    assert "Examples r: tiny, baseline" in out
    assert "0.0 % at best" in out  # a model that answers nearly nothing right
    assert not any(str(model) in text.decode("latin-1") for text in visible("r").values())


def test_too_few_examples_for_a_fit_are_a_warning(model):
    command = ("model", "collect", "--model", model, "--task", "retrieval:list", "--lengths", "64")
    for count, is_few in ((7, True), (8, False)):
        stderr = call(*command, "--out", f"r{count}", "--examples", count).stderr
        assert ("list at 64 tokens has 7 examples" in stderr.replace("\n", " ")) is is_few
    line = refusal(*command, "--out", "r7", "--examples", 30)
    assert "examples is 7 in the folder and 30 in this call" in line


def test_another_collection_is_refused_by_what_differs(model, prompts):
    arguments = ("--prompts", prompts, "--out", "r")
    call("model", "collect", "--model", model, *arguments)
    shutil.copytree(model, "other/tiny")
    edit_config(rope_theta=5.0)(Path("other/tiny"))
    line = refusal("model", "collect", "--model", "other/tiny", *arguments)
    assert "fingerprint" in line
    assert "--overwrite" in line
    write_lines(prompts, PROMPTS[::-1])
    assert "prompts is" in refusal("model", "collect", "--model", model, *arguments)
    line = refusal("collect", "--out", "r", "--sizes", "64", "--sets", "512")
    assert "`calibrate model fit`" in line
    call("model", "collect", "--model", "other/tiny", *arguments, "--overwrite")
    fingerprint = ModelFolder(Path("other/tiny")).fingerprint()
    assert open_collection(Path("r"), files.ExampleCollection).fingerprint == fingerprint


def test_a_stopped_collection_goes_on_and_has_the_same_bytes(model, kept):
    first = Path("a", files.scores_name(0))

    def stop(done):
        if first.exists():
            raise KeyboardInterrupt

    def go_on():
        told = Told()
        collect_examples(job, Path("a"), told)
        assert visible("a") == visible(kept)
        return len(told.steps)

    folder = Path(shutil.copytree(model, "copy/tiny"))
    job = plan(folder, OF_KEPT)
    with pytest.raises(KeyboardInterrupt):
        collect_examples(job, Path("a"), Told(stop))
    unfinished = visible("a")
    assert json.loads(unfinished["manifest.json"])["status"] == "partial"
    assert 0 < len(unfinished) - 2 < len(visible(kept)) - 2
    with pytest.raises(CalibrateError, match="^a "):
        open_collection(Path("a"), files.ExampleCollection)
    Path("a/.scores-00001.npz.0123abcd.tmp").write_bytes(b"half")
    assert 0 < go_on() < len(visible(kept)) - 2
    assert not Path("a/.scores-00001.npz.0123abcd.tmp").exists()
    shutil.rmtree(folder)
    go_on()  # a complete collection loads no model


def test_sharded_weights_and_bfloat16(model):
    causal_model().bfloat16().save_pretrained("sharded", max_shard_size="40KB")
    assert len(list(Path("sharded").glob("*.safetensors"))) > 1
    prompts = write_lines("ids.jsonl", PROMPTS[1:2])  # ids need no tokenizer
    collection = collected(Path("sharded"), templates=(), prompts=prompts)
    assert collection.manifest["configuration"]["dtype"] == "bfloat16"
    exact = collected(model, "runs/b", templates=(), prompts=prompts)
    np.testing.assert_allclose(collection.scores.log_p, exact.scores.log_p, rtol=0.1)
    index = Path("sharded/model.safetensors.index.json")
    text = index.read_text()
    index.write_text(text.replace("model-00001", "../model-00001"))
    with pytest.raises(CalibrateError, match=r"model\.safetensors\.index\.json .*same folder"):
        ModelFolder(Path("sharded"))
    causal_model().save_pretrained("sharded")
    index.write_text(text)  # an old index beside the weights is not read
    files = [file.name for file in ModelFolder(Path("sharded")).files]
    assert files == ["model.safetensors", "config.json"]


# --- refusals of the command ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((), "--prompts FILE.jsonl"),
        (("--task", "poetry"), "'poetry'"),
        (("--task", "retrieval:no"), "'retrieval:no'"),
        (("--retention-text", "short.txt", "--no-retention-text"), "--no-retention-text"),
    ],
)
def test_wrong_options_are_usage_errors(model, arguments, value):
    Path("short.txt").write_bytes(b"the apple")
    result = call("model", "collect", "--model", model, *arguments, "--out", "r", code=2)
    assert value in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (("--lengths", "64..512"), "256"),
        (("--prompts", "empty.jsonl"), "empty.jsonl"),
        (("--retention-text", "latin.txt"), "latin.txt is not UTF-8 at byte 3"),
        (("--retention-text", "short.txt"), "short.txt has 2 tokens"),
        (("--model", "nowhere"), "nowhere does not exist"),
        (("--model", "short.txt"), "short.txt is not a folder"),
    ],
)
def test_wrong_files_are_named(model, options, value):
    Path("empty.jsonl").write_bytes(b"\n\n")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("short.txt").write_bytes(b"the apple")
    task = ("--task", "retrieval:list", "--lengths", "64", "--out", "r")
    assert value in refusal("model", "collect", "--model", model, *task, *options)
    assert not Path("r").exists()


def spoilt(model, change):
    folder = Path(shutil.copytree(model, "spoilt"))
    change(folder)
    return folder


def edit_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def drop_weights(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def put_nan(folder):
    model = causal_model()
    model.lm_head.weight[7] = float("nan")
    model.save_pretrained(folder)


def no_tokenizer(folder, kind="llama"):
    """A GPT-2 loads a tokenizer of no words then."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    causal_model(kind).save_pretrained(folder)


def two_gguf(folder):
    (folder / "model.safetensors").unlink()
    for name in "ab":
        (folder / f"{name}.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "0 .gguf files"),
        (lambda f: (f / "config.json").unlink(), "spoilt/config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot read the configuration in spoilt"),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk"), "model.safetensors"),
        *((partial(no_tokenizer, kind=kind), "tokenizer.json")
          for kind in ("llama", "gpt2")),
        (lambda f: (f / "tokenizer.json").write_text("{"), "no tokenizer that loads"),
        (edit_config(model_type="novel"), "cannot read the configuration in spoilt"),
        (drop_weights, "lacks weights of LlamaForCausalLM: model.layers.1.self_attn.q_proj.weight"),
        (put_nan, "is nan"),
        (two_gguf, "2 .gguf files"),
    ],
)  # fmt: skip
def test_an_unusable_model_is_named_with_its_fault(model, change, message):
    few = ("--task", "retrieval:towns", "--lengths", "64", "--examples", "1")
    assert message in refusal("model", "collect", "--model", spoilt(model, change), *few)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "own.Own"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}),
    ],
)
def test_code_in_the_folder_of_a_model_is_not_run(model, here, name, change):
    folder = Path(shutil.copytree(model, "own"))
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    write_lines(folder / "own.py", [
        "from pathlib import Path", "Path('ran').touch()",
        "from transformers import LlamaConfig", "class Own(LlamaConfig): model_type = 'own'",
    ])  # fmt: skip
    refused = pytest.raises(CalibrateError, match=r"\bown \(")
    with refused if "model_type" in change else nullcontext():
        opened = ModelFolder(folder)
        opened.load("float32")
        opened.tokenizer()
        queries_without_weights(opened)
    assert not Path("ran").exists()


@pytest.mark.slow
def test_models_that_are_not_causal_are_refused(here):
    sizes = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "num_attention_heads")}
    bert = transformers.BertConfig(**sizes, num_hidden_layers=1, intermediate_size=48)
    t5 = transformers.T5Config(vocab_size=512, num_layers=1, num_heads=4, d_model=32, d_kv=8)
    few = ("--task", "retrieval:list", "--lengths", "64", "--examples", "1")
    for model, value in (
        (transformers.BertLMHeadModel(bert), "BertLMHeadModel"),
        (transformers.T5ForConditionalGeneration(t5), "T5Config"),
    ):
        folder = save(Path(type(model).__name__), model)
        assert value in refusal("model", "collect", "--model", folder, *few)


def test_a_folder_without_scores_is_replaced_by_a_fresh_one(model, monkeypatch):
    """As after a model that does not fit into memory."""
    arguments = ("model", "collect", "--model", model, "--task", "retrieval:list", "--out", "r")

    def exhausted(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", exhausted)
        assert "out of memory" in refusal(*arguments, "--lengths", "64", "--dtype", "bfloat16")
    other = (*arguments, "--lengths", "96", "--examples", "1")
    assert "--overwrite" in refusal(*other)
    Path("r/.passes").mkdir()
    Path(f"r/.passes/{'0a' * 16}.npz").touch()  # as evaluations leave them
    call(*other, "--overwrite")
    assert not Path("r/.passes").exists()
    assert open_collection(Path("r"), files.ExampleCollection).set.cells[0].length == 96


@pytest.mark.slow
def test_killed_and_run_again(model, kept):
    """kill -9 at several moments; then the same bytes as in one go."""
    command = [
        sys.executable, "-m", "calibrate", "model", "collect", "--model", str(model),
        "--no-retention-text", "--task", "retrieval:numbers,list", "--lengths", "128,250",
        "--examples", "20", "--out", "a",
    ]  # fmt: skip
    for shards in (0, 1, 3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None and not Path("a", files.scores_name(shards)).exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert visible("a") == visible(kept)


@pytest.mark.slow
def test_the_command_of_the_guide_runs(here):
    from test_docs import commands_of

    save(Path("MODEL"), causal_model(max_position_embeddings=1024))
    Path("book.txt").write_text("The apple is on the table. " * 400)
    collect, *_ = commands_of("Fit a model", "calibrate/guides/language-models.md")
    call(*collect.removesuffix(" --device cuda").split()[1:])


def test_without_the_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("calibrate.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    line = refusal("model", "collect", "--model", model, "--task", "retrieval")
    assert "needs PyTorch and Transformers: pip install -e '.[transformers]'" in line
