"""Export into a .gguf file, and what an exported one carries.

The file is the model's own, with the queries of heads scaled and keys `calibrate.*` beside its own:
the fit itself, its reference and id, the fingerprint of the model, and a digest of all tensors.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind

import calibrate
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.export.gguf_model import (
    BY_SIZE,
    LENGTH,
    SCALE,
    Factors,
    GgufModel,
    Value,
    as_written,
    size_keys,
)
from calibrate.export.gguf_rows import scale_rows
from calibrate.export.plan import Carried, Plan, make_plan, refuse_exported, require_made_for
from calibrate.files.atomic_io import check_free, new_file
from calibrate.files.coefficient_file import digest, dumps, loads
from calibrate.files.coefficients import Coefficients
from calibrate.files.model_fingerprint import fingerprint_of

_SAID = ("fit", "id", "model", "calibrate", "digest")  # keys, with the prefix
_PREFIX, _COEFFICIENTS = "calibrate.", "calibrate.coefficients"
_ARCHITECTURE = "general.architecture"
_HEADER = "GGUF."  # the reader's names for numbers of the header


def export_gguf(
    fit: Coefficients,
    model: GgufModel,
    out: Path,
    any_model: bool = False,
    report: Callable[[int], None] = lambda n_bytes: None,
) -> Carried:
    """Writes a model with a fit in its weights; all that the fit does not change stays as it is.

    Tensors are read and written one by one. The file appears whole or not at all.

    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model, without
        `any_model`.
      CalibrateError: the model is not of a kind that can be exported, or the disk fails.
    """
    check_free(out)
    refuse_exported(model.path, model.key(f"{_PREFIX}fit"))
    plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    keys = size_keys(model, plan.ratio) if plan.ratio else {}
    scaled = _Scaled(model, model.factors_by_tensor(plan))
    fingerprint = fingerprint_of([model.path])
    if not any_model:
        remedy = "if it was converted from the model that the fit was made for, give --any-model"
        require_made_for(fit, fingerprint, model.path, remedy)
    said = {
        "fit": fit.reference, "id": digest(fit), "model": fingerprint,
        "calibrate": calibrate.__version__, "digest": scaled.digest,
    }  # fmt: skip
    keys |= {f"{_PREFIX}{name}": (value, Kind.STRING) for name, value in said.items()}
    keys |= {_COEFFICIENTS: (dumps(fit), Kind.STRING)}
    architecture = BY_SIZE if plan.ratio else model.architecture
    with new_file(out) as path:
        writer = gguf.GGUFWriter(path, architecture)
        try:
            _write(writer, model, scaled, keys, report)
        finally:
            writer.close()
    return Carried(out, said, architecture, plan, notes=scaled.notes())


def read_gguf_export(path: Path) -> Carried:
    """Reads an exported file, and compares its tensors with what was written.

    Raises:
      CalibrateError: it cannot be read, or is not an exported model.
    """
    model = GgufModel(path, exported=True)
    said = {name: model.key(f"{_PREFIX}{name}") for name in _SAID}
    if said["fit"] is None:
        raise CalibrateError(
            f"{path} is not an exported model; give a file that calibrate export wrote"
        )
    written = ((name, tensor.data) for name, tensor in model.tensors.items())
    faults = [] if _digest(written) == said["digest"] else ["its weights were changed"]
    plan = None
    try:
        fit = loads(str(model.key(_COEFFICIENTS)).encode())
        if digest(fit) != said["id"]:
            faults.append(f"the fit in it is {digest(fit)}, and its keys say {said['id']}")
        plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
        faults += _wrong_ratio(model, plan)
    except CoefficientsError as failure:
        faults.append(str(failure))
    return Carried(path, said, model.architecture, plan, tuple(faults))


def _wrong_ratio(model: GgufModel, plan: Plan) -> list[str]:
    found = model.key(f"{BY_SIZE}.{SCALE}") or 0.0
    floor = model.key(f"{BY_SIZE}.{LENGTH}")
    if plan.ratio and floor != 1:
        return [f"{BY_SIZE}.{LENGTH} is {floor}, and log n is counted from 1"]
    if np.isclose(found, plan.ratio, rtol=1e-6, atol=0):
        return []
    return [f"{BY_SIZE}.{SCALE} is {found:.6g}, and the fit's is {plan.ratio:.6g}"]


class _Scaled:
    """A model's tensors, those of queries times their factors, computed anew at each use.

    Attributes:
      digest: of all tensors, as they will be written.
    """

    def __init__(self, model: GgufModel, factors: Factors):
        self._model, self._factors = model, factors
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, Type] = {}
        self.digest = _digest((name, self.data(name)) for name in model.tensors)

    def data(self, name: str) -> Any:
        """What is written of a tensor."""
        tensor = self._model.tensors[name]
        if name not in self._factors:
            return tensor.data
        rows = scale_rows(tensor.data, tensor.tensor_type, self._factors[name])
        self.shapes[name], self.types[name] = rows.data.shape, rows.kind
        return rows.data

    def notes(self) -> tuple[str, ...]:
        """Which tensors have another type now."""
        was = {name: self._model.tensors[name].tensor_type for name in self.types}
        return tuple(
            f"{name} was {was[name].name}, and is {now.name}."
            for name, now in self.types.items() if was[name] != now
        )  # fmt: skip


def _digest(tensors: Iterable[tuple[str, Any]]) -> str:
    found = hashlib.sha256()
    for name, data in tensors:
        found.update(f"{name} {data.nbytes}\n".encode())
        found.update(np.ascontiguousarray(data).data)
    return "sha256:" + found.hexdigest()


def _write(
    writer: gguf.GGUFWriter, model: GgufModel, scaled: _Scaled, keys: dict[str, Value],
    report: Callable[[int], None],
) -> None:  # fmt: skip
    writer.data_alignment = model.reader.alignment
    for name, field in model.reader.fields.items():
        if not name.startswith(_HEADER) and name != _ARCHITECTURE:
            own = name.startswith(f"{model.architecture}.")
            renamed = writer.arch + name.removeprefix(model.architecture) if own else name
            writer.add_key_value(renamed, *as_written(field))
    for name, (value, kind) in keys.items():
        writer.add_key_value(name, value, kind)
    for name, tensor in model.tensors.items():
        shape = scaled.shapes.get(name, tensor.data.shape)
        of_type = scaled.types.get(name, tensor.tensor_type)
        size = int(np.prod(shape)) * tensor.data.dtype.itemsize
        writer.add_tensor_info(name, shape, tensor.data.dtype, size, of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in model.tensors:
        data = scaled.data(name)
        writer.write_tensor_data(data)
        report(data.nbytes)
