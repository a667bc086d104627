"""Wording of messages about models in folders and files, and about exports of them."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from messages import says
from safetensors.torch import load_file, save_file
from test_export_folders import with_templates
from tiny_causal import causal_model, save
from tiny_gguf import small_model, write_gguf

from calibrate.core.rule import Rule
from calibrate.errors import CalibrateError, CoefficientsError, DamagedError
from calibrate.export.adapter import by_adapter, write_adapter
from calibrate.export.checkpoint import write
from calibrate.export.configuration_key import export_key
from calibrate.export.gguf_file import export_gguf
from calibrate.export.gguf_lora import export_gguf_lora
from calibrate.export.gguf_model import GgufModel
from calibrate.export.gguf_rows import scale_rows
from calibrate.export.ia3 import Ia3
from calibrate.export.logit_scale import scaled_model
from calibrate.export.lora import Lora
from calibrate.export.preparation import prepare
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry
from calibrate.transformers.folders import ModelFolder

DOMAIN = (0.0, 6.0)
ALIKE = Coefficients(Rule.log_size(0.1, 16.0), (Entry((0.0, 1.3), DOMAIN),), name="made")
OF_HEADS = replace(
    ALIKE,
    entries=tuple(
        Entry((0.0, beta), DOMAIN, layer, head)
        for layer in range(2)
        for head, beta in enumerate((0.6, 1.0, 1.7, 0.8))
    ),
)
BY_SIZE = replace(ALIKE, entries=(Entry((0.3, 1.0), DOMAIN),))
NOTHING = replace(ALIKE, entries=(Entry((0.0, 1.0), DOMAIN),))
OTHER = replace(ALIKE, source={"fingerprint": "sha256:0"})
Q_PROJ, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
VALUE_HEADS = {f"value_head.{i}": torch.ones(3) for i in range(5)}


def folder(kind="llama", **changes):
    return save(Path("m"), causal_model(kind, **changes), tokenizer=False)


def rewritten(change):
    """A folder whose weights are changed."""
    path = folder() / "model.safetensors"
    weights = load_file(path)
    save_file(weights | change(weights), path, {"format": "pt"})
    return path.parent


def cut(path, data=b"", length=0):
    """The folder of a file that is other bytes, and so many of its own."""
    path.write_bytes(data + path.read_bytes()[:length])
    return path.parent


def configured(**changes):
    path = folder() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path.parent


def beside(name, data=b"{}"):
    (folder() / name).write_bytes(data)
    return Path("m")


def gguf_file(kind="llama", **options):
    return write_gguf(Path("m"), small_model(kind), architecture=kind, **options) / "tiny.gguf"


def other_weights():
    shutil.copy(folder() / "model.safetensors", "m/other.safetensors")
    configured(transformers_weights="other.safetensors")
    return Path("m")


def to_folder(fit, kind="llama", **changes):
    prepare(fit, ModelFolder(folder(kind, **changes)))


def to_adapter(fit, kind="llama", method=None):
    method = method or Ia3()
    export = prepare(fit, ModelFolder(folder(kind)), False, by_adapter(method))
    write_adapter(export, Path("out"), "A card.", method)


def to_key(fit, kind="granite"):
    export_key(fit, scaled_model(folder(kind)), Path("mine.json"))


def to_lora(fit, kind="llama"):
    export_gguf_lora(fit, GgufModel(gguf_file(kind)), Path("lora.gguf"), max_rank=None)


def to_gguf(fit, kind="llama"):
    export_gguf(fit, GgufModel(gguf_file(kind)), Path("out.gguf"))


def exported(folder):
    write(prepare(ALIKE, ModelFolder(folder)), Path("out"))


def loaded(folder):
    ModelFolder(folder).load("float32")


def without(name):
    """An export without a copy of a file of the tokenizer."""
    with_templates(folder())
    contents = prepare(ALIKE, ModelFolder(Path("m")))
    copied = tuple(path for path in contents.copied if name not in str(path))
    write(replace(contents, copied=copied), Path("out"))


# How to provoke it, what is raised, and its text.
MESSAGES = {
    "one-norm": (
        partial(to_folder, OF_HEADS, "qwen3"),
        CalibrateError,
        (
            "the heads of layer 0 have factors of 0.6 to 1.7, and a norm with one weight for all "
            "of them (q_norm) makes their queries; a fit with one rule for all heads of a layer "
            "can be exported"
        ),
    ),
    "soft-cap": (
        partial(to_folder, OF_HEADS, "gemma2"),
        CalibrateError,
        (
            "attn_logit_softcapping is 2.0: the model caps its logits before softmax, with one "
            "cap for all heads, and the factors of this fit are 0.6 to 1.7; a fit with one "
            "constant for all heads can be exported"
        ),
    ),
    "clipped-queries": (
        partial(to_folder, ALIKE, "olmo", clip_qkv=8.0),
        CalibrateError,
        (
            "clip_qkv is 8.0: the model clips queries after their projection, so that scaled "
            "weights would not give scaled queries; no fit can be exported for it"
        ),
    ),
    "bias-by-position": (
        partial(to_folder, ALIKE, "bloom"),
        CalibrateError,
        (
            "a model of type 'bloom' cannot be exported: its logits have a bias by position, "
            "which scaled queries would leave as it is; serve it with calibrate.transformers, or "
            "give one of <*>"
        ),
    ),
    "log-n-of-another-type": (
        partial(to_folder, BY_SIZE, "qwen2"),
        CalibrateError,
        (
            "the fit goes by log n, which engines apply in models like Ministral 3, and this "
            "model cannot become one: it is a qwen2, and not a Llama or a Mistral; export a fit "
            "of constants: calibrate model fit RUN --for-export --kind constant"
        ),
    ),
    "log-n-with-biases": (
        partial(to_folder, BY_SIZE, attention_bias=True),
        CalibrateError,
        (
            "the fit goes by log n, which engines apply in models like Ministral 3, and this "
            "model cannot become one: its projections have biases; export a fit of constants: "
            "calibrate model fit RUN --for-export --kind constant"
        ),
    ),
    "log-n-in-a-window": (
        partial(to_folder, BY_SIZE, "mistral", sliding_window=100),
        CalibrateError,
        (
            "the fit goes by log n, which engines apply in models like Ministral 3, and this "
            "model cannot become one: its queries see the last 100 tokens, and engines would "
            "take all for n; export a fit of constants: calibrate model fit RUN --for-export "
            "--kind constant"
        ),
    ),
    "layers-without-attention": (
        partial(
            to_folder,
            replace(ALIKE, entries=(replace(ALIKE.only, layer=0),)),
            "lfm2",
            layer_types=["conv", "full_attention"],
        ),
        CoefficientsError,
        (
            "made@1 has entries for layers [0], which have no attention in m; give the model "
            "that the fit was made for"
        ),
    ),
    "not-plain": (
        lambda: exported(rewritten(lambda x: {Q_PROJ: x[Q_PROJ].to(torch.float8_e4m3fn)})),
        CalibrateError,
        (
            "q_proj.weight of layer 1 in m is not what its config.json asks for in floating "
            "point: are the weights of queries quantised? Export the model with plain weights, "
            "and quantise the export"
        ),
    ),
    "shape": (
        lambda: exported(rewritten(lambda x: {Q_PROJ: x[Q_PROJ][:8].clone()})),
        CalibrateError,
        (
            "model.layers.1.self_attn.q_proj.weight in m has the shape (8, 32), and its "
            "config.json asks for (32, 32); fetch it again"
        ),
    ),
    "two-of-a-layer": (
        lambda: exported(rewritten(lambda x: {f"x.{Q_PROJ}": torch.ones(1)})),
        CalibrateError,
        (
            "model.layers.1.self_attn.q_proj.weight and x.model.layers.1.self_attn.q_proj.weight "
            "are both of layer 1; only models with one attention a layer can be exported"
        ),
    ),
    "beyond-f16": (
        lambda: exported(rewritten(lambda x: {Q_PROJ: torch.full_like(x[Q_PROJ], 60_000).half()})),
        CalibrateError,
        (
            "model.layers.1.self_attn.q_proj.weight in m/model.safetensors becomes larger than "
            "F16 holds; give the model in bfloat16 or float32"
        ),
    ),
    "part-of-a-file": (
        lambda: exported(cut(folder() / "model.safetensors", length=-1)),
        DamagedError,
        (
            "m/model.safetensors is not a whole file of safetensors: its tensors do not fill its "
            "<*> bytes; fetch it again"
        ),
    ),
    "no-header": (
        lambda: exported(cut(folder() / "model.safetensors")),
        DamagedError,
        (
            "m/model.safetensors is not a whole file of safetensors: 0 bytes cannot hold its "
            "header of 18,446,744,073,709,551,615; fetch it again"
        ),
    ),
    "damaged-header": (
        lambda: exported(cut(folder() / "model.safetensors", bytes([1, *bytes(7)]) + b"x")),
        DamagedError,
        (
            "m/model.safetensors is not a whole file of safetensors: its header is malformed "
            "(the file is not JSON (Expecting value (char 0)); restore the file from where it "
            "was published); fetch it again"
        ),
    ),
    "chat-templates": (
        partial(without, "additional_chat_templates"),
        CalibrateError,
        "m has chat templates that a copy of its tokenizer's files lacks; put them into "
        "chat_template.jinja and additional_chat_templates/NAME.jinja",
    ),
    "no-copy-of-the-tokenizer": (
        partial(without, "tokenizer.json"),
        CalibrateError,
        "the tokenizer of m does not load from a copy of its files; save it again "
        "(AutoTokenizer.from_pretrained, save_pretrained)",
    ),
    "adapter-beside": (
        lambda: ModelFolder(beside("adapter_config.json")),
        CalibrateError,
        (
            "m/adapter_config.json is an adapter, which Transformers applies when it loads the "
            "folder; merge it into the weights (merge_and_unload, then save_pretrained), or move "
            "it elsewhere"
        ),
    ),
    "other-weights": (
        lambda: ModelFolder(other_weights()),
        CalibrateError,
        (
            "m/config.json has transformers_weights = 'other.safetensors': Transformers loads "
            "that in place of model.safetensors; load the model with Transformers, and give the "
            "folder that its save_pretrained writes"
        ),
    ),
    "distributed": (
        lambda: ModelFolder(beside("shard-00000-model-00001-of-00001.safetensors")),
        CalibrateError,
        (
            "m/shard-00000-model-00001-of-00001.safetensors is of a distributed checkpoint, "
            "which Transformers loads in place of model.safetensors; load the model with "
            "Transformers, and give the folder that its save_pretrained writes"
        ),
    ),
    "unexpected-tensors": (
        lambda: loaded(rewritten(lambda x: VALUE_HEADS)),
        CalibrateError,
        (
            "m: Transformers drops 5 tensors that LlamaForCausalLM does not have (value_head.0, "
            "value_head.1, value_head.2, ...); give the model with plain weights and the "
            "config.json that they were trained with, or allow unexpected tensors "
            "(allow_unexpected)"
        ),
    ),
    "scales": (
        lambda: loaded(rewritten(lambda x: {UP: x[UP].to(torch.int8)})),
        CalibrateError,
        (
            "m: Transformers takes weights of I8 without their scales "
            "(model.layers.1.mlp.up_proj.weight); give the model with plain weights and the "
            "config.json that they were trained with, or allow unexpected tensors "
            "(allow_unexpected)"
        ),
    ),
    "cut-gguf": (
        lambda: ModelFolder(cut(gguf_file(), b"GGUF")),
        DamagedError,
        (
            "m/tiny.gguf is not a whole .gguf file (its header does not end within 4 bytes); "
            "fetch it again"
        ),
    ),
    "adapter-log-n": (
        partial(to_adapter, BY_SIZE),
        CalibrateError,
        (
            "the fit goes by log n, and an adapter only multiplies what projections give; export "
            "the weights instead"
        ),
    ),
    "adapter-of-nothing": (
        partial(to_adapter, NOTHING),
        CalibrateError,
        "every beta of the fit is 1, and leaves nothing to adapt",
    ),
    "adapter-of-another-model": (
        partial(to_adapter, OTHER),
        CoefficientsError,
        (
            "made@1 was made for sha256:0, and m is sha256:<*>; give the model that it was made "
            "for, or any_model=True"
        ),
    ),
    "adapter-norm": (
        partial(to_adapter, ALIKE, "qwen3"),
        CalibrateError,
        (
            "model.layers.0.self_attn.q_norm.weight would have to change, and an adapter only "
            "multiplies what projections give; export the weights instead"
        ),
    ),
    "adapter-soft-cap": (
        partial(to_adapter, ALIKE, "gemma2"),
        CalibrateError,
        (
            "attn_logit_softcapping is 2.0: the cap would have to grow with beta, and an adapter "
            "only multiplies what projections give; export the weights instead"
        ),
    ),
    "lora-bias": (
        partial(to_adapter, ALIKE, "qwen2", Lora(None)),
        CalibrateError,
        (
            "model.layers.0.self_attn.q_proj.bias would have to change, and a LoRA leaves biases "
            "as they are; export the weights instead"
        ),
    ),
    "key-of-one-constant": (
        partial(to_key, OF_HEADS),
        CoefficientsError,
        (
            "made@1 has factors of 0.6 to 1.7, and attention_multiplier holds one constant for "
            "all heads: fit that (calibrate model fit RUN --kind constant --sharing global), or "
            "export the weights"
        ),
    ),
    "key-log-n": (
        partial(to_key, BY_SIZE),
        CoefficientsError,
        (
            "made@1 goes by log n, and attention_multiplier holds one constant for all heads: "
            "fit that (calibrate model fit RUN --kind constant --sharing global), or export the "
            "weights"
        ),
    ),
    "key-of-nothing": (
        partial(to_key, NOTHING),
        CoefficientsError,
        "every beta of the fit is 1, and leaves nothing to export",
    ),
    "no-key": (
        partial(to_key, ALIKE, "llama"),
        CalibrateError,
        (
            "no key of the configuration of a llama scales all its logits: it has none; export "
            "its weights, or give a model of type gemma2, <*>"
        ),
    ),
    "key-of-integers": (
        partial(to_key, ALIKE, "gemma3"),
        CalibrateError,
        (
            "query_pre_attn_scalar is 8 in the model, and takes integers alone: the nearest to "
            "the constant 1.3 makes 1.265; export the weights"
        ),
    ),
    "gguf-lora-bias": (
        partial(to_lora, ALIKE, "qwen2"),
        CalibrateError,
        (
            "blk.0.attn_q.bias would have to change, and a LoRA only adds to the weights of "
            "projections; export the model instead"
        ),
    ),
    "gguf-one-norm": (
        partial(to_gguf, OF_HEADS, "qwen3"),
        CalibrateError,
        (
            "heads of layer 0 differ, by factors of 0.6 to 1.7, and a norm with one weight for "
            "all of them follows their queries; fit the layer's heads together"
        ),
    ),
    "gguf-overflow": (
        lambda: scale_rows(
            np.full((1, 32), 6e4, np.float16), gguf.GGMLQuantizationType.F16, np.array([2.0])
        ),
        CalibrateError,
        (
            "queries times 2 overflow F16; give the model as a .gguf file of float32 or bfloat16 "
            "weights"
        ),
    ),
    "gguf-packed-norm": (
        lambda: scale_rows(
            gguf.quants.quantize(np.ones(32, np.float32), gguf.GGMLQuantizationType.Q8_0),
            gguf.GGMLQuantizationType.Q8_0,
            np.ones(32),
        ),
        CalibrateError,
        "a norm or a bias of queries is Q8_0, expected F32; such a model cannot be exported",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_names_the_fault_and_the_remedy(name):
    fails, kind, text = MESSAGES[name]
    with says(kind, text):
        fails()
