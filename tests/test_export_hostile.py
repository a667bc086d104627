"""Hostile .gguf files and model folders: one line says what is wrong, and nothing is written."""

import json
import os
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import call, refusal
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf import GGUFValueType as Kind
from hostile_gguf import EXTREMES, Pieces, key
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_export_gguf import FACTORS, constants, export, lines, published
from tiny_causal import causal_model, save
from tiny_gguf import small_model, write_gguf

from calibrate.errors import CalibrateError
from calibrate.export.folder import check_folder, prepare_folder, write_folder
from calibrate.export.gguf import check_gguf
from calibrate.storage.gguf_header import read_gguf
from calibrate.transformers.folders import ModelFolder

Q, NORM = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
ARRAY = "declares an array of 1,152,921,504,606,846,976 items"
FIT = constants(FACTORS, FACTORS)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m", small_model()) / "tiny.gguf"


def put(name, kind, layout="", *values):
    return lambda pieces: pieces.keys.update({name: key(name, kind, layout, *values)})


def axes(name, *arguments, **changes):
    return lambda pieces: pieces.axes(name, *arguments, **changes)


def twice(of):
    return lambda pieces: getattr(pieces, of).update(x=next(iter(getattr(pieces, of).values())))


FILES = {
    "array": (put("x", Kind.ARRAY, "IQ", Kind.UINT8, 2**60), ARRAY),
    "texts": (put("x", Kind.ARRAY, "IQ", Kind.STRING, 2**60), ARRAY),
    "text": (put("x", Kind.STRING, "Q", 2**63), "header does not end within"),
    "a long array": (put("x", Kind.ARRAY, "IQ", Kind.INT8, 2**21), "header does not end within"),
    "deep": (put("x", Kind.ARRAY, "IQ" * 5_000, *(Kind.ARRAY, 1) * 5_000), "values of type 9,"),
    "type": (put("x", 13), "x has values of type 13, expected numbers or texts"),
    "name": (put("\x1b[2J", Kind.UINT8, "B", 1), r'"\u001b[2J" occurs twice, or is not plain text'),
    "key twice": (twice("keys"), '"general.architecture" occurs twice'),
    "tensor twice": (twice("tensors"), '"token_embd.weight" occurs twice'),
    "alignment": (put("general.alignment", Kind.UINT32, "I", 0), "is not a power of two up to"),
    "no axes": (axes(Q, ()), f"{Q} has 0 axes, expected 1 to 4"),
    "five axes": (axes(Q, (32, 1, 1, 1, 32)), f"{Q} has 5 axes"),
    "one axis": (axes(Q, (1024,)), f"{Q} in bad.gguf has the axes (1024,), and its keys declare"),
    "three axes": (axes(Q, (32, 16, 2)), f"{Q} in bad.gguf has the axes (2, 16, 32)"),
    "empty": (axes(Q, (32, 0)), "a tensor of F32 has the axes (0, 32)"),
    "overflow": (axes(Q, (2**32, 2**32)), f"{Q} goes beyond its"),
    "no type": (axes(Q, kind=99), "99 is not a valid GGMLQuantizationType"),
    "alignment of 48": (put("general.alignment", Kind.UINT32, "I", 48), "is not a power of two"),
    "rows of blocks": (axes(NORM, (16, 2), kind=8), "a tensor of Q8_0 has the axes (2, 16)"),
    "wraps": (axes("token_embd.weight", offset=2**64 - 32), "offset 18,446,744,073,709,551,584,"),
    "overlaps": (axes(Q, offset=0), f"{Q} has the offset 0, expected"),
    "misaligned": (axes("token_embd.weight", offset=4), "offset 4, expected 0"),
    "text for a number": (put("llama.block_count", Kind.STRING, "Q", 0), "llama.block_count = ''"),
    "NaN": (put("llama.attention.key_length", Kind.FLOAT32, "f", float("nan")), "length = nan; it"),
    "an array": (put("llama.block_count", Kind.ARRAY, "IQ", 0, 0), "= 'an array of 0'; it"),
    "split": (put("split.count", Kind.STRING, "Q2s", 2, b"ab"), "is one of ab files; merge them"),
    "one of two": (put("split.count", Kind.UINT16, "H", 2), "is one of 2 files; merge them"),
    "a bias": (
        put("llama.attention.max_alibi_bias", Kind.FLOAT32, "f", 8.0), "max_alibi_bias = 8.0: log"
    ),
    "layers": (put("llama.block_count", Kind.UINT64, "Q", 10**7), "no tensor of queries in la"),
    "heads of keys": (
        put("llama.attention.head_count_kv", Kind.UINT32, "I", 10**6),
        "attn_k.weight in bad.gguf has the axes (16, 32), and its keys declare (8000000, 32)",
    ),
    "context": (put("llama.context_length", Kind.INT32, "i", -1), "context_length = -1; it"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(name, file):
    change, message = FILES[name]
    change(pieces := Pieces(file))
    assert_refused(pieces.put_together(), message)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"n_keys": 2**60}, "1,152,921,504,606,846,976 keys"),
        ({"n_tensors": 2**60}, "1,152,921,504,606,846,976 tensors"),
        ({"n_keys": 100}, "header does not end"),
        ({"version": 3 << 24}, "byte order"),
    ],
)
def test_hostile_counts(counts, message, file):
    assert_refused(Pieces(file).put_together(**counts), message)


