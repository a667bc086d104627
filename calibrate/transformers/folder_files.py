"""The files of a model's folder that Transformers loads: weights, index, configuration.

Fingerprints, exports and checks use the same lists. If Transformers would load another file beside
or instead of these, an error names it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import snapshot_download
from msgspec import Meta, Struct

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.storage.atomic_io import read_bytes
from calibrate.storage.safetensors_file import StoredTensor
from calibrate.storage.strict_json import convert, parse

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHAT_TEMPLATES = "additional_chat_templates"  # a folder
MAX_CONFIG_BYTES = 1 << 22
_ADAPTER = "adapter_config.json"
_MAX_INDEX_BYTES = 1 << 26

PlainName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$(?!\n)", max_length=200)]


class WeightIndex(Struct):
    """The field of an index that is read: the file of each tensor, all in the same folder."""

    weight_map: dict[str, Any]


Headers = Mapping[Path, Mapping[str, StoredTensor]]  # of files of weights, by tensor


def cached_snapshot(name: str, revision: str | None, cache: str | None = None) -> Path:
    """The folder of a Hub repository in a cache on this machine, by default the Hub's own.

    The folder may lack files, such as pictures and other formats, which loading does not fetch.

    Raises:
      CalibrateError: the cache does not have the repository, or the name is not one.
    """
    try:
        snapshot = snapshot_download(
            name, revision=revision, cache_dir=cache, local_files_only=True, allow_patterns=[]
        )
    except Exception as failure:
        raise CalibrateError(
            f"the Hub's cache on this machine does not have {name!r} (hf download fetches it)"
        ) from failure
    return Path(snapshot)


def weight_files(folder: Path) -> list[Path]:
    """The files of a model: its weights, their index, and the configuration.

    Raises:
      CalibrateError: there are none, or an adapter beside them.
    """
    if (adapter := folder / _ADAPTER).is_file():
        raise CalibrateError(
            f"{adapter} is an adapter, which Transformers applies when it loads the folder; merge "
            "it into the weights (merge_and_unload, then save_pretrained), or move it elsewhere"
        )
    if (folder / WEIGHTS).is_file():  # first, as in Transformers: an old index may lie beside it
        return [folder / WEIGHTS, folder / CONFIG]
    if (folder / INDEX).is_file():
        names = sorted(set(read_index(folder / INDEX).values()))
        return [folder / name for name in [*names, INDEX, CONFIG]]
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    if len(files) == 1:
        return files
    raise CalibrateError(
        f"{folder} has no {WEIGHTS} and {len(files)} .gguf files; give a folder with one model"
    )


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor in an index; all files are in the folder of the index.

    Transformers loads all tensors of these files, even those that the index does not list.
    """
    try:
        listed = parse(read_bytes(path, _MAX_INDEX_BYTES))
        index: WeightIndex = convert(listed, WeightIndex, "give the file of each tensor")
        for tensor, file in index.weight_map.items():
            convert(file, PlainName, "give the name of a file in the same folder", tensor)
    except CoefficientsError as failure:
        raise CalibrateError(f"{path} is not an index ({failure}); restore it") from failure
    return index.weight_map


def make_index(headers: Headers) -> dict[str, Any]:
    """The content of an index of files, from the tensors that they hold."""
    files = {name: path.name for path, header in headers.items() for name in header}
    sizes = [tensor.end - tensor.begin for header in headers.values() for tensor in header.values()]
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(files.items()))}
