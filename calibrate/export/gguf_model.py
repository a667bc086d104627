"""What an export needs to know about a .gguf file: its heads, and the tensors that make queries."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType as Kind
from numpy.typing import NDArray

from calibrate.errors import CalibrateError
from calibrate.export.plan import Plan

Value = tuple[Any, Kind]  # of a key, with its type
Factors = dict[str, NDArray[np.float64]]  # of the rows of tensors, by name

# Graphs of llama.cpp whose queries are linear in these tensors up to softmax, by tests that run it.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "olmo2", "gemma3")
# Keys of any architecture that llama.cpp's graphs may follow.
_NOT_LINEAR = ("attn_logit_softcapping", "attention.clamp_kqv", "attention.max_alibi_bias")
BY_SIZE = "mistral3"  # llama.cpp's graph of a Llama whose queries may grow with log n
_QUERIES = ("attn_q", "attn_qkv")  # in a fused tensor the rows of queries come first
_NORM = "attn_q_norm"
_NO_PLAIN_LLAMA = ("rope.scaling.", "expert_", "attention.sliding_window")  # keys
SCALE, LENGTH = "attention.temperature_scale", "rope.scaling.original_context_length"


def open_gguf(path: Path) -> gguf.GGUFReader:
    """A .gguf file, mapped into memory; raises CalibrateError if it cannot be read whole."""
    try:
        reader = gguf.GGUFReader(path)
    except OSError as failure:
        raise CalibrateError(
            f"cannot read {path}: {failure.strerror}; check the path and its permissions"
        ) from failure
    except (ValueError, IndexError) as failure:
        raise CalibrateError(
            f"{path} is not a whole .gguf file ({failure}); fetch it again"
        ) from failure
    if reader.byte_order == "S":
        raise CalibrateError(
            f"{path} was written for the other byte order; convert it for this machine"
        )
    return reader


def as_written(field: gguf.ReaderField) -> tuple[Any, Kind, Kind | None]:
    """The value of a key as a writer repeats it, with its type and that of its items.

    Strings are bytes: of a tokenizer, not all need be UTF-8.

    Raises:
      CalibrateError: an array that the package `gguf` does not write.
    """
    kind, *inner = field.types
    if kind == Kind.ARRAY and len(inner) != 1:
        raise CalibrateError(
            f"{field.name} is an array without items or of arrays, which the package gguf does not "
            "write; remove it from the file"
        )
    if Kind.STRING not in field.types:
        value: Any = field.contents()
    else:
        strings = [field.parts[i].tobytes() for i in field.data]
        value = strings if inner else strings[0]
    return value, kind, inner[0] if inner else None


class GgufModel:
    """A .gguf file, mapped into memory; if it is `exported`, its kind may be `mistral3`.

    Attributes:
      reader: its keys and tensors.
      architecture: its name in llama.cpp.
      n_layers, n_heads: of attention; heads are those of queries.
      head_dim: rows of each head's queries.
    Raises:
      CalibrateError: it cannot be read, or queries of such a model cannot be scaled exactly.
    """

    def __init__(self, path: Path, exported: bool = False):
        self.path = path
        self.reader = open_gguf(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = str(self.key("general.architecture"))
        if not exported:
            self._require_known()
        self.n_layers = self._count("block_count")
        self.n_heads = self._count("attention.head_count")
        self.context = self._count("context_length")
        self.head_dim = int(
            self.key(f"{self.architecture}.attention.key_length")
            or self._count("embedding_length") // self.n_heads
        )
        self._require_size()

    def key(self, name: str) -> Any:
        """The value of a key; None if there is none."""
        field = self.reader.get_field(name)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as failure:
            raise CalibrateError(f"{name} is not UTF-8 ({failure}); fetch the file again") from None

    def factors_by_tensor(self, plan: Plan) -> Factors:
        """For each tensor that a plan changes, a factor for each of its rows."""
        changed: Factors = {}
        for layer in range(self.n_layers):
            factors = np.array(plan.of_layer(layer), np.float64)
            if (factors != 1).any():
                changed |= self._of_layer(layer, factors)
        return changed

    def _of_layer(self, layer: int, factors: NDArray[np.float64]) -> Factors:
        n_rows = self.n_heads * self.head_dim
        norm = f"blk.{layer}.{_NORM}.weight"
        if norm in self.tensors:
            size = int(self.tensors[norm].n_elements)
            if size == n_rows:
                return {norm: np.repeat(factors, self.head_dim)}
            self._require_rows(norm, size, self.head_dim)
            if np.ptp(factors):
                raise CalibrateError(
                    f"heads of layer {layer} differ, by factors of {factors.min():.4g} to "
                    f"{factors.max():.4g}, and a norm with one weight for all of them follows "
                    "their queries; fit the layer's heads together"
                )
            return {norm: np.full(size, factors[0])}
        for part in _QUERIES:
            name = f"blk.{layer}.{part}.weight"
            if name in self.tensors:
                rows = int(self.tensors[name].shape[1])
                self._require_rows(name, rows, n_rows, fused=part != "attn_q")
                by_row = np.ones(rows)
                by_row[:n_rows] = np.repeat(factors, self.head_dim)
                bias = f"blk.{layer}.{part}.bias"
                return {name: by_row} | ({bias: by_row} if bias in self.tensors else {})
        raise CalibrateError(
            f"{self.path} has no tensor of queries in layer {layer}, such as "
            f"blk.{layer}.attn_q.weight; give a model whose every layer has attention"
        )

    def _require_rows(self, name: str, found: int, queries: int, fused: bool = False) -> None:
        more = 2 * self._count("attention.head_count_kv") * self.head_dim if fused else 0
        if found != queries + more:
            raise CalibrateError(
                f"{name} in {self.path} has {found} rows, and {self.n_heads} heads of "
                f"{self.head_dim} have {queries + more}; such a model cannot be exported"
            )

    def _require_size(self) -> None:
        """Refuses counts of a damaged file, by which plans would have no end."""
        layers = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        rows = max((int(size) for x in self.tensors.values() for size in x.shape), default=0)
        if self.n_layers > len(layers) or self.n_heads > rows:
            raise CalibrateError(
                f"{self.path} declares {self.n_layers:,} layers of {self.n_heads:,} heads, and has "
                f"tensors of {len(layers):,} layers, of {rows:,} rows at most; fetch it again"
            )

    def _require_known(self) -> None:
        if (self.key("split.count") or 1) > 1:
            raise CalibrateError(
                f"{self.path} is one of {self.key('split.count')} files; merge them: "
                "llama-gguf-split --merge FIRST OUT"
            )
        if self.architecture not in ARCHITECTURES:
            raise CalibrateError(
                f"models of {self.architecture} cannot be exported: their queries are not known to "
                f"scale with these tensors; supported are {', '.join(ARCHITECTURES)}"
            )
        for name in _NOT_LINEAR:
            if value := self.key(f"{self.architecture}.{name}"):
                raise CalibrateError(
                    f"{self.path} has {name} = {value}: logits are not of the queries alone, so "
                    "that scaled weights would not give scaled logits; it cannot be exported"
                )

    def _count(self, name: str) -> int:
        """An integer key of the architecture's own."""
        value = self.key(f"{self.architecture}.{name}")
        if not isinstance(value, int) or value < 1:
            raise CalibrateError(
                f"{self.path} has {self.architecture}.{name} = {value!r}; it must be a positive "
                "integer, the same for all layers"
            )
        return value


def size_keys(model: GgufModel, ratio: float) -> dict[str, Value]:
    """The keys that tell llama.cpp about a rule of log n.

    Its graph `mistral3` multiplies the query at position p, from 0, by

        1 + scale log(1 + floor(p / length)), with length the original context of YaRN,

    which is not used otherwise unless positions are scaled. With length 1 that is 1 + scale log n.
    Other models than plain Llamas raise CalibrateError.
    """
    own = f"{model.architecture}."
    keys = (name.removeprefix(own) for name in model.reader.fields if name.startswith(own))
    unfit = [key for key in keys if key.startswith(_NO_PLAIN_LLAMA)]
    if model.architecture != "llama" or unfit:
        what = f"this one has {unfit[0]}" if unfit else f"this one is {model.architecture}"
        raise CalibrateError(
            "rules of log n in a .gguf file need a plain Llama, which llama.cpp runs as "
            f"{BY_SIZE}, and {what}; fit constants: calibrate model fit RUN --kind constant"
        )
    return {f"{BY_SIZE}.{SCALE}": (ratio, Kind.FLOAT32), f"{BY_SIZE}.{LENGTH}": (1, Kind.UINT32)}
