"""The fits store: its names and versions, and loading a fit by a reference.

A store is a folder of NAME/VERSION.json. Reading looks through the stores in order: the one given,
$CALIBRATE_FITS, ./fits, and the fits published with the package; the first that has the name is
used. `publishing.py` writes.
"""

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import not_a
from calibrate.store.coefficient_file import ADAPTER_FIT, read
from calibrate.store.coefficient_schema import NAME_PATTERN
from calibrate.store.fit import Fit

PROJECT = "calibrate-softmax"  # the name of this project in pyproject.toml
PUBLISHED = "published_fits"  # the folder inside an installed package
_ADDRESS = re.compile(r"hf:|[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_VERSION_FILE = re.compile(rf"({_VERSION.pattern})\.json")


def published_store() -> Path:
    """The package's own fits: inside the package in a wheel, beside it in the repository."""
    package = Path(__file__).resolve().parents[1]
    inside = package / PUBLISHED
    return inside if os.path.isdir(inside) else package.parent / "fits"


def shipped_files() -> list[Path]:
    """The coefficient files that come with the package, in `published_store()`.

    In a clone that folder may hold fits of a user too: there pyproject.toml lists those that go
    into the wheel. A copy of the package in another project has none that a wheel brings.
    """
    store = published_store()
    if store.name == PUBLISHED:
        return sorted(store.glob("*/*.json"))
    try:
        project = tomllib.loads((store.parent / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, or neither UTF-8 nor TOML
        return []
    if _table(project, "project").get("name") != PROJECT:
        return []
    included = _table(project, "tool", "hatch", "build", "targets", "wheel", "force-include")
    return [store.parent / file for file in included]


def _table(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The table of a TOML document under these keys; empty if there is none."""
    for key in keys:
        found = document.get(key)
        document = found if isinstance(found, dict) else {}
    return document


def origins(store: str | os.PathLike[str] | None = None) -> list[tuple[str, Path]]:
    """The folders that a reference is looked up in, first to last, and how each was chosen.

    Raises:
      CoefficientsError: `store` is given and is not a folder; the others need not exist yet.
    """
    if store and not os.path.isdir(store):
        raise CoefficientsError(f"{not_a('folder', Path(store))}; give a folder of fits")
    chosen = [("store", store), ("$CALIBRATE_FITS", os.environ.get("CALIBRATE_FITS"))]
    folders = [(origin, Path(folder)) for origin, folder in chosen if folder]
    return [*folders, ("./fits", Path("fits")), ("package", published_store())]


def stores(store: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that a reference is looked up in, first to last."""
    return [folder for _, folder in origins(store)]


def load(
    reference: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
    *,
    allow_unpinned: bool = False,
) -> Fit:
    """Loads a fit.

    Args:
      reference: "name" (its highest version), "name@3", or the path of a coefficient file or of a
        LoRA's folder; or an address with the digest of the file's bytes:
        "https://HOST/FILE#sha256:HEX" or "hf:ORG/NAME@REVISION#sha256:HEX".
      store: a folder to look in first; then $CALIBRATE_FITS, ./fits and the package's own fits.
      fingerprint: of the head that the fit is meant for.
      allow_unpinned: load an address without a digest, whatever lies there now.
    Returns:
      Fit, whose `.path` is the file that was read, and `.address` the pinned address.
    Raises:
      CoefficientsError: nothing has that reference, the file is damaged, cannot be fetched or has
        another digest, or the fit is for another head than `fingerprint`. There is no fallback.
    """
    if isinstance(reference, str) and _ADDRESS.match(reference):
        from calibrate.store.addresses import load_address  # loads urllib

        coefficients = load_address(reference, allow_unpinned)
    elif is_path(reference):
        path = Path(reference)
        coefficients = read(path / ADAPTER_FIT if path.is_dir() else path)
    else:
        coefficients = read_version(find(str(reference), store))
    if fingerprint is not None and coefficients.fingerprint != fingerprint:
        head = coefficients.source.get("head", "none in particular")
        raise CoefficientsError(
            f"{coefficients.reference} was made for head {head!r} ({coefficients.fingerprint}), "
            f"not for {fingerprint}; calibrate this head, or leave `fingerprint` out if you mean it"
        )
    return coefficients


def is_path(reference: str | os.PathLike[str]) -> bool:
    """True if a reference is the path or address of a file, not a name."""
    if not isinstance(reference, str | os.PathLike):
        raise CoefficientsError(f"{reference!r} is not a valid reference; use a name or a path")
    return not isinstance(reference, str) or "/" in reference or reference.endswith(".json")


def find(reference: str, store: str | os.PathLike[str] | None = None) -> Path:
    """The file of "name" (its highest version) or "name@3", in the first store that has the name.

    Raises:
      CoefficientsError: no store has the name, or that store lacks the version.
    """
    name, at, version = reference.partition("@")
    if not NAME_PATTERN.fullmatch(name) or (at and not _VERSION.fullmatch(version)):
        raise CoefficientsError(
            f"{reference!r} is not a valid reference; use NAME, NAME@VERSION or a path to a .json "
            "file"
        )
    files = find_name(name, store)
    path = files[-1].with_name(f"{version}.json") if at else files[-1]
    if path not in files:
        present = ", ".join(f"{name}@{file.stem}" for file in files[-8:])
        raise CoefficientsError(
            f"{reference!r} does not exist in {path.parent.absolute()}; the newest versions there: "
            f"{present}"
        )
    return path


def find_name(name: str, store: str | os.PathLike[str] | None = None) -> list[Path]:
    """The files of a name in the first store that has it, lowest version first."""
    searched = stores(store)
    for folder in searched:
        if files := files_of(folder, name):
            return files
    places = ", ".join(str(folder.absolute()) for folder in searched)
    raise CoefficientsError(f"no fit is named {name!r} in {places}; {_instead_of(name, searched)}")


def _instead_of(name: str, searched: list[Path]) -> str:
    """The reference that may have been meant, where no store has a name."""
    if os.path.isfile(f"{name}.json"):
        return f"for the file write ./{name}.json"
    if os.path.isdir(name):
        return f"the folder is ./{name}"
    known = {known for folder in searched for known in names(folder)}
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else "`calibrate fit` makes one"


def read_version(path: Path) -> Fit:
    """Reads STORE/NAME/VERSION.json; CoefficientsError if it has another name or version."""
    coefficients = read(path)
    if (coefficients.name, f"{coefficients.version}.json") != (path.parent.name, path.name):
        raise CoefficientsError(
            f"{path} is {coefficients.reference}; its path must have that name and version: "
            "restore the file, or load it by its path"
        )
    return coefficients


def files_of(store: Path, name: str) -> list[Path]:
    """The files of a name in one store, lowest version first."""
    return [store / name / f"{version}.json" for version in versions(store, name)]


def versions(store: Path, name: str) -> list[int]:
    """The versions of a name in one store, lowest first."""
    matches = map(_VERSION_FILE.fullmatch, _list_folder(store / name))
    return sorted(int(match[1]) for match in matches if match)


def names(store: Path) -> list[str]:
    """The names in one store."""
    entries = sorted(_list_folder(store))
    return [name for name in entries if NAME_PATTERN.fullmatch(name) and versions(store, name)]


def _list_folder(folder: Path) -> list[str]:
    """The names in a folder; empty if it is absent."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as failure:
        raise CoefficientsError(f"cannot read {folder}: {failure}") from failure
