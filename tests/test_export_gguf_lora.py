"""Fits as LoRA in .gguf files: llama.cpp answers with them as our own runtime does."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_cpp import LlamaCpp
from test_cli import call, refusal
from test_export_gguf import (
    FACTORS,
    PROMPT,
    VOCABULARY,
    asked,
    assert_same_answers,
    constants,
    lines,
    make,
    our_log_p,
    published,
)

from calibrate.errors import CalibrateError
from calibrate.export import gguf_lora
from calibrate.export.gguf_card import is_of_card
from calibrate.export.gguf_lora import export_gguf_lora
from calibrate.export.gguf_model import GgufModel
from calibrate.storage.gguf_header import read_gguf


def export(fit, file, out="lora.gguf", max_rank=None):
    return export_gguf_lora(fit, GgufModel(file), Path(out), max_rank=max_rank)


@pytest.mark.parametrize("kind", ["llama", pytest.param("phi3", marks=pytest.mark.slow)])
def test_llama_cpp_answers_as_we_do(kind):
    model, file = make(kind)
    fit = constants(FACTORS, (1.0, 1.0, 0.7, 1.0))
    assert export(fit, file).problems == ()
    assert_same_answers(LlamaCpp(file, lora="lora.gguf"), model, fit)


@pytest.mark.slow
def test_rows_of_a_quantised_base_are_those_that_it_multiplies():
    """Llama.cpp rounds activations of the base to 8 bits; the original is as far from ours."""
    model, file = make(packing=Type.Q8_0)
    fit = constants(FACTORS, FACTORS[::-1])
    export(fit, file)
    found = LlamaCpp(file, lora="lora.gguf").log_p(PROMPT, VOCABULARY)
    plain = LlamaCpp(file).log_p(PROMPT, VOCABULARY)
    ours, ours_plain = (our_log_p(model, x, PROMPT)[-1] for x in (fit, constants((1.0,))))
    print(
        np.abs(found - ours).max(),
        np.abs(plain - ours_plain).max(),
        np.abs(plain - ours).max(),
    )
    assert np.abs(found - ours).max() < 3 * np.abs(plain - ours_plain).max()
    assert np.abs(plain - ours).max() > 10 * np.abs(found - ours).max()


@pytest.mark.parametrize(
    ("kind", "fit", "changes", "match"),
    [
        ("qwen2", constants(FACTORS), {}, r"^blk\.0\.attn_q\.bias "),
        ("qwen3", constants((2.0,) * 4), {}, r"^blk\.0\.attn_q_norm\.weight "),
        ("llama", lines([(0.37 * b, b) for b in FACTORS] * 2), {}, "head 4|log n"),
        ("llama", constants((1.0,)), {}, r"\bbeta .*\b1,"),
    ],
)
def test_what_a_lora_cannot_hold(kind, fit, changes, match):
    _, file = make(kind, **changes)
    with pytest.raises(CalibrateError, match=match):
        export(fit, file)


def test_the_command_and_its_check(here):
    _, file = make()
    name = published(constants(FACTORS, FACTORS))
    command = "export", name, "--model", file, "--as", "lora", "--out", "lora.gguf"
    line = refusal(*command, "--max-rank", "9")
    assert "blk.0.attn_q.weight needs a LoRA of rank 24, and 9 is allowed" in line
    shown = call(*command).stdout
    check = "export", "--check", "lora.gguf"
    assert call(*check, "--model", file).stdout == shown
    assert "--model" in refusal(*check)
    data = bytearray((here / "lora.gguf").read_bytes())
    data[-40] ^= 1
    (here / "lora.gguf").write_bytes(data)
    assert "lora_b " in call(*check, "--model", file, code=1).stderr
    _, other = make(folder="other", initializer_range=0.1)
    assert "--model" in refusal(*check, "--model", other)


def test_llama_cpp_is_asked_whether_it_applies_it():
    _, file = make()
    export(constants(FACTORS, FACTORS[::-1]), file)
    given = "lora.gguf", "--model", file
    assert "applies the fit: it goes 1.00" in asked(file, *given, lora="lora.gguf", code=0)
    assert "applies plain softmax: it goes 0.00" in asked(file, *given, code=3)


def test_a_file_of_an_earlier_version_has_no_keys_of_a_card(monkeypatch):
    _, file = make()
    fit, model = constants(FACTORS), GgufModel(file)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_lora, "card_keys", lambda *_: {})
        export(fit, file)
    assert not any(map(is_of_card, read_gguf(Path("lora.gguf")).keys))
    assert gguf_lora.read_gguf_lora(Path("lora.gguf"), model).problems == ()
