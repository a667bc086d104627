"""Fingerprints: sha256 of bytes, of files, of arrays, and of the folder of a model."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.errors import CalibrateError
from calibrate.storage.atomic_io import not_a

if TYPE_CHECKING:
    import numpy as np

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")


def fingerprint(source: Any) -> str:
    """The digest of what determines a head's logits, for `Head.fingerprint`.

    Args:
      source: the path of a file, of which all bytes count; or arrays and numbers in mappings, lists
        and tuples as deep as you like, of which values, shapes, dtypes and names do.
    Returns:
      "sha256:" and 64 hexadecimal digits.
    Raises:
      CalibrateError: there is no such file, or something is neither array nor number.

    >>> import calibrate, numpy as np
    >>> query = np.eye(2)
    >>> calibrate.fingerprint({"query": query, "scale": 0.5})[:14]
    'sha256:bce84d1'
    >>> calibrate.fingerprint({"query": query}) == calibrate.fingerprint({"query": 2 * query})
    False
    """
    from calibrate.storage.npz import pack_arrays  # deferred: it loads NumPy

    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise CalibrateError(f"{str(path)!r} is not a file; give one, or arrays")
        return f"sha256:{digest_of_file(path)}"
    return sha256_of(pack_arrays(dict(sorted(_named_arrays(source, "")))))


def _named_arrays(value: Any, name: str) -> Iterator[tuple[str, "np.ndarray"]]:
    """Every array with its place, such as "layers.0.query"."""
    import numpy as np

    if isinstance(value, Mapping):
        for key in value:
            yield from _named_arrays(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _named_arrays(item, f"{name}.{i}" if name else str(i))
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biufcV":
            raise CalibrateError(f"{name or 'the value'} is {array.dtype}; give arrays or numbers")
        yield name or "value", array


def sha256_of(data: bytes) -> str:
    """sha256 of a file's bytes, as manifests and fingerprints write it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_of(files: Iterable[Path]) -> str:
    """sha256 of the files of a model and of their names; a .gguf file may have any name."""
    digests = {
        "model.gguf" if path.suffix == ".gguf" else path.name: digest_of_file(path)
        for path in files
    }
    return sha256_of(json.dumps(digests, sort_keys=True).encode())


def require_folder(path: Path | None) -> Path | None:
    """The folder of a model, if one is named.

    Raises:
      CalibrateError: it is not a folder; for a name on the Hub the message has the command that
        downloads the model.
    """
    if path is not None and not path.is_dir():
        if _HUB_NAME.fullmatch(str(path)) and not path.exists():
            raise CalibrateError(
                f"'{path}' is not a local folder. Models are not downloaded; run `hf download "
                f"{path} --local-dir FOLDER` first."
            )
        raise CalibrateError(
            f"{not_a('folder', path)}; give the folder of a model: config.json with safetensors, "
            "or with one .gguf file"
        )
    return path
