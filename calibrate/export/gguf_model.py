"""The metadata keys and tensors of a .gguf file that an export reads: its heads and queries.

`storage/gguf_header.py` parses the header, with all keys that a file has; `MetadataKey` lists those
that a model is read by.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType as Kind
from numpy.typing import NDArray

from calibrate.errors import CalibrateError, command
from calibrate.export.architectures import GgufGraph, Layout, gguf_graphs
from calibrate.export.plan import FIT_CONSTANTS, ExportPlan
from calibrate.storage.gguf_header import packed_key, read_gguf

Factors = dict[str, NDArray[np.float64]]  # of the rows of tensors, by name


class MetadataKey(StrEnum):
    """The metadata keys that a model is read by.

    The first two are whole names; the others stand behind the name of the architecture, as in
    `llama.block_count`. The key of a logit scale is in `architectures.py`, keys of a card are in
    `gguf_card.py`, and those of an export in `gguf_file.py`.
    """

    ARCHITECTURE = "general.architecture"
    N_FILES = "split.count"
    N_LAYERS = "block_count"
    N_HEADS = "attention.head_count"
    N_KEY_HEADS = "attention.head_count_kv"
    HEAD_DIM = "attention.key_length"
    WIDTH = "embedding_length"
    CONTEXT = "context_length"
    SOFT_CAP = "attn_logit_softcapping"
    CLAMP = "attention.clamp_kqv"
    ALIBI = "attention.max_alibi_bias"


# With one of these, logits are not linear in the queries.
_NOT_LINEAR = (MetadataKey.SOFT_CAP, MetadataKey.CLAMP, MetadataKey.ALIBI)
# Beginnings of the keys that a plain Llama does not have.
_NO_PLAIN_LLAMA = ("rope.scaling.", "expert_", "attention.sliding_window")
_MAX_CHARACTERS = 200  # characters of a text that is compared or shown
_LENGTH = "rope.scaling.original_context_length"


class GgufModel:
    """A .gguf file, mapped into memory; if it is `exported`, its graph may be one by size.

    Attributes:
      file: its keys and tensors.
      architecture: the name of its graph in llama.cpp.
      graph: the graph of the model before an export.
      n_layers, n_heads: of attention; heads are those of queries.
      head_dim: rows of each head's queries.
    Raises:
      CalibrateError: it cannot be read, or queries of such a model cannot be scaled exactly.
    """

    def __init__(self, path: Path, exported: bool = False):
        self.path = path
        self.file = read_gguf(path)
        self.architecture = str(self.key(MetadataKey.ARCHITECTURE))
        self.graph = self._known_graph(exported)
        self.n_layers = self._count(MetadataKey.N_LAYERS)
        self.n_heads = self._count(MetadataKey.N_HEADS)
        self.context = self._count(MetadataKey.CONTEXT)
        self._width = self._count(MetadataKey.WIDTH)
        self.head_dim = self._count(MetadataKey.HEAD_DIM, self._width // self.n_heads)
        # What keys declare is worked with as far as there are tensors of these sizes.
        self._queries = [self._queries_of(layer) for layer in range(self.n_layers)]

    def key(self, name: str, most: int | None = _MAX_CHARACTERS) -> Any:
        """The value of a key, of a text at most so many characters; None if there is none."""
        value = self.file.keys[name].value if name in self.file.keys else None
        try:
            return value.decode()[:most] if isinstance(value, bytes) else value
        except UnicodeDecodeError as failure:
            raise CalibrateError(f"{name} is not UTF-8 ({failure}); fetch the file again") from None

    def factors_by_tensor(self, plan: ExportPlan) -> Factors:
        """For each tensor that a plan changes, a factor for each of its rows."""
        changed: Factors = {}
        for layer, names in enumerate(self._queries):
            factors = np.array(plan.of_layer(layer), np.float64)
            if (factors != 1).any():
                changed |= {name: self._by_row(layer, name, factors) for name in names}
        return changed

    def _by_row(self, layer: int, name: str, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """In a fused tensor, rows of keys and values come after those of queries."""
        of_heads = np.repeat(factors, self.head_dim)
        by_row = np.ones(self.file.tensors[name].shape[0])
        if len(by_row) < len(of_heads) and np.ptp(factors):
            raise CalibrateError(
                f"heads of layer {layer} differ, by factors of {factors.min():.4g} to "
                f"{factors.max():.4g}, and a norm with one weight for all of them follows "
                f"their queries; fit one constant for each layer: {FIT_CONSTANTS}"
            )
        by_row[: len(of_heads)] = of_heads[: len(by_row)]
        return by_row

    def _queries_of(self, layer: int) -> list[str]:
        """The tensors that make a layer's queries: the norm that follows them if there is one."""
        block = f"blk.{layer}."
        projections = [
            projection
            for projection in self.graph.projections
            if f"{block}{projection.module}.weight" in self.file.tensors
        ]
        if not projections:
            raise CalibrateError(
                f"{self.path} declares {self.n_layers:,} layers, and has no tensor of queries in "
                f"layer {layer}, such as {block}attn_q.weight; give a model whose every layer has "
                "attention"
            )
        module, layout = projections[0].module, projections[0].layout
        weight, bias = f"{block}{module}.weight", f"{block}{module}.bias"
        norm = f"{block}{self.graph.query_norm.module}.weight"
        n_queries = self.n_heads * self.head_dim
        n_keys = self._count(MetadataKey.N_KEY_HEADS, self.n_heads) * self.head_dim
        n_rows = n_queries + (0 if layout is Layout.SEPARATE else 2 * n_keys)
        self._require_axes(weight, (n_rows, self._width))
        self._require_axes(bias, (n_rows,))
        self._require_axes(f"{block}attn_k.weight", (n_keys, self._width))
        self._require_axes(norm, (n_queries,), (self.head_dim,))
        names = [norm] if norm in self.file.tensors else [weight, bias]
        return [name for name in names if name in self.file.tensors]

    def _require_axes(self, name: str, *allowed: tuple[int, ...]) -> None:
        """Raises CalibrateError for a tensor of other axes than its keys declare."""
        if name in self.file.tensors and (axes := self.file.tensors[name].shape) not in allowed:
            raise CalibrateError(
                f"{name} in {self.path} has the axes {axes}, and its keys declare {allowed[0]}; "
                "such a model cannot be exported"
            )

    def _known_graph(self, exported: bool) -> GgufGraph:
        """The graph of the model; CalibrateError if queries of such files cannot be scaled."""
        if (n_files := self.key(MetadataKey.N_FILES)) not in (None, 0, 1):
            raise CalibrateError(
                f"{self.path} is one of {n_files} files; merge them: "
                "llama-gguf-split --merge FIRST OUT"
            )
        graphs = gguf_graphs()
        by_size = {graph.graph_by_size: graph for graph in graphs.values()} if exported else {}
        graph = graphs.get(self.architecture) or by_size.get(self.architecture)
        if graph is None:
            raise CalibrateError(
                f"models of {self.architecture} cannot be exported: their queries are not known to "
                f"scale with these tensors; supported are {', '.join(graphs)}"
            )
        for name in _NOT_LINEAR:
            if value := self.key(f"{self.architecture}.{name}"):
                raise CalibrateError(
                    f"{self.path} has {name} = {value}: logits are not of the queries alone, so "
                    "that scaled weights would not give scaled logits; it cannot be exported"
                )
        return graph

    def _count(self, name: MetadataKey, default: int | None = None) -> int:
        """An integer key of the architecture's own."""
        value = self.key(f"{self.architecture}.{name}")
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise CalibrateError(
                f"{self.path} has {self.architecture}.{name} = {value!r}; it must be a positive "
                "integer, the same for all layers"
            )
        return value


