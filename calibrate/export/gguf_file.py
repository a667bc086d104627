"""Export into a .gguf file, and what an exported one carries."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType as Kind

import calibrate
from calibrate.export.gguf_model import BY_SIZE, FIT, GgufModel, Value, size_keys
from calibrate.export.gguf_rows import ScaledRows, scale_rows
from calibrate.export.plan import Plan, make_plan
from calibrate.files.atomic_io import replacing
from calibrate.files.coefficient_file import digest
from calibrate.files.coefficients import Coefficients

_ARCHITECTURE = "general.architecture"
_FIT_ID, _QUERIES, _NAMES = "calibrate.fit_id", "calibrate.queries", "calibrate.tensors"
_OWN = "GGUF."  # the reader's names for numbers of the header


@dataclass(frozen=True)
class GgufExport:
    """What was written.

    Attributes:
      path: of the file.
      architecture: as engines see it.
      plan: what they apply.
      changed: names of tensors that were scaled.
      rewritten: names of those whose type became another, with both types.
      rounding: the most that rounding changed one of them, relative.
    """

    path: Path
    architecture: str
    plan: Plan
    changed: tuple[str, ...]
    rewritten: tuple[tuple[str, str, str], ...]
    rounding: float


def export_gguf(
    fit: Coefficients, model: GgufModel, out: Path, advance: Callable[[], None] = lambda: None
) -> GgufExport:
    """Writes a model with a fit in its weights; all that the fit does not change stays as it is.

    Tensors are read and written one by one. The file appears whole or not at all.

    Args:
      advance: called after each tensor.
    Raises:
      CalibrateError: engines cannot run the fit, the model is not of a kind that can be exported,
        or the file cannot be written.
    """
    plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    keys = size_keys(model, plan.ratio) if plan.ratio else {}
    architecture = BY_SIZE if plan.ratio else model.architecture
    factors = model.factors_by_tensor(plan)
    scaled = _Scaled(model, factors)
    keys |= _metadata(fit, list(factors), scaled.digest())
    with replacing(out) as path:
        writer = gguf.GGUFWriter(path, architecture)
        try:
            _write(writer, model, scaled, keys, advance)
        finally:
            writer.close()
    return GgufExport(
        out, architecture, plan, tuple(factors), tuple(scaled.rewritten), scaled.rounding
    )


class _Scaled:
    """The tensors of queries times their factors, computed anew at each use."""

    def __init__(self, model: GgufModel, factors: dict[str, Any]):
        self._model, self._factors = model, factors
        self.rewritten: list[tuple[str, str, str]] = []
        self.kinds: dict[str, gguf.GGMLQuantizationType] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rounding = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._factors

    def rows(self, name: str) -> ScaledRows:
        tensor = self._model.tensors[name]
        return scale_rows(tensor.data, tensor.tensor_type, self._factors[name])

    def digest(self) -> str:
        """Of all of them, in the file's order; also notes their types and shapes."""
        found = hashlib.sha256()
        for name in (tensor for tensor in self._model.tensors if tensor in self):
            rows, was = self.rows(name), self._model.tensors[name].tensor_type
            found.update(rows.data.tobytes())
            self.kinds[name], self.shapes[name] = rows.kind, rows.data.shape
            self.rounding = max(self.rounding, rows.rounding)
            if rows.kind != was:
                self.rewritten.append((name, was.name, rows.kind.name))
        return "sha256:" + found.hexdigest()


def _metadata(fit: Coefficients, names: list[str], queries: str) -> dict[str, Value]:
    values = {
        FIT: fit.reference, _FIT_ID: digest(fit), _QUERIES: queries,
        "calibrate.version": calibrate.__version__,
    }  # fmt: skip
    return {name: (value, Kind.STRING) for name, value in values.items()} | {
        _NAMES: (names, Kind.ARRAY)
    }


def _write(
    writer: gguf.GGUFWriter,
    model: GgufModel,
    scaled: _Scaled,
    keys: dict[str, Value],
    advance: Callable[[], None],
) -> None:
    writer.data_alignment = model.reader.alignment
    for name, field in model.reader.fields.items():
        if not name.startswith(_OWN) and name != _ARCHITECTURE:
            renamed = _renamed(name, model.architecture, writer.arch)
            inner = field.types[-1] if field.types[0] == Kind.ARRAY else None
            writer.add_key_value(renamed, field.contents(), field.types[0], inner)
    for name, (value, kind) in keys.items():
        writer.add_key_value(name, value, kind)
    for name, tensor in model.tensors.items():
        own = name not in scaled
        shape = tensor.data.shape if own else scaled.shapes[name]
        of_type = tensor.tensor_type if own else scaled.kinds[name]
        size = int(np.prod(shape)) * tensor.data.dtype.itemsize
        writer.add_tensor_info(name, shape, tensor.data.dtype, size, of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in model.tensors.items():
        writer.write_tensor_data(scaled.rows(name).data if name in scaled else tensor.data)
        advance()


def _renamed(name: str, old: str, new: str) -> str:
    return f"{new}.{name[len(old) + 1 :]}" if name.startswith(f"{old}.") else name
