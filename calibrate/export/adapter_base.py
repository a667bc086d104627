"""The base model that the configuration of an adapter names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from calibrate.errors import CalibrateError
from calibrate.transformers.folders import ModelFolder

# PEFT's names.
CONFIG = "adapter_config.json"
# Keys of it.
BASE = "base_model_name_or_path"
REVISION = "revision"


def base_of(path: Path) -> tuple[str, str | None]:
    """A model's name on the Hub and its revision, in the Hub's cache; else its path, and None.

    The path is absolute: a relative one PEFT looks up in the folder where it happens to run, and
    where nothing is there, on the Hub.
    """
    snapshot = path.resolve()
    repository = snapshot.parents[1].name if snapshot.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), snapshot.name
    return str(snapshot), None


def unlike_base(stored: Mapping[str, Any], model: ModelFolder, fingerprint: str) -> list[str]:
    """A line if the base model of PEFT's configuration is not the model at hand.

    It may be named otherwise than it was written, by its name on the Hub, say: then the files that
    PEFT would load, without a network, decide.
    """
    base, revision = stored.get(BASE), stored.get(REVISION)
    if (base, revision) == base_of(model.path):
        return []
    try:
        folder = _base_folder(base, revision)
        if folder == model.path.resolve() or ModelFolder(folder).fingerprint() == fingerprint:
            return []
        reason = f"it is another one than {model.path}"
    except CalibrateError as failure:
        reason = str(failure)
    name = repr(base) if revision is None else f"{base!r} at revision {revision!r}"
    return [f"{CONFIG} names the base model {name}: {reason}"]


def _base_folder(base: Any, revision: Any) -> Path:
    """The folder that PEFT would load a base model from; CalibrateError if it is not here."""
    if not isinstance(base, str) or not isinstance(revision, str | None):
        raise CalibrateError("that is no name of a model")
    path = Path(base)
    if path.is_absolute() or path.is_dir():
        if not path.is_absolute():
            raise CalibrateError("a relative path, which depends on where it is loaded")
        if revision is not None:
            raise CalibrateError("a folder has no revisions")
        if not path.is_dir():
            raise CalibrateError("there is no such folder")
        return path.resolve()
    try:
        return Path(snapshot_download(base, revision=revision, local_files_only=True)).resolve()
    except Exception as failure:  # it is not the name of a repository, or was not fetched
        raise CalibrateError(
            "the Hub's cache on this machine does not have it (hf download fetches it)"
        ) from failure
