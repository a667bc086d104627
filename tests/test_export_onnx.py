"""Export to ONNX: an engine computes what the runtime computes, for every kind of rule."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import call
from onnx import TensorProto, helper
from vector_fits import fit_of_vectors

import calibrate
from calibrate.conformance.vectors import read_vectors
from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError
from calibrate.export.onnx import export_onnx
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

RULES = [rule["name"] for rule in read_vectors()["rules"]]
HEADS, WIDTH = 4, 8


def write_attention(path, opset=18, dtype=TensorProto.FLOAT, layers=1, heads=HEADS):
    """Attention: q (batch, heads, queries, 8), k, v, and a mask that is added."""

    def tensor(name, shape):
        return helper.make_tensor_value_info(name, dtype, shape)

    nodes, q = [], "q"
    for i in range(layers):
        nodes += [
            helper.make_node("MatMul", [q, "k"], [f"products{i}"]),
            helper.make_node("Add", [f"products{i}", "mask"], [f"logits{i}"]),
            helper.make_node("Softmax", [f"logits{i}"], [f"weights{i}"], f"softmax{i}", axis=-1),
            helper.make_node("MatMul", [f"weights{i}", "v"], [f"out{i}"]),
        ]
        q = f"out{i}"
    inputs = [
        tensor("q", ["B", heads, "Q", WIDTH]), tensor("k", ["B", heads, WIDTH, "K"]),
        tensor("v", ["B", heads, "K", WIDTH]), tensor("mask", ["B", 1, "Q", "K"]),
    ]  # fmt: skip
    outputs = [tensor(f"weights{i}", ["B", heads, "Q", "K"]) for i in range(layers)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, str(path))
    return path


def write_rows(path):
    """A softmax of rows, between products that change nothing."""
    value = [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["R", "n"]) for x in "zp"]
    nodes = [
        helper.make_node("Einsum", ["z"], ["logits"], equation="rn->rn"),
        helper.make_node("Softmax", ["logits"], ["weights"], "softmax"),
        helper.make_node("Einsum", ["weights"], ["p"], equation="rn->rn"),
    ]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(path))
    return path


def run(path, **inputs):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def arrays(rng, mask=-np.inf, keys=33, dtype=np.float32):
    """Queries, keys, values, a causal mask, and the logits."""
    q = rng.normal(size=(2, HEADS, 5, WIDTH)).astype(dtype)
    k = (2 * rng.normal(size=(2, HEADS, WIDTH, keys))).astype(dtype)
    v = rng.normal(size=(2, HEADS, keys, WIDTH)).astype(dtype)
    masked = np.arange(keys) > np.arange(5)[:, None] * 7
    added = np.where(masked, dtype(mask), dtype(0)) * np.ones((2, 1, 1, 1), dtype)
    return {"q": q, "k": k, "v": v, "mask": added}, q @ k + added


def by_head(name):
    """A fit that names three heads of four."""
    fit = fit_of_vectors(name)
    entry = fit.entries[0]
    entries = [
        Entry(tuple(c * (1 + 0.1 * h) for c in entry.coefficients), entry.domain, head=h)
        for h in (0, 1, 3)
    ]
    return Fit(fit.rule, tuple(entries), "heads")


@pytest.mark.parametrize(
    ("of_heads", "mask"),
    [(False, -np.inf), (False, -1e9), (True, np.finfo(np.float32).min)],
)
@pytest.mark.parametrize("name", RULES)
def test_probabilities_are_those_of_the_runtime(name, of_heads, mask, tmp_path):
    fit = by_head(name) if of_heads else fit_of_vectors(name)
    inputs, logits = arrays(np.random.default_rng(0), mask)
    export_onnx(fit, write_attention(tmp_path / "m.onnx"), tmp_path / "out.onnx")
    (weights,) = run(tmp_path / "out.onnx", **inputs)
    ours = calibrate.adaptive_softmax(logits, fit)
    np.testing.assert_allclose(weights, ours, 0, 1e-5)
    assert np.abs(weights - run(tmp_path / "m.onnx", **inputs)[0]).max() > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_heads_of_a_graph_that_does_not_state_their_number(name, tmp_path):
    fit = by_head(name)
    constant = tuple(
        replace(e, coefficients=(*[0.0] * (len(e.coefficients) - 1), 2.0 + i), check=())
        for i, e in enumerate(fit.entries)
    )
    inputs, logits = arrays(np.random.default_rng(4))
    path = write_attention(tmp_path / "m.onnx", heads="H")
    for i, one in enumerate((fit, replace(fit, entries=constant))):
        export_onnx(one, path, tmp_path / f"{i}.onnx")
        (weights,) = run(tmp_path / f"{i}.onnx", **inputs)
        np.testing.assert_allclose(weights, calibrate.adaptive_softmax(logits, one), 0, 1e-5)


def test_graphs_that_would_be_exported_in_part_are_refused(tmp_path):
    path, fit = write_attention(tmp_path / "m.onnx", layers=2), fit_of_vectors("constant")

    def refused(change, fit=fit):
        model = onnx.load(str(path))
        change(model.graph)
        onnx.save(model, str(tmp_path / "changed.onnx"))
        with pytest.raises(CalibrateError):
            export_onnx(fit, tmp_path / "changed.onnx", tmp_path / "out.onnx")
        assert not (tmp_path / "out.onnx").exists()

    branch = helper.make_graph([helper.make_node("Softmax", ["q"], ["in"])], "b", [], [])
    node = helper.make_node("If", ["q"], ["if"], then_branch=branch, else_branch=branch)
    refused(lambda graph: graph.node.append(node))
    layers = replace(fit, entries=(Entry((2.0,), layer=0), Entry((3.0,), layer=2)))
    refused(lambda graph: None, layers)
    model = onnx.load(str(path))
    model.graph.node[2].attribute[0].i = 3  # the last axis by its number
    onnx.save(model, str(path))
    assert len(export_onnx(fit, path, tmp_path / "both.onnx").replaced) == 2
    with pytest.raises(CalibrateError, match="heads"):
        export_onnx(by_head("constant"), write_rows(tmp_path / "rows.onnx"), tmp_path / "o.onnx")


def test_the_last_opset(tmp_path):
    fit = fit_of_vectors("entropy-and-size")
    inputs, logits = arrays(np.random.default_rng(1))
    export_onnx(fit, write_attention(tmp_path / "m.onnx", 23), tmp_path / "out.onnx")
    (weights,) = run(tmp_path / "out.onnx", **inputs)
    np.testing.assert_allclose(weights, calibrate.adaptive_softmax(logits, fit), 0, 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_the_conformance_vectors_pass(name, tmp_path):
    fit = fit_of_vectors(name)
    export_onnx(fit, write_rows(tmp_path / "m.onnx"), tmp_path / "out.onnx")
    session = ort.InferenceSession(str(tmp_path / "out.onnx"))

    def served(z):
        return session.run(None, {"z": np.atleast_2d(z)})[0].reshape(z.shape)

    assert calibrate.check_softmax(served, fit).right


def test_float16_is_computed_in_float32(tmp_path):
    fit = fit_of_vectors("published-polynomial")
    inputs, logits = arrays(np.random.default_rng(2), -6e4, dtype=np.float16)
    export_onnx(
        fit, write_attention(tmp_path / "m.onnx", dtype=TensorProto.FLOAT16), tmp_path / "o.onnx"
    )
    (weights,) = run(tmp_path / "o.onnx", **inputs)
    assert weights.dtype == np.float16
    ours = calibrate.adaptive_softmax(logits.astype(np.float32), fit)
    np.testing.assert_allclose(weights.astype(float), ours, 0, 5e-3)


def test_layers_are_the_softmax_nodes_in_order(tmp_path):
    constants = tuple(Entry((beta,), layer=i) for i, beta in enumerate((2.0, 0.5)))
    fit = Fit(RuleForm.constant(min_beta=0.1), constants, "layers")
    path = write_attention(tmp_path / "m.onnx", layers=3)
    exported = export_onnx(fit, path, tmp_path / "o.onnx")
    assert exported.replaced == ("softmax0", "softmax1", "softmax2")
    inputs, _ = arrays(np.random.default_rng(3))
    before, after = run(path, **inputs), run(tmp_path / "o.onnx", **inputs)
    powered = before[0] ** 2
    np.testing.assert_allclose(after[0], powered / powered.sum(-1, keepdims=True), 1e-4, 1e-6)
    assert np.abs(after[1] - before[1]).max() > 1e-3


def test_a_softmax_beside_attention_stays(tmp_path):
    path = write_attention(tmp_path / "m.onnx", layers=2)
    model = onnx.load(str(path))
    model.graph.node.append(helper.make_node("Softmax", ["v"], ["classes"], "classes", axis=-1))
    onnx.save(model, str(path))
    exported = export_onnx(fit_of_vectors("constant"), path, tmp_path / "out.onnx")
    assert exported.replaced == ("softmax0", "softmax1")


def test_refusals(tmp_path):
    fit = fit_of_vectors("constant")

    def refused(path, fit=fit, value=""):
        with pytest.raises(CalibrateError, match=value):
            export_onnx(fit, path, tmp_path / "out.onnx")
        assert not list(tmp_path.glob("out*"))

    path = write_attention(tmp_path / "m.onnx")
    refused(write_attention(tmp_path / "old.onnx", opset=17), value="17")
    refused(path, replace(by_head("constant"), entries=(Entry((2.0,), head=9),)), value="9")
    (tmp_path / "noise.onnx").write_bytes(b"\x08\xff" * 99)
    refused(tmp_path / "noise.onnx", value="noise")
    model = onnx.load(str(path))
    model.graph.node.append(helper.make_node("Attention", ["q", "k", "v"], ["fused"]))
    onnx.save(model, str(tmp_path / "fused.onnx"))
    refused(tmp_path / "fused.onnx", value="Attention")
    export_onnx(fit, path, tmp_path / "once.onnx")
    refused(tmp_path / "once.onnx", value="carries")
    (tmp_path / "taken.onnx").write_text("")
    with pytest.raises(CalibrateError, match="taken"):
        export_onnx(fit, path, tmp_path / "taken.onnx")


ARCHITECTURES = {
    "bert": ("BertModel", {"intermediate_size": 64}),
    "roberta": ("RobertaModel", {"intermediate_size": 64, "max_position_embeddings": 64}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2, "intermediate_size": 64}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8},
    ),
}  # fmt: skip
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def exported_model(name, implementation, path):
    """A small model, written by torch.onnx with a free batch and length, and some of its inputs."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind, settings = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(name, **SMALL | settings)
    torch.manual_seed(0)
    model = getattr(transformers, kind)._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter.mul_(3)  # attention that is not uniform

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            options = {} if name in ("bert", "roberta") else {"use_cache": False}
            return self.model(input_ids=ids, attention_mask=mask, **options)[0]

    ids = torch.randint(0, 50, (2, 17))
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    torch.onnx.export(
        Logits().eval(), (ids, mask), str(path), dynamo=False, opset_version=18,
        input_names=["ids", "mask"], output_names=["out"],
        dynamic_axes={"ids": {0: "b", 1: "n"}, "mask": {0: "b", 1: "n"}},
    )  # fmt: skip
    return model, ids, mask


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PyTorch's exporter
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_transformers(name, implementation, tmp_path):
    """Their outputs are those of the runtime for Transformers, under a polynomial by layer."""
    import calibrate.transformers

    path = tmp_path / "m.onnx"
    model, ids, mask = exported_model(name, implementation, path)
    one = by_head("fitted-polynomial")
    entries = [replace(entry, layer=layer) for layer in (0, 1) for entry in one.entries]
    fit = Fit(one.rule, tuple(entries), "layers")
    assert len(export_onnx(fit, path, tmp_path / "o.onnx").replaced) == 2
    inputs = {"ids": ids.numpy(), "mask": mask.numpy()}
    (before,), (after,) = run(path, **inputs), run(tmp_path / "o.onnx", **inputs)
    calibrate.transformers.apply(model, fit, input_ids=ids, attention_mask=mask)
    ours = model(input_ids=ids, attention_mask=mask)[0].detach().numpy()
    real = mask.numpy() > 0
    scale = np.abs(ours).max()
    np.testing.assert_allclose(after[real] / scale, ours[real] / scale, 0, 1e-5)
    assert np.abs(before - ours)[real].max() > 1e-3 * scale


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_attention(tmp_path / "m.onnx")
    arguments = ("export", "paper", "--model", "m.onnx", "--out", "o.onnx")
    exported = json.loads(call(*arguments, "--json").stdout)
    assert exported["replaced"] == ["softmax0"]
    call(*arguments, code=1)  # the name is taken
    call("export", "paper", "--model", "absent.onnx", "--out", "new.onnx", code=1)
