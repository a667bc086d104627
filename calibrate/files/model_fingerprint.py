"""The folder of a model, and its fingerprint: of the files of weights and configuration."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from calibrate.errors import CalibrateError
from calibrate.files.atomic_io import not_a, open_regular

_CHUNK = 1 << 24


def require_folder(path: Path | None) -> Path | None:
    """The folder of a model, if one is named.

    Raises:
      CalibrateError: it is not a folder.
    """
    if path is not None and not path.is_dir():
        raise CalibrateError(
            f"{not_a('folder', path)}; give that of a model for Transformers, or of a .gguf file"
        )
    return path


def fingerprint_of(files: Iterable[Path]) -> str:
    """sha256 of files and their names; a .gguf file may have any name."""
    digests = {
        "model.gguf" if path.suffix == ".gguf" else path.name: digest_of_file(path)
        for path in files
    }
    return "sha256:" + hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as failure:
        raise CalibrateError(
            f"cannot read {path}: {failure.strerror}; check its permissions and the disk"
        ) from failure
    return digest.hexdigest()
