"""Fits in .gguf files: llama.cpp answers as our own runtime does."""

import json
import shlex
import string
import struct
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from commands import call, refusal
from fake_progress import Told
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from guides import lines_of, section
from llama_cpp import LlamaCpp
from tiny_causal import save
from tiny_gguf import small_model, write_gguf

from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError
from calibrate.export import gguf as gguf_export
from calibrate.export.architectures import GGUF_GRAPHS
from calibrate.export.engine_check import APPLIES_BASELINE, APPLIES_FIT, APPLIES_OTHER
from calibrate.export.gguf import check_gguf, prepare_gguf
from calibrate.export.gguf_model import GgufModel
from calibrate.export.plan import TAGS
from calibrate.export.scale_gguf_rows import _SCALES, scale_rows
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.store.saving import save_to_store
from calibrate.transformers import apply

VOCABULARY = 256
# Whole words: llama.cpp gives no probabilities at parts of a character.
WORDS = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase][:VOCABULARY]
PROMPT = [7 * i * i % VOCABULARY for i in range(1, 41)]
FACTORS = (1.9, 0.4, 1.0, 2.7)  # of the heads of one layer
ONE_NORM = ("qwen3", "gemma3")  # one weight for all heads follows their queries
# llama.cpp's approximations differ: Gemma's activation is a table of float16.
ERRORS = {"gemma3": 3e-3}


def fit_of(rule, domain, *of_layers):
    entries = [
        Entry(coefficients, domain, layer, head)
        for layer, heads in enumerate(of_layers)
        for head, coefficients in enumerate(heads)
        if coefficients is not None
    ]
    return Fit(rule, tuple(entries), name="made-up")


def lines(*of_layers):
    return fit_of(RuleForm.log_size(0.1, 64.0), (0.0, 9.0), *of_layers)


def constants(*of_layers):
    rule = RuleForm.constant(0.1, 64.0)
    return fit_of(rule, (), *([(b,) for b in factors] for factors in of_layers))


ONES = np.ones(2, np.float32)


def make(kind="llama", folder="m", packing=Type.F32, **changes):
    model = small_model(kind, vocab_size=VOCABULARY, **changes)
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.manual_seed(len(name))
            weight.copy_(0.5 * torch.randn_like(weight) + ("norm" in name and kind != "gemma3"))
    folder = write_gguf(Path(folder), model, packing, architecture=kind, tokens=WORDS)
    return model, folder / "tiny.gguf"


def export(fit, file, out="out.gguf"):
    return gguf_export.write_gguf(prepare_gguf(fit, GgufModel(Path(file))), Path(out))


def our_log_p(model, fit, tokens):
    apply(model, fit)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).numpy()


def assert_same_answers(engine, model, fit, error=1e-4):
    ours = our_log_p(model, fit, PROMPT)
    for length in (2, 17, len(PROMPT)):
        found = engine.log_p(PROMPT[:length], VOCABULARY)
        np.testing.assert_allclose(found, ours[length - 1], atol=error)
    tokens = list(PROMPT)
    for _ in range(12):
        tokens.append(int(our_log_p(model, fit, tokens)[-1].argmax()))
    assert engine.continued(PROMPT, 12) == tokens[len(PROMPT) :]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1], -1).numpy()
    assert np.abs(plain - ours[-1]).max() > 100 * error


QUICK = ("llama", "gemma3")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in GGUF_GRAPHS if kind not in QUICK]


@pytest.mark.parametrize("kind", [*QUICK, *SLOW])
def test_llama_cpp_answers_as_we_do(kind):
    model, file = make(kind)
    of_layer = (2.2,) * 4 if kind in ONE_NORM else FACTORS
    fit = constants(of_layer, (1.0, 1.0, 1.0, 1.0))
    export(fit, file)
    assert_same_answers(LlamaCpp("out.gguf"), model, fit, ERRORS.get(kind, 1e-4))


@pytest.mark.parametrize("bias", [False, True])
def test_rules_of_log_n(bias):
    model, file = make(attention_bias=bias)
    fit = lines(*[[(0.37 * b, b) for b in factors] for factors in (FACTORS, FACTORS[::-1])])
    assert export(fit, file).model_type == "mistral3"
    assert_same_answers(LlamaCpp("out.gguf"), model, fit)
    read = check_gguf(Path("out.gguf"))
    assert (read.problems, read.model_type) == ((), "mistral3")
    assert read.plan.ratio == pytest.approx(0.37)
    key = b"mistral3.attention.temperature_scale" + struct.pack("<I", Kind.FLOAT32)
    data = Path("out.gguf").read_bytes()
    at = data.index(key) + len(key)
    Path("out.gguf").write_bytes(data[:at] + struct.pack("<f", 0.38) + data[at + 4 :])
    (fault,) = check_gguf(Path("out.gguf")).problems
    assert fault == "its weights or keys were changed"


