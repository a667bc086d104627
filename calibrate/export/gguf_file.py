"""Export into a .gguf file, and what an exported one carries.

The file is the model's own, with the queries of heads scaled and keys `calibrate.*` beside its own:
the fit itself, its reference and id, the fingerprint of the model, and a digest of all keys and
tensors.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType as Kind
from numpy.typing import NDArray

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.export.gguf_card import card_keys, has_card_of_export, is_of_card
from calibrate.export.gguf_model import Factors, GgufModel, MetadataKey, keys_by_size
from calibrate.export.gguf_rows import kind_of_scaled, scale_rows
from calibrate.export.plan import (
    IF_CONVERTED,
    ExportContents,
    make_plan,
    require_made_for,
)
from calibrate.parallel import SILENT, Progress
from calibrate.storage.atomic_io import check_free, new_file
from calibrate.storage.gguf_header import packed_header, packed_key
from calibrate.storage.model_fingerprint import fingerprint_of
from calibrate.store.carried_fit import require_original
from calibrate.store.coefficient_file import digest, dumps, loads
from calibrate.store.fit import Fit
from calibrate.version import __version__

_METADATA = ("fit", "id", "model", "calibrate", "digest")  # keys, behind the prefix
_PREFIX = "calibrate."
_NAME = "general.name"
_COEFFICIENTS = "calibrate.coefficients"
_DIGEST = "calibrate.digest"


def export_gguf(
    fit: Fit,
    model: GgufModel,
    out: Path,
    any_model: bool = False,
    progress: Progress = SILENT,
) -> ExportContents:
    """Writes a model with a fit in its weights; all that the fit does not change stays as it is.

    Tensors are read and written one by one. The file appears whole or not at all.

    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model, without
        `any_model`.
      CalibrateError: the model is not of a kind that can be exported, or the disk fails.
    """
    check_free(out)
    require_original(model.path, {"fit": _carried_fit(model)})
    plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    architecture, keys = model.architecture, dict[str, bytes]()
    if plan.ratio:
        architecture, keys = keys_by_size(model, plan.ratio)
    keys = _own_keys(model, architecture) | card_keys(model, fit) | keys
    scaled = _Scaled(model, model.factors_by_tensor(plan))
    fingerprint = fingerprint_of([model.path])
    if not any_model:
        require_made_for(fit, fingerprint, model.path, IF_CONVERTED)
    metadata = {
        "fit": fit.reference,
        "id": digest(fit),
        "model": fingerprint,
        "calibrate": __version__,
    }
    keys |= {f"{_PREFIX}{name}": packed_key(text, Kind.STRING) for name, text in metadata.items()}
    keys |= {_COEFFICIENTS: packed_key(dumps(fit), Kind.STRING)}
    metadata["digest"] = _digest(scaled.header(keys), scaled.data())
    keys |= {_DIGEST: packed_key(metadata["digest"], Kind.STRING)}
    scaled.write(out, keys, progress)
    return ExportContents(out, metadata, architecture, plan, notes=scaled.notes())


def _carried_fit(model: GgufModel) -> Any:
    """The fit in a file's weights, also if it was converted from an exported folder."""
    named = model.key(f"{_PREFIX}fit")
    if named is None and has_card_of_export(model):
        return f"of {model.key(_NAME)}"
    return named


def _own_keys(model: GgufModel, architecture: str) -> dict[str, bytes]:
    """A model's keys, as stored, without those of a card; those of its architecture under the name
    of another.
    """
    kept = {}
    for name, key in model.file.keys.items():
        first, dot, rest = name.partition(".")
        if dot and first == model.architecture:
            kept[f"{architecture}.{rest}"] = key.stored
        elif first not in (architecture, "calibrate") and not is_of_card(name):
            kept.setdefault(name, key.stored)
    return kept | {MetadataKey.ARCHITECTURE: packed_key(architecture, Kind.STRING)}


class _Scaled:
    """A model's tensors, those of queries times their factors, computed anew at each use."""

    def __init__(self, model: GgufModel, factors: Factors):
        self._file, self._factors = model.file, factors
        self._tensors = {
            name: tensor._replace(kind=kind_of_scaled(tensor.kind)) if name in factors else tensor
            for name, tensor in model.file.tensors.items()
        }

    def header(self, keys: Mapping[str, bytes]) -> bytes:
        return packed_header(keys, self._tensors, self._file.alignment)

    def data(self) -> Iterator[NDArray[Any]]:
        """The bytes of each tensor, in order."""
        for name, tensor in self._file.tensors.items():
            data = self._file.data(name)
            if name in self._factors:
                data = scale_rows(data, tensor.kind, self._factors[name])
            yield np.ascontiguousarray(data)

    def write(self, out: Path, keys: Mapping[str, bytes], progress: Progress) -> None:
        """Writes a file with these keys, which appears whole or not at all."""
        sizes = [tensor.n_bytes for tensor in self._file.tensors.values()]
        progress.begin("writing", len(sizes), sum(sizes))
        with new_file(out) as path, open(path, "xb") as file:
            file.write(self.header(keys))
            for data in self.data():
                file.write(data.data)
                file.write(bytes(-data.nbytes % self._file.alignment))
                progress.advance(data.nbytes)

    def notes(self) -> tuple[str, ...]:
        """The tensors that have another type now."""
        return tuple(
            f"{name} was {before.kind.name}, and is {self._tensors[name].kind.name}."
            for name, before in self._file.tensors.items()
            if before.kind != self._tensors[name].kind
        )


def _digest(header: bytes, data: Iterable[NDArray[Any]]) -> str:
    """Of tensors, and of a header without the digest itself."""
    digest_of_all = hashlib.sha256(header)
    for x in data:
        digest_of_all.update(x.data)
    return f"sha256:{digest_of_all.hexdigest()}"


def read_gguf_export(path: Path) -> ExportContents:
    """Reads an exported file, and compares its keys and tensors with what was written.

    Raises:
      CalibrateError: it cannot be read, or is not an exported model.
    """
    model = GgufModel(path, exported=True)
    metadata = {name: model.key(f"{_PREFIX}{name}") for name in _METADATA}
    if metadata["fit"] is None:
        raise CalibrateError(
            f"{path} is not an exported model; give a file that calibrate export wrote"
        )
    problems = _changed(model, str(metadata["digest"]))
    plan = None
    try:
        fit = loads(str(model.key(_COEFFICIENTS, most=None)).encode())
        for name, actual in (("id", digest(fit)), ("fit", fit.reference)):
            if actual != metadata[name]:
                problems.append(f"the fit in it is {actual}, and its keys say {metadata[name]}")
        plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    except CoefficientsError as failure:
        problems.append(str(failure))
    return ExportContents(path, metadata, model.architecture, plan, tuple(problems))


def _changed(model: GgufModel, recorded: str) -> list[str]:
    """The changes of an exported file's keys and tensors, by its digest."""
    file = model.file
    keys = {name: key.stored for name, key in file.keys.items() if name != _DIGEST}
    header = packed_header(keys, file.tensors, file.alignment)
    actual = _digest(header, map(file.data, file.tensors))
    return [] if actual == recorded else ["its weights or keys were changed"]
