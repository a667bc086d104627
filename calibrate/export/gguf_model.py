"""The attention of a model in a .gguf file: its keys and tensors, and the rows to scale."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.errors import CalibrateError
from calibrate.export.architectures import GGUF_GRAPHS
from calibrate.export.plan import FIT_CONSTANTS, ExportPlan
from calibrate.storage.gguf_header import read_gguf

RowFactors = dict[str, NDArray[np.float64]]  # by tensor: (rows,), the factor of each row


class MetadataKey(StrEnum):
    """Metadata keys that describe the attention of a model.

    The first two are whole names. The others follow the name of the architecture, as in
    `llama.block_count`.
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


# With one of these keys the logits are not linear in the queries.
_NOT_LINEAR = (MetadataKey.SOFT_CAP, MetadataKey.CLAMP, MetadataKey.ALIBI)
# Graphs that run the same model with queries scaled by 1 + ratio log n.
GRAPH_BY_SIZE = {"llama": "mistral3"}
_MAX_CHARACTERS = 200  # of a text that is compared or shown


class GgufModel:
    """The attention of a model in a .gguf file, which is mapped into memory.

    Args:
      exported: accept the graphs by which llama.cpp applies an exported rule of log n.

    Attributes:
      file: keys and tensors.
      architecture: name of the graph in llama.cpp.
      n_layers, n_heads, head_dim: layers, query heads of each, and the width of a head.
      context: largest number of tokens.

    Raises:
      CalibrateError: the file cannot be read, or the queries of such a model cannot be scaled.
    """

    def __init__(self, path: Path, exported: bool = False):
        self.path = path
        self.file = read_gguf(path)
        self.architecture = str(self.key(MetadataKey.ARCHITECTURE))
        self._require_graph(exported)
        self.n_layers = self._count(MetadataKey.N_LAYERS)
        self.n_heads = self._count(MetadataKey.N_HEADS)
        self.context = self._count(MetadataKey.CONTEXT)
        self._width = self._count(MetadataKey.WIDTH)
        self.head_dim = self._count(MetadataKey.HEAD_DIM, self._width // self.n_heads)
        # Stops at the first layer without tensors, however many layers the keys declare.
        self._queries = [self._query_tensors(layer) for layer in range(self.n_layers)]

    def key(self, name: str, max_characters: int | None = _MAX_CHARACTERS) -> Any:
        """Returns the value of a key, a text cut to `max_characters`; None if there is none."""
        value = self.file.keys[name].value if name in self.file.keys else None
        try:
            return value.decode()[:max_characters] if isinstance(value, bytes) else value
        except UnicodeDecodeError as failure:
            raise CalibrateError(f"{name} is not UTF-8 ({failure}); fetch the file again") from None

    def row_factors(self, plan: ExportPlan) -> RowFactors:
        """Returns the factor of each row of the tensors that a plan changes.

        Raises:
          CalibrateError: heads of a layer have different factors, and one norm weight in common.
        """
        changed: RowFactors = {}
        for layer, names in enumerate(self._queries):
            factors = np.array(plan.layer_factors(layer), np.float64)
            if (factors != 1).any():
                changed |= {name: self._tensor_factors(layer, name, factors) for name in names}
        return changed

    def _tensor_factors(
        self, layer: int, name: str, factors: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns (rows,): in a fused tensor the rows of queries come first, and others have 1."""
        query_rows = np.repeat(factors, self.head_dim)
        by_row = np.ones(self.file.tensors[name].shape[0])
        if len(by_row) < len(query_rows) and np.ptp(factors):
            raise CalibrateError(
                f"heads of layer {layer} differ, by factors of {factors.min():.4g} to "
                f"{factors.max():.4g}, and a norm with one weight for all of them follows "
                f"their queries; fit one constant for each layer: {FIT_CONSTANTS}"
            )
        by_row[: len(query_rows)] = query_rows[: len(by_row)]
        return by_row

    def _query_tensors(self, layer: int) -> list[str]:
        """Returns the tensors to scale in a layer: the norm of the queries, or their projection."""
        block = f"blk.{layer}."
        is_fused = f"{block}attn_q.weight" not in self.file.tensors
        module = "attn_qkv" if is_fused else "attn_q"  # rows of queries come first
        if f"{block}{module}.weight" not in self.file.tensors:
            raise CalibrateError(
                f"{self.path} declares {self.n_layers:,} layers, and has no tensor of queries in "
                f"layer {layer}, such as {block}attn_q.weight; give a model whose every layer has "
                "attention"
            )
        weight, bias = f"{block}{module}.weight", f"{block}{module}.bias"
        norm = f"{block}attn_q_norm.weight"
        n_queries = self.n_heads * self.head_dim
        n_keys = self._count(MetadataKey.N_KEY_HEADS, self.n_heads) * self.head_dim
        n_rows = n_queries + (2 * n_keys if is_fused else 0)
        self._require_shape(weight, (n_rows, self._width))
        self._require_shape(bias, (n_rows,))
        self._require_shape(f"{block}attn_k.weight", (n_keys, self._width))
        self._require_shape(norm, (n_queries,), (self.head_dim,))
        names = [norm] if norm in self.file.tensors else [weight, bias]
        return [name for name in names if name in self.file.tensors]

    def _require_shape(self, name: str, *allowed: tuple[int, ...]) -> None:
        """Raises CalibrateError for a tensor of another shape than the keys declare."""
        if name in self.file.tensors and (shape := self.file.tensors[name].shape) not in allowed:
            raise CalibrateError(
                f"{name} in {self.path} has the axes {shape}, and its keys declare {allowed[0]}; "
                "such a model cannot be exported"
            )

    def _require_graph(self, exported: bool) -> None:
        """Raises CalibrateError for a model whose queries cannot be scaled."""
        if (n_files := self.key(MetadataKey.N_FILES)) not in (None, 0, 1):
            raise CalibrateError(
                f"{self.path} is one of {n_files} files; merge them: "
                "llama-gguf-split --merge FIRST OUT"
            )
        graphs = (*GGUF_GRAPHS, *(GRAPH_BY_SIZE.values() if exported else ()))
        if self.architecture not in graphs:
            raise CalibrateError(
                f"models of {self.architecture} cannot be exported: their queries are not known to "
                f"scale with these tensors; supported are {', '.join(GGUF_GRAPHS)}"
            )
        for name in _NOT_LINEAR:
            if value := self.key(f"{self.architecture}.{name}"):
                raise CalibrateError(
                    f"{self.path} has {name} = {value}: logits are not of the queries alone, so "
                    "that scaled weights would not give scaled logits; it cannot be exported"
                )

    def _count(self, name: MetadataKey, default: int | None = None) -> int:
        """Returns a positive integer among the keys of the architecture."""
        value = self.key(f"{self.architecture}.{name}")
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise CalibrateError(
                f"{self.path} has {self.architecture}.{name} = {value!r}; it must be a positive "
                "integer, the same for all layers"
            )
        return value
