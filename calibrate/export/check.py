"""What an exported folder carries, and whether it is what was written."""

from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.export.carried import Carried
from calibrate.export.checkpoint import FIT, KEY, digest_of, read_configuration
from calibrate.export.plan import make_plan
from calibrate.files.coefficient_file import digest, read
from calibrate.files.model_fingerprint import digest_of_file
from calibrate.transformers.folders import CONFIG, ModelFolder


def read_export(path: Path) -> Carried:
    """Reads an exported folder, and compares its files with what was written.

    Raises:
      CalibrateError: it cannot be read, or is no export.
    """
    folder = ModelFolder(path)
    if folder.is_gguf:
        raise CalibrateError(f"{path} has no {CONFIG}; give a folder that calibrate export wrote")
    stored = read_configuration(path / CONFIG)
    said = stored.get(KEY)
    if not isinstance(said, dict) or not isinstance(said.get("files"), dict):
        raise CalibrateError(
            f"{path / CONFIG} says nothing of an export; give a folder that calibrate export wrote"
        )
    faults = [] if said.get("digest") == digest_of(stored) else [f"{CONFIG} was changed"]
    faults += _faults(folder, said["files"])
    plan = None
    try:
        fit, config = read(path / FIT), folder.config
        if digest(fit) != said.get("id"):
            faults.append(f"{FIT} is {digest(fit)}, and {CONFIG} says {said.get('id')}")
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        plan = make_plan(fit, layers, heads, folder.context)
    except CalibrateError as failure:
        faults.append(str(failure))
    return Carried(path, said, folder.config.model_type, plan, tuple(faults))


def _faults(folder: ModelFolder, written: dict[str, Any]) -> list[str]:
    faults = []
    present = {path.name for path in folder.files} - {CONFIG}
    for name in sorted(present - written.keys()):
        faults.append(f"{name} was not there")
    for name in sorted(written):
        if Path(name).name != name:
            faults.append(f"{name} is not the name of a file in the folder")
        elif not (folder.path / name).is_file():
            faults.append(f"{name} is missing")
        elif digest_of_file(folder.path / name) != written[name]:
            faults.append(f"{name} was changed")
    return faults
