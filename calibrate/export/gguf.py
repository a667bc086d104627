"""Export into a .gguf file for llama.cpp.

The file is that of the model, with the queries of heads scaled. All other tensors and keys stay as
they are. It has more keys, of which llama.cpp computes nothing: `calibrate.*` with the fit, its
reference and id, the fingerprint of the model, and a digest of all keys and tensors.

`prepare_gguf` checks that the export is exact, `write_gguf` writes it, `check_gguf` reads it back.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType as Kind
from numpy.typing import NDArray

from calibrate.errors import CalibrateError, CoefficientsError, command
from calibrate.export.gguf_model import GRAPH_BY_SIZE, GgufModel, MetadataKey, RowFactors
from calibrate.export.plan import (
    IF_CONVERTED,
    TAGS,
    ExportContents,
    ExportPlan,
    make_plan,
    require_made_for,
)
from calibrate.export.scale_gguf_rows import scale_rows
from calibrate.parallel import SILENT, Progress
from calibrate.storage.atomic_io import check_free, new_file
from calibrate.storage.fingerprints import fingerprint_of
from calibrate.storage.gguf_header import packed_header, packed_key, packed_text
from calibrate.store.coefficient_file import require_original
from calibrate.store.fit import Fit, digest, dumps
from calibrate.store.loading import loads
from calibrate.version import __version__

# Key prefixes that a plain Llama does not have.
_NOT_PLAIN_LLAMA = ("rope.scaling.", "expert_", "attention.sliding_window")
_SCALED_POSITIONS = "rope_"  # tensors of Llama 3.1 and later
_ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
# Keys of an export
_PREFIX = "calibrate."
_RECORD = ("fit", "id", "model", "calibrate", "digest")  # after the prefix
_COEFFICIENTS = "calibrate.coefficients"
_DIGEST = "calibrate.digest"


@dataclass(frozen=True)
class GgufExport:
    """An export of a fit for a .gguf file, checked and ready to be written."""

    fit: Fit
    model: GgufModel
    plan: ExportPlan
    architecture: str  # name of the graph that applies the plan
    keys: dict[str, bytes]  # as stored, without the digest
    metadata: dict[str, Any]  # record of the export, without the digest
    factors: RowFactors  # of the tensors that change

    def data(self) -> Iterator[NDArray[Any]]:
        """Yields the data of each tensor, in order, computed anew at each call."""
        for name, tensor in self.model.file.tensors.items():
            data = self.model.file.data(name)
            if name in self.factors:
                data = scale_rows(data, tensor.kind, self.factors[name])
            yield np.ascontiguousarray(data)


def prepare_gguf(fit: Fit, model: GgufModel, any_model: bool = False) -> GgufExport:
    """Returns the export of a fit for a .gguf file, after all checks; nothing is written.

    Args:
      any_model: accept a fit that was made for another model.
    Raises:
      CoefficientsError: engines cannot run the fit, or it was made for another model.
      CalibrateError: the fit cannot be applied exactly to such a model.
    """
    require_original(model.path, {"fit": _find_carried_fit(model)})
    plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    architecture, size_keys = model.architecture, dict[str, bytes]()
    if plan.ratio:
        architecture, size_keys = _keys_by_size(model, plan.ratio)
    keys = _kept_keys(model, architecture) | size_keys
    factors = model.row_factors(plan)
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
    return GgufExport(fit, model, plan, architecture, keys, metadata, factors)


def _find_carried_fit(model: GgufModel) -> Any:
    """Returns the fit that a file's weights carry already; None if they carry none.

    A file that llama.cpp converted from an exported folder has the tags of the folder's card, and
    no other trace of the fit.
    """
    fit = model.key(f"{_PREFIX}fit")
    tags = model.file.keys.get("general.tags")
    if fit is None and tags and all(packed_text(tag) in tags.stored for tag in TAGS):
        return f"of {model.key('general.name')}"
    return fit


def _keys_by_size(model: GgufModel, ratio: float) -> tuple[str, dict[str, bytes]]:
    """Returns the graph by which llama.cpp applies a rule of log n, and its keys.

    The graph `mistral3` multiplies the query at position p, counted from 0, by

        1 + scale log(1 + floor(p / length)),

    where `length` is the original context of YaRN, which has no other use unless positions are
    scaled. With length 1 this is 1 + scale log n.

    Raises:
      CalibrateError: the model is not a plain Llama.
    """
    prefix = f"{model.architecture}."
    names = (name.removeprefix(prefix) for name in model.file.keys if name.startswith(prefix))
    unfit = [key for key in names if key.startswith(_NOT_PLAIN_LLAMA)]
    unfit += [name for name in model.file.tensors if name.startswith(_SCALED_POSITIONS)]
    graph = GRAPH_BY_SIZE.get(model.architecture)
    if graph is None or unfit:
        difference = f"this one has {unfit[0]}" if unfit else f"this one is {model.architecture}"
        raise CalibrateError(
            "rules of log n in a .gguf file need a plain Llama, which llama.cpp runs as "
            f"mistral3, and {difference}; fit constants: "
            f"{command('model fit RUN', kind='constant')}"
        )
    scale, length = packed_key(ratio, Kind.FLOAT32), packed_key(1, Kind.UINT32)
    return graph, {
        f"{graph}.attention.temperature_scale": scale,
        f"{graph}.{_ORIGINAL_CONTEXT}": length,
    }


def _kept_keys(model: GgufModel, architecture: str) -> dict[str, bytes]:
    """Returns the model's keys as stored, with the name of the new architecture for its own."""
    kept = {}
    for name, key in model.file.keys.items():
        first, dot, rest = name.partition(".")
        if dot and first == model.architecture:
            kept[f"{architecture}.{rest}"] = key.stored
        elif first not in (architecture, "calibrate"):
            kept.setdefault(name, key.stored)
    return kept | {MetadataKey.ARCHITECTURE: packed_key(architecture, Kind.STRING)}


