"""Export to ONNX: nodes that compute H, beta and softmax(beta z) in place of attention's softmax.

    shifted = z - max z,  w = exp(shifted),  H = log(sum w) - sum(w shifted) / sum w
    beta = the rule of the fit,  softmax(beta shifted)

in float32, for every kind of rule, exactly: an engine that runs ONNX serves the polynomial itself.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.external_data_helper import load_external_data_for_model

from calibrate.core.masking import LOWEST
from calibrate.errors import CalibrateError
from calibrate.export.onnx_arrays import Nodes, OnnxArray
from calibrate.storage.atomic_io import check_free, new_file
from calibrate.store.coefficient_file import MODEL_KEY
from calibrate.store.fit import Fit, dumps
from calibrate.store.inverse_temperature import beta_at, features_of, head_numbers

OPSETS = range(18, 24)
FUSED = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention")
# Between the products of attention and its softmax.
_BESIDE = {
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Tanh", "Where", "IsNaN"),
    *("Cast", "Reshape", "Transpose", "Identity", "Dropout"),
}
_STEPS = 8  # of these, at most
MOST_HEADS = 256  # of a graph that does not state its number of heads
_LARGEST = (1 << 31) - (1 << 20)  # bytes of one file: protobuf holds 2 GiB


@dataclass(frozen=True)
class OnnxExport:
    """What was written."""

    path: Path
    fit: str
    replaced: tuple[str, ...]  # names of the softmax nodes, in the order of layers


def export_onnx(fit: Fit, path: Path, out: Path) -> OnnxExport:
    """Writes a copy of a model whose attention applies a fit.

    Args:
      fit: for layers, its layer i is the i-th softmax of attention; for heads, logits are
        (..., heads, queries, keys).
      path: of the model, opset 18 to 23, with MatMul and Softmax nodes.
      out: the new file; weights of more than 2 GB lie beside it in OUT.data.
    Raises:
      CalibrateError: the model has fused attention, another opset, a fit already, no attention, or
        is damaged.
    """
    check_free(out)
    model = _read(path)
    _require_replaceable(model, path)
    types = _inferred_types(model)
    nodes = _attention_nodes(model.graph, types)
    last_layer = max((x.layer for x in fit.entries if x.layer is not None), default=-1)
    if last_layer >= len(nodes) or not nodes:
        needed = f"a rule for layer {last_layer}" if nodes else "a rule"
        raise CalibrateError(
            f"{fit.reference} has {needed}, and {path} has {len(nodes)} softmax nodes between two "
            "matrix products; give the model that the fit was made for"
        )
    for layer, node in enumerate(nodes):
        of_layer = fit.layer(layer) if last_layer >= 0 else fit
        if not of_layer.is_identity:
            _replace(model.graph, node, of_layer, types.get(node.input[0]))
    _load_weights(model, path)
    record = model.metadata_props.add()
    record.key, record.value = MODEL_KEY, dumps(fit)
    _write(model, out)
    return OnnxExport(out, fit.reference, tuple(map(_name, nodes)))


def _read(path: Path) -> onnx.ModelProto:
    """A model, without weights that lie in other files."""
    with _one_line(path):
        return onnx.load(str(path), load_external_data=False)


def _load_weights(model: onnx.ModelProto, path: Path) -> None:
    """Reads the weights that lie in files beside the model."""
    with _one_line(path):
        load_external_data_for_model(model, str(path.parent))


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Raises CalibrateError for a model that cannot be read."""
    try:
        yield
    except OSError:
        raise
    except Exception as failure:  # protobuf's own classes
        reason = " ".join(str(failure).split())
        raise CalibrateError(f"{path} is no ONNX model that can be read: {reason}") from None


def _require_replaceable(model: onnx.ModelProto, path: Path) -> None:
    """Raises CalibrateError for a model whose attention cannot be replaced."""
    opset = next((x.version for x in model.opset_import if x.domain in ("", "ai.onnx")), 0)
    if opset not in OPSETS:
        raise CalibrateError(
            f"{path} has opset {opset}; export it with {OPSETS[0]} to {OPSETS[-1]}, such as "
            "torch.onnx.export(..., opset_version=18)"
        )
    if any(record.key == MODEL_KEY for record in model.metadata_props):
        raise CalibrateError(f"{path} carries a fit already; give the original model")
    operators = Counter(node.op_type for node in _all_nodes(model))
    if fused := sorted(operators.keys() & set(FUSED)):
        raise CalibrateError(
            f"{path} has fused attention, {', '.join(fused)}; export the model before "
            'optimisation, with attn_implementation="eager", opset 22 or less'
        )
    if operators["Softmax"] > sum(node.op_type == "Softmax" for node in model.graph.node):
        raise CalibrateError(
            f"{path} has a softmax within a branch, a loop or a function of the graph; export the "
            "model without control flow"
        )


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of the graph, of its branches and loops, and of its functions."""
    ahead = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    while ahead:
        node = ahead.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                ahead += graph.node


def _attention_nodes(
    graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto.Tensor]
) -> list[onnx.NodeProto]:
    """The softmax nodes of attention, in the order of the graph.

    They run along the last axis; their logits are a matrix product, and their weights go into one.
    """
    makers = {output: other for other in graph.node for output in other.output}
    users: dict[str, list[onnx.NodeProto]] = {}
    for other in graph.node:
        for name in other.input:
            users.setdefault(name, []).append(other)

    def before(node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        return (makers[name] for name in node.input if name in makers)

    def after(node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        return (user for name in node.output for user in users.get(name, ()))

    return [
        node
        for node in graph.node
        if _is_softmax(node, types)
        and _reaches_product(node, before)
        and _reaches_product(node, after)
    ]


def _is_softmax(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto.Tensor]) -> bool:
    """True for a softmax along the last axis."""
    is_plain = node.op_type == "Softmax" and node.domain in ("", "ai.onnx")
    if not (is_plain and node.input and node.output):
        return False
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    shape = _shape(types.get(node.input[0]) or types.get(node.output[0]))
    return axis == -1 or axis == len(shape) - 1


def _shape(tensor: onnx.TypeProto.Tensor | None) -> list[int]:
    """The sizes of the axes, 0 where a size is free; [] if they are not known."""
    return [dim.dim_value for dim in tensor.shape.dim] if tensor is not None else []


def _name(node: onnx.NodeProto) -> str:
    return node.name or node.output[0]


def _reaches_product(node: onnx.NodeProto, neighbours: Any) -> bool:
    """True if a MatMul or Einsum is reached by elementwise nodes alone."""
    ahead = [node]
    for _ in range(_STEPS):
        ahead = [other for node in ahead for other in neighbours(node)]
        if any(other.op_type in ("MatMul", "Einsum", "Gemm") for other in ahead):
            return True
        ahead = [other for other in ahead if other.op_type in _BESIDE]
    return False


def _inferred_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    """Types and shapes of tensors by name, as far as ONNX can infer them."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # of protobuf, for a graph of more than 2 GB
        graph = model.graph
    values = (*graph.value_info, *graph.input, *graph.output)
    return {value.name: value.type.tensor_type for value in values}