def keys_by_size(model: GgufModel, ratio: float) -> tuple[str, dict[str, bytes]]:
    """The graph by which llama.cpp applies a log-size rule, and its keys.

    `mistral3` multiplies the query at position p, from 0, by

        1 + scale log(1 + floor(p / length)), with length the original context of YaRN,

    which is not used otherwise unless positions are scaled. With length 1 that is 1 + scale log n.
    Other models than plain Llamas raise CalibrateError.
    """
    own = f"{model.architecture}."
    names = (name.removeprefix(own) for name in model.file.keys if name.startswith(own))
    unfit = [key for key in names if key.startswith(_NO_PLAIN_LLAMA)]
    by_size = model.graph.graph_by_size
    if by_size is None or unfit:
        difference = f"this one has {unfit[0]}" if unfit else f"this one is {model.architecture}"
        raise CalibrateError(
            "rules of log n in a .gguf file need a plain Llama, which llama.cpp runs as "
            f"mistral3, and {difference}; fit constants: "
            f"{command('model fit RUN', kind='constant')}"
        )
    scale, length = packed_key(ratio, Kind.FLOAT32), packed_key(1, Kind.UINT32)
    keys = {f"{by_size}.attention.temperature_scale": scale, f"{by_size}.{_LENGTH}": length}
    return by_size, keys