def test_a_file_ends_with_its_last_tensor(file):
    whole = file.read_bytes()
    assert_refused(whole[:-32], "bytes")
    assert_refused(whole + bytes(32), "bytes")


def test_a_header_and_its_arrays_have_an_end(file):
    pieces, many = Pieces(file), 3 << 20
    put("x", Kind.ARRAY, f"IQ{many}x", Kind.INT8, many)(pieces)
    put("y", Kind.ARRAY, "IQ", Kind.INT8, many)(pieces)
    assert_refused(pieces.put_together(), "y declares an array of 3,145,728 items")
    put("x", Kind.STRING, "Q", 1 << 26)(pieces)
    assert_refused(pieces.put_together(), "not end within 67,108,864 bytes", size=1 << 27)


def test_keys_that_an_export_may_write_are_not_taken_over(file):
    own = {"calibrate.note", "mistral3.note"}
    pieces = Pieces(file)
    for name in own:
        put(name, Kind.UINT8, "B", 1)(pieces)
    Path("own.gguf").write_bytes(pieces.put_together())
    export(lines(*[[(0.3, 1.0)] * 4] * 2), "own.gguf")
    assert not own & read_gguf(Path("out.gguf")).keys.keys()


def assert_refused(data, message, size=None):
    Path("bad.gguf").write_bytes(data)
    if size:
        os.truncate("bad.gguf", size)
    for read in (partial(export, FIT, "bad.gguf"), partial(check_gguf, Path("bad.gguf"))):
        with pytest.raises(CalibrateError) as refused:
            read()
        assert message in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
    assert not Path("out.gguf").exists()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (axes("output_norm.weight", kind=Type.I32), "its weights or keys were changed"),
        (axes("blk.0.ffn_up.weight", (64, 32)), "its weights or keys were changed"),
        (put("llama.rope.freq_base", Kind.FLOAT32, "f", 7.0), "its weights or keys were changed"),
        (put("calibrate.fit", Kind.STRING, "Q7s", 7, b"other@1"),
         "the fit in it is made-up@1, and its keys say other@1"),
        (put("calibrate.id", Kind.STRING, "Q7s", 7, b"sha256:"), "and its keys say sha256:"),
        (put("calibrate.digest", Kind.STRING, "Q7s", 7, b"sha256:"),
         "its weights or keys were changed"),
        (put("calibrate.coefficients", Kind.UINT8, "B", 7), "the file is not a fit file"),
    ],
)  # fmt: skip
def test_a_check_finds_what_was_changed(change, fault, file):
    export(FIT, file)
    assert check_gguf(Path("out.gguf")).problems == ()
    change(pieces := Pieces(Path("out.gguf")))
    Path("out.gguf").write_bytes(pieces.put_together())
    assert fault in call("export", "--check", "out.gguf", code=1).stderr