def test_all_else_stays_as_it_is():
    _, file = make(packing=Type.Q8_0)
    export(constants((1.0,) * 4, FACTORS), file)
    before, after = gguf.GGUFReader(file), gguf.GGUFReader("out.gguf")
    assert [t.name for t in before.tensors] == [t.name for t in after.tensors]
    for own, new in zip(before.tensors, after.tensors, strict=True):
        assert own.tensor_type == new.tensor_type
        same = own.data.tobytes() == new.data.tobytes()
        assert same == (own.name != "blk.1.attn_q.weight")
    added = set(after.fields) - set(before.fields)
    assert all(name.startswith("calibrate.") for name in added)
    for name in set(before.fields) - {"GGUF.kv_count"}:
        assert before.fields[name].types == after.fields[name].types
        assert before.fields[name].contents() == after.fields[name].contents()
    assert after.fields["calibrate.fit"].contents() == "made-up@1"


@pytest.mark.parametrize(
    ("kind", "name", "factors", "by_row"),
    [  # a fused tensor begins with the rows of queries; Gemma 3's norm is stored as 1 + weight
        ("phi3", "attn_qkv", FACTORS, np.array([*np.repeat(FACTORS, 8), *[1.0] * 32])[:, None]),
        ("gemma3", "attn_q_norm", (2.2,) * 4, 2.2),
    ],
)
def test_which_rows_are_multiplied(kind, name, factors, by_row):
    _, file = make(kind)
    export(constants(factors, factors), file)
    own, new = (
        next(t.data for t in gguf.GGUFReader(path).tensors if t.name == f"blk.0.{name}.weight")
        for path in (file, "out.gguf")
    )
    np.testing.assert_allclose(new, own * by_row, rtol=1e-6)


def test_tokens_that_are_not_utf8_stay():
    fit, (_, file) = constants(FACTORS, FACTORS), make()
    data = file.read_bytes()
    file.write_bytes(data.replace(struct.pack("<Q2s", 2, b"aa"), struct.pack("<Q2s", 2, b"a\xff")))
    export(fit, file)
    tokens = [
        [field.parts[i].tobytes() for i in field.data]
        for path in (file, "out.gguf")
        for field in [gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]]
    ]
    assert tokens[0] == tokens[1]
    assert b"a\xff" in tokens[0]
    architecture = struct.pack("<Q5s", 5, b"llama"), struct.pack("<Q5s", 5, b"llam\xff")
    file.write_bytes(data.replace(*architecture))
    with pytest.raises(CalibrateError, match="^general.architecture"):
        export(fit, file, "b.gguf")


def test_a_model_that_cannot_be_exported():
    fit = constants(FACTORS, FACTORS)
    _, file = make("qwen3", folder="qwen3")
    with pytest.raises(CalibrateError, match=r"layer 0 .*0\.4\b.*2\.7"):
        export(fit, file)
    by_size = lines(*[[(0.3 * b, b) for b in FACTORS]] * 2)
    _, file = make("qwen2", folder="qwen2")
    with pytest.raises(CalibrateError, match="qwen2"):
        export(by_size, file)
    scaled = write_gguf(
        Path("scaled"), small_model(), add_keys=lambda w: w.add_tensor("rope_freqs.weight", ONES)
    )
    with pytest.raises(CalibrateError, match=r"rope_freqs\.weight"):  # Llama 3.1
        export(by_size, scaled / "tiny.gguf")
    for architecture, key, why in (
        ("gemma2", "general.n", r"[\w ]+\bgemma2 .*\bllama, qwen2"),
        ("llama", "llama.attention.clamp_kqv", r"bare\.gguf .*attention\.clamp_kqv = 8\.0"),
        ("llama", "split.count", r"bare\.gguf .*\b8\.0 .*llama-gguf-split --merge"),
    ):
        writer = gguf.GGUFWriter("bare.gguf", architecture)
        writer.add_float32(key, 8.0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CalibrateError, match=f"^{why}"):
            export(fit, "bare.gguf")
    assert not Path("out.gguf").exists()


