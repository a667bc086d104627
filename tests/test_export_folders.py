"""What an exported folder holds beside its weights: an index, a tokenizer, and nothing that runs
otherwise than in the model."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from commands import call, refusal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_export import by_size, constants, export
from test_export_refusals import ALL_ALIKE
from test_folder_files import adapter, configure, other_file, rewrite
from tiny_causal import causal_model, save
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)

from calibrate.errors import CalibrateError
from calibrate.export import tokenizer_copy
from calibrate.export.folder import check_folder
from calibrate.store.saving import save_to_store
from calibrate.transformers.folders import ModelFolder

FIT = constants(causal_model().config)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(here):
    return save(Path("m"), causal_model(), tokenizer=False)


@pytest.fixture
def shards(here):
    return save(Path("m"), causal_model(), tokenizer=False, max_shard_size="20KB")


def published():
    """The reference of a fit in ./fits."""
    return save_to_store(replace(ALL_ALIKE, name="made"), Path("fits"))[0].reference


def faults(folder="out"):
    return check_folder(Path(folder)).problems


def change_index(folder, change):
    path = Path(folder) / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = change(index["weight_map"])
    path.write_text(json.dumps(index))


def moved(files):
    """A norm is said to be in the first file, whose own tensors are others."""
    return files | {"model.norm.weight": min(files.values())}


def unnamed(files):
    return {name: file for name, file in files.items() if name != "model.norm.weight"}


def invented(files):
    return files | {"lm_head.bias": min(files.values())}


def assert_index_is_of_the_files(folder):
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    held = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert files == held


@pytest.mark.parametrize("change", [moved, unnamed, invented])
def test_an_index_is_written_from_what_the_files_hold(change, shards):
    change_index(shards, change)
    out = export(FIT, shards)
    assert_index_is_of_the_files(out)
    assert faults() == ()
    size = sum(
        x.numel() * 4 for path in out.glob("*.safetensors") for x in load_file(path).values()
    )
    assert json.loads((out / INDEX).read_text())["metadata"] == {"total_size": size}
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_a_file_that_no_entry_of_the_index_names_does_not_run(shards):
    """Transformers loads the files that are named, and all that they hold."""
    files = json.loads((shards / INDEX).read_text())["weight_map"]
    alone = next(name for name, file in files.items() if [*files.values()].count(file) == 1)
    change_index(shards, lambda files: files | {alone: files["model.norm.weight"]})
    with pytest.raises(CalibrateError, match=f"^m .*LlamaForCausalLM: {alone}"):
        export(FIT, shards)


def test_what_transformers_would_load_besides_is_not_exported(llama):
    adapter(llama)
    reference = published()
    for options in ((), ("--as", "lora")):
        line = refusal("export", reference, "--model", llama, "--out", "out", *options)
        assert "adapter_config.json" in line
    assert not Path("out").exists()


@pytest.mark.parametrize("change", [adapter, other_file])
def test_a_check_names_what_transformers_would_load_besides(change, llama):
    change(export(FIT, llama))
    found = " ".join(faults())
    assert ("was added" in found) or ("config.json was changed" in found)
    assert "Transformers" in found
    assert "FAILED" in call("export", "--check", "out", code=1).stdout


def test_a_model_with_a_tensor_that_does_not_run_is_not_exported(llama):
    rewrite(llama, lambda x: {"model.layers.0.mlp.up_proj.bias": torch.ones(48)})
    with pytest.raises(CalibrateError, match="LlamaForCausalLM .*up_proj.bias"):
        export(FIT, llama)


def test_a_model_that_lacks_weights_is_not_exported(llama):
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrateError, match="^m .*LlamaForCausalLM: model.lay"):
        export(FIT, llama)


WORDS = {"<unk>": 0, "<s>": 1, "a": 2, "b": 3}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


def with_templates(folder):
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = {"default": "plain", "tool_use": "with tools", "rag": "with text"}
    fast.save_pretrained(folder)
    assert {path.name for path in (folder / "additional_chat_templates").iterdir()} == {
        "tool_use.jinja",
        "rag.jinja",
    }


def test_all_chat_templates_are_copied(llama):
    with_templates(llama)
    call("export", published(), "--model", llama, "--out", "out")
    for folder in (llama, "out"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        turns = [{"role": "user", "content": "x"}]
        assert tokenizer.apply_chat_template(turns, tokenize=False) == "plain"
        assert tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False) == "with tools"
    assert "as they were written" in call("export", "--check", "out").stdout
    templates = Path("out/additional_chat_templates")
    (templates / "rag.jinja").write_text("other text")
    (templates / "more.jinja").write_text("more")
    (templates / "tool_use.jinja").unlink()
    assert {*faults()} == {
        f"additional_chat_templates/{fault}"
        for fault in ("rag.jinja was changed", "more.jinja was added", "tool_use.jinja is missing")
    }


NAMES = (
    "tekken.json", "tokenizer.model.v3", "merges.txt", "qwen.tiktoken", "spiece.model",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "LICENSE",
    "generation_config.json",
)  # fmt: skip


def test_a_copied_file_that_is_a_link_to_nothing_is_refused(llama):
    (llama / "tekken.json").symlink_to("blobs")
    with pytest.raises(CalibrateError, match=r"tekken\.json"):
        export(FIT, llama)
    assert not Path("out").exists()


def test_files_of_a_tokenizer_are_copied_whole(llama):
    """Those that its class names, too, and those that another package reads."""
    for name in NAMES:
        (llama / name).write_text("x") if not (llama / name).exists() else None
    out = export(FIT, llama)
    assert {path.name for path in out.iterdir()} >= {*NAMES}


class InRust:
    """A tokenizer whose class makes the same of any file."""

    def __init__(self, state):
        self.backend_tokenizer = SimpleNamespace(to_str=lambda: state)


class InPython:
    pass


@pytest.mark.parametrize(
    ("original", "copied"), [(InRust("{}"), InRust("[]")), (InPython(), InRust("{}"))]
)
def test_a_tokenizer_that_another_class_reads_otherwise_is_refused(llama, original, copied):
    source, copy = ModelFolder(llama), ModelFolder(llama)
    source.tokenizer, copy.tokenizer = lambda: original, lambda: copied
    with pytest.raises(CalibrateError, match=r" m .* tokenizer\.json "):
        tokenizer_copy.match_tokenizer(source, copy)


def save_sentencepiece(folder):
    """As Llama 2's: its class reads a space at the beginning otherwise than its file says."""
    letters = [f"<0x{i:02X}>" for i in range(256)]
    special = ["<unk>", "<s>", "</s>", *letters]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(special_tokens=special, vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator(["hello world 1234", "the cat's 12 34"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(x, special=True) for x in special[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("fit", [FIT, by_size()], ids=["a Llama", "a Ministral 3"])
def test_an_export_makes_the_tokens_of_the_model(fit, llama):
    """A Ministral 3 has another class of tokenizer, which goes by the file."""
    save_sentencepiece(llama)
    out = export(fit, llama)
    copied = (llama / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    assert copied == (fit is FIT)
    first, second = (transformers.AutoTokenizer.from_pretrained(x) for x in (llama, out))
    for text in ("hello world", " hello", "  the\n cat", "<s>hello", "naïve é 你", ""):
        assert first(text)["input_ids"] == second(text)["input_ids"]
        assert first.decode(first(text)["input_ids"]) == second.decode(second(text)["input_ids"])
    assert faults() == ()


def test_mxfp4_experts_stay_as_they_are(here):
    """Transformers makes plain weights of them; the queries are plain."""
    pytest.importorskip("accelerate")
    model = causal_model("gpt_oss", intermediate_size=64)
    folder = save(Path("m"), model, tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        n, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(0, 255, (n, outputs, inputs // 32, 16), dtype=torch.uint8)
        weights |= {
            f"{name}_blocks": blocks,
            f"{name}_scales": torch.full_like(blocks[..., 0], 120),
        }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
    out = export(constants(model.config), folder)
    assert faults() == ()
    new = load_file(out / "model.safetensors")
    changed = {name for name, x in weights.items() if not torch.equal(new[name], x)}
    assert {name.split(".")[4] for name in changed} == {"q_proj", "sinks"}