CONFIGURATIONS = {
    "hidden_size": (-32, "cannot make a llama as m/config.json says ("),
    "hidden_act": ("no", "as m/config.json says ('no' is unknown or missing); give a causal"),
    "pad_token_id": (10**9, "cannot make a llama as m/config.json says ("),
    "rope_parameters": ({"rope_type": "no", "rope_theta": 1e4}, "says ('no' is unknown or mis"),
    "num_hidden_layers": (10**7, "m declares 10,000,000 layers of 4 heads, and has 21 t"),
    "num_attention_heads": (10**9, "declares 2 layers of 1,000,000,000 heads, and has 21 t"),
    "num_key_value_heads": (10**6, "declares a model of 1,024,046,240 weights, and its files"),
    "vocab_size": (10**12, "m declares a model of 64,000,"),
    "intermediate_size": (40, "mlp.down_proj.weight in m has the shape (32, 48), and its config.j"),
    "size": ("x" * 2**22, "config.json has 4,194,"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_hostile_configuration_is_refused(name, model):
    value, message = CONFIGURATIONS[name]
    source = Path(shutil.copytree(model, "m"))
    config = json.loads((source / "config.json").read_text()) | {name: value}
    (source / "config.json").write_text(json.dumps(config))
    line = refusal("export", published(FIT), "--model", "m", "--out", "out")
    assert message in line
    assert "bug" not in line
    assert not Path("out").exists()


def test_layers_of_numbers_without_end(model):
    """Transformers does not load them."""
    source = Path(shutil.copytree(model, "m"))
    weights = load_file(source / "model.safetensors")
    weights[f"model.layers.{'9' * 5000}.self_attn.q_proj.weight"] = torch.ones(1)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    line = refusal("export", published(FIT), "--model", "m", "--out", "out")
    assert "cannot load the model in m (Exceeds the limit (4300 digits) for integer str" in line
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["tokenizer.x", "model.safetensors", "config.json"])
def test_links_out_of_a_folder_are_not_followed(name, model):
    source, reference = Path(shutil.copytree(model, "m")), published(FIT)
    outside = Path("secret")
    outside.write_bytes((source / name).read_bytes() if (source / name).exists() else b"secret")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    line = refusal("export", reference, "--model", "m", "--out", "out")
    assert f"m/{name} is a link to {outside.resolve()}, outside of the model's folder" in line
    assert not Path("out").exists()


def test_links_into_the_blobs_of_the_hub_are_followed(model):
    repository = Path("models--a--b")
    snapshot, blobs = repository / "snapshots" / "1f", repository / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(model, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    call("export", published(FIT), "--model", snapshot, "--out", "out")
    assert not any(path.is_symlink() for path in Path("out").iterdir())
    (repository / "refs").write_text("1f")
    (snapshot / "LICENSE").symlink_to("../../refs")
    line = refusal("export", published(FIT), "--model", snapshot, "--out", "other")
    assert "refs, outside of the model's folder" in line


def test_files_that_were_added_to_an_export_are_named(model):
    call("export", published(FIT), "--model", model, "--out", "out")
    for harmless in ("README.md", ".gitattributes"):
        (Path("out") / harmless).write_text("x")
    assert "as they were written" in call("export", "--check", "out").stdout
    added = (
        "adapter_config.json", "adapter_model.safetensors", "modeling_x.py", "pytorch_model.bin",
        "x.pkl", "model-00001-of-00002.safetensors", "chat_template.jinja",
    )  # fmt: skip
    for name in added:
        (Path("out") / name).write_text("x")
    (Path("out") / "additional_chat_templates").mkdir()
    shown = call("export", "--check", "out", code=1).stderr
    assert all(f"{name} was added" in shown for name in (*added, "additional_chat_templates"))
    assert "README" not in shown


@pytest.fixture
def bounded():
    """Ends what takes 300 MB, or does not end."""

    def end(*_):
        raise AssertionError("it does not end")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 300_000_000, old[1]))
    handler = signal.signal(signal.SIGALRM, end)
    yield
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, old)


