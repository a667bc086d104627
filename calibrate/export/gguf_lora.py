"""A fit as a LoRA for llama.cpp: a .gguf file beside the model's own, which stays as it is.

The matrices are those of `lora.py`, in float32, for `blk.N.attn_q.weight` or a fused `attn_qkv`:
A has the rows of the model's own file, as llama.cpp multiplies them out, so that the order in which
its converter writes them is the same. Keys `calibrate.*` are those of an exported model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from numpy.typing import NDArray

from calibrate.errors import CalibrateError
from calibrate.export.gguf_card import card_keys, is_of_card
from calibrate.export.gguf_file import COEFFICIENTS, PREFIX
from calibrate.export.gguf_model import Factors, GgufModel, MetadataKey, key_of
from calibrate.export.gguf_rows import read_rows
from calibrate.export.lora import (
    MAX_RANK,
    changed_rows,
    check_rank,
    matrix_b,
    rank_note,
    rank_of,
)
from calibrate.export.plan import (
    IF_CONVERTED,
    ExportContents,
    ExportPlan,
    make_plan,
    require_made_for,
)
from calibrate.storage.atomic_io import check_free, write_atomically
from calibrate.storage.gguf_header import GgufTensor, packed_header, packed_key, padded, read_gguf
from calibrate.storage.model_fingerprint import digest_of_file, fingerprint_of
from calibrate.store.coefficient_file import digest, dumps, loads
from calibrate.store.coefficients import Coefficients
from calibrate.version import __version__

_TYPE = "general.type"
_ADAPTER = "adapter"
_ALIGNMENT = 32


class _LoraFile(NamedTuple):
    """The content of a file."""

    keys: dict[str, bytes]
    tensors: dict[str, NDArray[np.float32]]

    def pieces(self) -> Iterator[bytes]:
        shapes = {name: GgufTensor(Type.F32, x.shape) for name, x in self.tensors.items()}
        yield packed_header(self.keys, shapes, _ALIGNMENT)
        for x in self.tensors.values():
            yield x.tobytes().ljust(padded(x.nbytes, _ALIGNMENT), b"\0")


def is_lora(path: Path) -> bool:
    """True if a .gguf file is an adapter, and not a model."""
    key = read_gguf(path).keys.get(_TYPE)
    return key is not None and key.value == _ADAPTER.encode()


def export_gguf_lora(
    fit: Coefficients,
    model: GgufModel,
    out: Path,
    any_model: bool = False,
    max_rank: int = MAX_RANK,
) -> ExportContents:
    """Writes a fit as a LoRA for a model in a .gguf file.

    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model, without
        `any_model`.
      CalibrateError: a LoRA cannot hold it, or needs a larger rank, or the disk fails.
    """
    check_free(out)
    plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    factors = _factors(model, plan)
    check_rank(factors, max_rank)
    fingerprint = fingerprint_of([model.path])
    if not any_model:
        require_made_for(fit, fingerprint, model.path, IF_CONVERTED)
    file = _lora_file(fit, model, factors, fingerprint)
    write_atomically(out, b"".join(file.pieces()))
    return read_gguf_lora(out, model, fingerprint)


def read_gguf_lora(path: Path, model: GgufModel, fingerprint: str | None = None) -> ExportContents:
    """Reads a LoRA in a .gguf file, and compares it with what its fit asks for in its model.

    Raises CalibrateError if it cannot be read, is not an exported one, or is not of the model,
    whose fingerprint may be given.
    """
    stored = read_gguf(path)
    if COEFFICIENTS not in stored.keys:
        raise CalibrateError(
            f"{path} is not an exported LoRA; give a file that calibrate export wrote"
        )
    fit = loads(str(key_of(stored, COEFFICIENTS, most=None)).encode())
    made_for = str(key_of(stored, f"{PREFIX}model"))
    if (actual := fingerprint or fingerprint_of([model.path])) != made_for:
        raise CalibrateError(
            f"{path} was made for {made_for}, and {model.path} is {actual}; give its own with "
            "model=",
            parameter="model",
        )
    plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    factors = _factors(model, plan)
    expected = _lora_file(fit, model, factors, made_for)
    version = f"{PREFIX}calibrate"
    keys = {name: key.stored for name, key in stored.keys.items()}
    written = dict(expected.keys)
    if not any(map(is_of_card, keys)):  # an earlier version wrote none
        written = {name: x for name, x in written.items() if not is_of_card(name)}
    unlike = [
        f"its key {name} was changed"
        for name in sorted(keys.keys() | written.keys())
        if keys.get(name) != written.get(name) and name != version
    ]
    shapes = {name: (x.kind, x.shape) for name, x in stored.tensors.items()}
    if shapes != {name: (Type.F32, x.shape) for name, x in expected.tensors.items()}:
        unlike.append("it has other tensors than its fit asks for")
    else:
        unlike += [
            f"{name} is not what its fit asks for"
            for name, x in expected.tensors.items()
            if not np.array_equal(stored.data(name), x)
        ]
    metadata = {"fit": fit.reference, "id": digest(fit), "model": made_for}
    metadata["digest"] = f"sha256:{digest_of_file(path)}"
    notes = (rank_note(factors),)
    return ExportContents(path, metadata, model.architecture, plan, tuple(unlike), notes)


def _factors(model: GgufModel, plan: ExportPlan) -> Factors:
    """The factors of the rows of each projection; CalibrateError if a LoRA cannot hold the plan."""
    remedy = "and a LoRA only adds to the weights of projections; export the model instead"
    if plan.ratio:
        raise CalibrateError(f"the fit goes by log n, {remedy}")
    factors = model.factors_by_tensor(plan)
    projections = {f"{projection.module}.weight" for projection in model.graph.projections}
    for name in factors:
        if name.split(".", 2)[2] not in projections:
            raise CalibrateError(f"{name} would have to change, {remedy}")
    if not factors:
        raise CalibrateError("every beta of the fit is 1, and leaves nothing to adapt")
    return factors


def _lora_file(
    fit: Coefficients, model: GgufModel, factors: Factors, fingerprint: str
) -> _LoraFile:
    """The file of a fit for a model."""
    rank, tensors = rank_of(factors), dict[str, Any]()
    for name, by_row in factors.items():
        rows = changed_rows(by_row)
        a = np.zeros((rank, model.file.tensors[name].shape[1]), np.float32)
        data = model.file.data(name)[rows]
        a[: len(rows)] = read_rows(data, model.file.tensors[name].kind)
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": matrix_b(by_row, rank)}
    texts = {
        _TYPE: _ADAPTER,
        MetadataKey.ARCHITECTURE: model.architecture,
        "adapter.type": "lora",
        f"{PREFIX}fit": fit.reference,
        f"{PREFIX}id": digest(fit),
        f"{PREFIX}model": fingerprint,
        f"{PREFIX}calibrate": __version__,
        COEFFICIENTS: dumps(fit),
    }
    keys = {name: packed_key(text, Kind.STRING) for name, text in texts.items()}
    keys["adapter.lora.alpha"] = packed_key(float(rank), Kind.FLOAT32)
    return _LoraFile(keys | card_keys(model, fit, "lora"), tensors)