def test_exported_and_existing_files_are_refused():
    fit, (_, file) = constants(FACTORS, FACTORS), make()
    export(fit, file)
    with pytest.raises(CalibrateError, match="^out.gguf .*made-up@1"):
        export(fit, "out.gguf", "again.gguf")
    with pytest.raises(CalibrateError, match=r"^out\.gguf "):
        export(fit, file)


@pytest.mark.parametrize("packing", [Type.F32, Type.F16, Type.BF16, Type.Q8_0])
def test_weights_that_are_not_finite_are_refused(packing):
    model = small_model()
    model.model.layers[1].self_attn.q_proj.weight[3, 2] = np.inf
    with np.errstate(invalid="ignore"):
        file = write_gguf(Path("m"), model, packing) / "tiny.gguf"
    with pytest.raises(CalibrateError, match="NaN"):
        export(constants(FACTORS, FACTORS), file)
    assert not Path("out.gguf").exists()


def test_the_file_appears_whole_or_not_at_all():
    _, file = make()
    steps = []

    def interrupt(done):
        steps.append(sorted(path.name for path in Path("there").iterdir()))
        raise KeyboardInterrupt

    model, told = GgufModel(file), Told(interrupt)
    with pytest.raises(KeyboardInterrupt):
        gguf_export.write_gguf(
            prepare_gguf(constants(FACTORS, FACTORS), model), Path("there/out.gguf"), told
        )
    sizes = [tensor.n_bytes for tensor in model.file.tensors.values()]
    assert told.stages == [("writing", len(sizes), sum(sizes))]
    assert told.steps == [(sizes[0], False)]
    assert len(steps[0]) == 1
    assert steps[0][0].endswith(".tmp")
    assert list(Path("there").iterdir()) == []


def published(fit):
    return save_to_store(fit, Path("fits"))[0].reference


def test_the_command_and_its_check():
    _, file = make("qwen2", packing=Type.Q8_0)
    reference = published(constants(FACTORS, (1.0, 1.5, 1.0, 1.0)))
    said = json.loads(
        call("export", reference, "--model", file, "--out", "a.gguf", "--json").stdout
    )
    assert said["factors"] == {"0": list(FACTORS), "1": [1.0, 1.5, 1.0, 1.0]}
    read = json.loads(call("export", "--check", "a.gguf", "--json").stdout)
    assert read == said
    assert "are as they were written" in call("export", "--check", "a.gguf").stdout

    data = bytearray(Path("a.gguf").read_bytes())
    reader = gguf.GGUFReader("a.gguf")
    for name in ("blk.1.attn_q.weight", "output_norm.weight"):
        (tensor,) = (t for t in reader.tensors if t.name == name)
        data[tensor.data_offset + 40] ^= 1
        Path("b.gguf").write_bytes(data)
        data[tensor.data_offset + 40] ^= 1
        result = call("export", "--check", "b.gguf", code=1)
        assert "b.gguf " in result.stderr
    assert str(file) in refusal("export", "--check", file)