def mutated(pieces, drawn):
    """A file with a part of its header replaced, cut or filled in."""
    header = bytearray(pieces.whole[: pieces.header_size])
    kind, at, bytes_, extreme = drawn
    if kind == "number":
        begin, size = pieces.numbers[at % len(pieces.numbers)]
        header[begin : begin + size] = (extreme % 256**size).to_bytes(size, "little")
    elif kind == "cut":
        return bytes(header[: at % len(header)])
    else:
        begin = at % len(header)
        end = begin + len(bytes_) if kind == "bytes" else begin
        header[begin:end] = bytes_
    return bytes(header) + pieces.data


MUTATIONS = st.tuples(
    st.sampled_from(("number", "bytes", "inserted", "cut")), st.integers(0, 2**20),
    st.binary(min_size=1, max_size=32), st.sampled_from(EXTREMES),
)  # fmt: skip
SLOWLY = settings(
    max_examples=1_500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def contents(path):
    """Keys as stored, and tensors by the package `gguf`."""
    tensors = {
        t.name: (t.tensor_type, *t.shape, t.data.tobytes()) for t in GGUFReader(path).tensors
    }
    return Pieces(path).keys, tensors


def tried(act):
    """What an act returns, or None if it refuses; it has half a minute."""
    signal.alarm(30)
    try:
        return act()
    except CalibrateError:
        return None
    finally:
        signal.alarm(0)


@pytest.mark.slow
def test_a_mutated_file_is_refused_or_has_the_effect_of_the_original(file, bounded):
    """Every tensor has the bytes that it has in an export of the original."""
    export(FIT, file, "first.gguf")
    pieces, written = Pieces(file), [x[-1] for x in contents("first.gguf")[1].values()]
    refused = []

    @SLOWLY
    @given(MUTATIONS)
    def try_one(drawn):
        Path("bad.gguf").write_bytes(mutated(pieces, drawn))
        Path("out.gguf").unlink(missing_ok=True)
        refused.append(tried(lambda: export(FIT, "bad.gguf")) is None)
        assert Path("out.gguf").exists() != refused[-1]
        if not refused[-1]:
            keys, tensors = contents("out.gguf")
            assert [x[-1] for x in tensors.values()] == written
            own = Pieces(Path("bad.gguf")).keys
            assert {name: keys[name] for name in own} == own

    try_one()
    assert 0 < refused.count(False) < len(refused)


@pytest.mark.slow
def test_a_mutated_export_is_found_out_or_has_the_same_contents(file, bounded):
    export(FIT, file)
    pieces, original = Pieces(Path("out.gguf")), contents("out.gguf")
    found = []

    @SLOWLY
    @given(MUTATIONS)
    def try_one(drawn):
        Path("bad.gguf").write_bytes(mutated(pieces, drawn))
        read = tried(lambda: check_gguf(Path("bad.gguf")))
        found.append(read is None or bool(read.problems))
        assert found[-1] or contents("bad.gguf") == original

    try_one()
    assert np.mean(found) > 0.9


ANY = (0, -32, 1, 10**7, 10**12, 2**63, 1.5, float("nan"), True, None, "x", [], ["x"], {"x": 1})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_any_value_of_a_configuration_is_refused_or_gives_a_whole_export(kind, here, bounded):
    source = save(Path("m"), causal_model(kind), tokenizer=False)
    stored = json.loads((source / "config.json").read_text())
    fit = constants((1.5,) * 4, (1.5,) * 4)

    @settings(SLOWLY, max_examples=100)
    @given(st.sampled_from(sorted(stored)), st.sampled_from(ANY))
    def try_one(name, value):
        (source / "config.json").write_text(json.dumps(stored | {name: value}))
        shutil.rmtree("out", ignore_errors=True)
        prepared = tried(lambda: prepare_folder(fit, ModelFolder(source)))
        if prepared and tried(lambda: write_folder(prepared, Path("out"))):
            assert check_folder(Path("out")).problems == ()

    try_one()