def _replace(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    fit: Fit,
    logits: onnx.TypeProto.Tensor | None,
) -> None:
    """Puts the nodes of adaptive softmax in place of a softmax."""
    dtype = logits.elem_type if logits is not None else TensorProto.UNDEFINED
    nodes = Nodes(f"{_name(node)}/calibrate")
    z = OnnxArray(node.input[0], nodes)
    wide = z if dtype == TensorProto.FLOAT else nodes.as_float32(z)
    weights = _adaptive_softmax(wide, fit, _head_table(wide, fit, logits, _name(node)))
    if dtype == TensorProto.UNDEFINED:
        nodes.add("CastLike", weights, z)
    else:
        nodes.add("Cast", weights, to=dtype)
    nodes.nodes[-1].output[0] = node.output[0]
    place = list(graph.node).index(node)
    graph.initializer.extend(nodes.constants)
    graph.node.remove(node)
    for i, new in enumerate(nodes.nodes):
        graph.node.insert(place + i, new)


def _adaptive_softmax(z: OnnxArray, fit: Fit, table: Any) -> OnnxArray:
    """softmax(beta z) of float32 logits, of shape (..., queries, keys)."""
    nodes = z.nodes
    shifted = z - nodes.reduce("ReduceMax", z)
    entropy = log_n = None
    if fit.needs_entropy:
        weights = nodes.add("Exp", shifted)
        total = nodes.reduce("ReduceSum", weights)
        # A masked item has weight 0, and 0 * -inf would be NaN.
        moment = nodes.reduce("ReduceSum", weights * shifted.clip(LOWEST, None))
        entropy = nodes.add("Log", total) - moment / total
    if fit.needs_size:
        log_n = nodes.add("Log", nodes.reduce("ReduceSum", nodes.as_float32(shifted >= LOWEST)))
    # A beta that is known already is a constant of the graph.
    is_known = fit.ignores_inputs and not isinstance(table, list)
    zeros = np.zeros((1, 1), np.float32)
    x = features_of(
        fit, entropy, log_n, lambda: zeros if is_known else nodes.add("Identity", zeros)
    )
    beta = beta_at(x, table, fit, np if is_known else nodes)
    return nodes.add("Softmax", shifted * beta, axis=-1)


def _head_table(
    z: OnnxArray, fit: Fit, logits: onnx.TypeProto.Tensor | None, name: str
) -> list[OnnxArray] | np.ndarray | None:
    """The numbers of each head, each (heads, 1, 1); None if heads are alike.

    Where the graph does not state its number of heads, a table of MOST_HEADS is cut to it when the
    model runs.
    """
    if not fit.has_heads:
        return None
    shape = _shape(logits)
    if shape and len(shape) != 4:
        raise CalibrateError(
            f"{fit.reference} has a rule for each head, and the logits of {name} have {len(shape)} "
            "axes; a model with (batch, heads, queries, keys) is needed"
        )
    n_heads = shape[-3] if shape else 0
    numbers = np.asarray(head_numbers(fit, (n_heads or MOST_HEADS, 1, 1), -3), np.float32)
    if n_heads:
        return numbers[..., None, None]
    nodes = z.nodes
    heads = nodes.add("Gather", nodes.add("Shape", z), np.array([-3]), axis=0)
    table = nodes.add("Slice", numbers[..., None, None], np.array([0]), heads, np.array([1]))
    return [nodes.add("Gather", table, np.array(i), axis=0) for i in range(len(numbers))]


def _write(model: onnx.ModelProto, out: Path) -> None:
    """Writes a model, whole or not at all; of a large one, the weights first."""
    weights = out.with_name(f"{out.name}.data")
    is_large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > _LARGEST
    if is_large:
        check_free(weights)
    try:
        with new_file(out) as temporary:
            if is_large:
                name = weights.name
                onnx.save(model, str(temporary), save_as_external_data=True, location=name)
            else:
                onnx.save(model, str(temporary))
    except BaseException:
        if is_large:
            weights.unlink(missing_ok=True)
        raise
