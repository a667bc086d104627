"""The folder of a model, and its fingerprint: of the files of weights and configuration."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from calibrate.errors import CalibrateError
from calibrate.storage.atomic_io import not_a

_CHUNK = 1 << 24
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")


def require_folder(path: Path | None) -> Path | None:
    """The folder of a model, if one is named.

    Raises:
      CalibrateError: it is not a folder; a name on the Hub comes with the command that downloads.
    """
    if path is not None and not path.is_dir():
        if _ON_THE_HUB.fullmatch(str(path)) and not path.exists():
            raise CalibrateError(
                f"'{path}' is not a local folder. Models are not downloaded; run `hf download "
                f"{path} --local-dir FOLDER` first."
            )
        raise CalibrateError(
            f"{not_a('folder', path)}; give the folder of a model: config.json with safetensors, "
            "or with one .gguf file"
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
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as failure:
        raise CalibrateError(
            f"cannot read {path}: {failure.strerror}; check its permissions and the disk"
        ) from failure
    return digest.hexdigest()