def check_served(file, *exported, code):
    """What llama.cpp applies as it serves a file, by `export --check`, and the line on stderr."""
    engine, rng = LlamaCpp(file, fast=True), np.random.default_rng(0)
    prompts = ({"prompt_ids": rng.integers(0, VOCABULARY, n).tolist(), "answer_ids": [1]}
               for n in (8, 8, 30, 30, 100, 100))  # fmt: skip
    Path("p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    options = "--prompts", "p.jsonl", "--engine", engine.address, "--json"
    result = call("export", "--check", *exported, *options, code=code)
    return json.loads(result.stdout)["applies"], result.stderr.strip().splitlines()[-1]


def test_llama_cpp_is_asked_whether_it_applies_a_fit():
    _, file = make()
    export(constants(FACTORS, FACTORS[::-1]), file)
    assert check_served("out.gguf", "out.gguf", code=0)[0] == APPLIES_FIT
    assert check_served(file, "out.gguf", code=3)[0] == APPLIES_BASELINE


@pytest.mark.slow
def test_llama_cpp_is_asked_whether_it_applies_a_rule_of_log_n():
    _, file = make()
    export(constants(FACTORS, FACTORS[::-1]), file)
    by_size = lines(*[[(0.37 * b, b) for b in factors] for factors in (FACTORS, FACTORS[::-1])])
    export(by_size, file, "by-size.gguf")
    original = "by-size.gguf", "--model", file
    assert check_served("by-size.gguf", *original, code=0)[0] == APPLIES_FIT
    assert check_served(file, *original, code=3)[0] == APPLIES_BASELINE
    applies, line = check_served("out.gguf", *original, code=3)
    assert applies == APPLIES_OTHER
    assert "without its part of log n" in line
    line = refusal("export", "--check", "by-size.gguf", "--engine", "http://localhost:1")
    assert line.endswith("give --model, its original")


def test_what_the_command_refuses(monkeypatch):
    fit = published(constants(FACTORS, FACTORS))
    save(Path("hf"), small_model())
    line = refusal("export", fit, "--model", "hf", "--out", "out.gguf")
    assert "convert_hf_to_gguf.py FOLDER --outfile MODEL.gguf" in line
    other = replace(constants(FACTORS, FACTORS), source={"fingerprint": "sha256:" + "0" * 64})
    arguments = ("export", published(other), "--model", "m/tiny.gguf", "--out", "out.gguf")
    make()
    assert "--any-model" in refusal(*arguments)
    call(*arguments, "--any-model")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install" in refusal("export", "--check", "out.gguf")


def test_the_page_that_documents_it():
    _, file = make()
    file.rename("model.gguf")
    published(replace(constants(FACTORS, FACTORS), name="mine"))
    for line in lines_of(section("serving.md", "A .gguf file")):
        call(*shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize(
    ("tags", "is_export"),
    [([*TAGS], True), (["text-generation", *TAGS], True), ([TAGS[0], "text-generation"], False)],
)
def test_a_file_that_was_converted_from_an_exported_folder(tags, is_export):
    """llama.cpp's converter writes the tags of the folder's card."""

    def add(writer):
        writer.add_tags(tags)

    file = write_gguf(Path("m"), small_model(), add_keys=add) / "tiny.gguf"
    if is_export:
        with pytest.raises(CalibrateError, match=r"tiny\.gguf carries the fit"):
            export(constants(FACTORS, FACTORS), file)
    else:
        export(constants(FACTORS, FACTORS), file)
    assert Path("out.gguf").exists() != is_export


ROUNDING = {"F32": 1e-7, "BF16": 4e-3}
# Those that the package cannot write: any bytes are such weights, if their scales are numbers.
READ_ALONE = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "IQ1_S", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
WRITTEN = ("F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", *ROUNDING)


def dequantized(data, kind):
    return gguf.quants.dequantize(data, kind).astype(np.float64)


def packed(kind):
    """Four rows of weights."""
    random = np.random.default_rng(0)
    if kind.name in WRITTEN:
        weights = random.normal(0, 0.05, (4, 512)).astype(np.float32)
        half = kind == Type.F16
        return weights.astype(np.float16) if half else gguf.quants.quantize(weights, kind)
    n_weights, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (4, 512 // n_weights * size), np.uint8)
    blocks = data.reshape(4, -1, size)
    for at in _SCALES[kind]:
        scales = random.uniform(1e-3, 2e-3, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return data


@pytest.mark.parametrize("name", [*WRITTEN, *READ_ALONE])
def test_rows_of_every_type_times_their_factors(name):
    kind, factors = Type[name], np.array(FACTORS)
    scaled = scale_rows(data := packed(kind), kind, factors)
    exact = factors[:, None] * dequantized(data, kind)
    found = dequantized(scaled, kind)
    assert np.linalg.norm(found - exact) < ROUNDING.get(name, 1e-3) * np.linalg.norm(exact)
    np.testing.assert_array_equal(scaled[2], data[2])  # a factor of 1 changes nothing


def test_what_is_refused_of_rows():
    big = np.full((1, 32), 6e4, np.float16)
    with pytest.raises(CalibrateError, match=r"\b2 .*F16"):
        scale_rows(big, Type.F16, np.array([2.0]))
    packed = gguf.quants.quantize(np.ones((1, 64), np.float32), Type.MXFP4)
    with pytest.raises(CalibrateError, match="MXFP4"):
        scale_rows(packed, Type.MXFP4, np.array([2.0]))
    bias = gguf.quants.quantize(np.ones(32, np.float32), Type.Q8_0)
    with pytest.raises(CalibrateError, match=r"\bQ8_0, .*F32"):
        scale_rows(bias, Type.Q8_0, np.ones(32))