def write_gguf(export: GgufExport, out: Path, progress: Progress = SILENT) -> ExportContents:
    """Writes an export as a .gguf file, which appears whole or not at all.

    Tensors are read and written one by one, twice: for the digest, and for the file.

    Raises:
      CalibrateError: the file exists, the disk fails, or scaled weights are beyond their type.
    """
    check_free(out)
    file = export.model.file
    header = packed_header(export.keys, file.tensors, file.alignment)
    metadata = export.metadata | {"digest": _digest_contents(header, export.data())}
    keys = export.keys | {_DIGEST: packed_key(metadata["digest"], Kind.STRING)}
    sizes = [tensor.n_bytes for tensor in file.tensors.values()]
    progress.begin("writing", len(sizes), sum(sizes))
    with new_file(out) as path, open(path, "xb") as stream:
        stream.write(packed_header(keys, file.tensors, file.alignment))
        for data in export.data():
            stream.write(data.data)
            stream.write(bytes(-data.nbytes % file.alignment))
            progress.advance(data.nbytes)
    return ExportContents(out, metadata, export.architecture, export.plan)


def _digest_contents(header: bytes, data: Iterable[NDArray[Any]]) -> str:
    """Returns the sha256 of a header without this digest, and of all tensors."""
    sha256 = hashlib.sha256(header)
    for x in data:
        sha256.update(x.data)
    return f"sha256:{sha256.hexdigest()}"


def check_gguf(path: Path) -> ExportContents:
    """Reads an exported file and compares its keys and tensors with what was written.

    Raises:
      CalibrateError: the file cannot be read, or is not an export.
    """
    model = GgufModel(path, exported=True)
    metadata = {name: model.key(f"{_PREFIX}{name}") for name in _RECORD}
    if metadata["fit"] is None:
        raise CalibrateError(
            f"{path} is not an exported model; give a file that calibrate export wrote"
        )
    file, plan, problems = model.file, None, list[str]()
    keys = {name: key.stored for name, key in file.keys.items() if name != _DIGEST}
    header = packed_header(keys, file.tensors, file.alignment)
    if _digest_contents(header, map(file.data, file.tensors)) != str(metadata["digest"]):
        problems.append("its weights or keys were changed")
    try:
        fit = loads(str(model.key(_COEFFICIENTS, max_characters=None)).encode())
        for name, actual in (("id", digest(fit)), ("fit", fit.reference)):
            if actual != metadata[name]:
                problems.append(f"the fit in it is {actual}, and its keys say {metadata[name]}")
        plan = make_plan(fit, model.n_layers, model.n_heads, model.context)
    except CoefficientsError as failure:
        problems.append(str(failure))
    return ExportContents(path, metadata, model.architecture, plan, tuple(problems))
