"""References NAME@VERSION of fits: the stores that are searched, and the names and versions there.

A store is a folder of NAME/VERSION.json. A reference is looked up in several stores in order: the
one given, $CALIBRATE_FITS, ./fits, and the fits of the package; the first with the name decides.
"""

import os
import re
from pathlib import Path

from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import not_a

PUBLISHED = "published_fits"  # the folder inside an installed package
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_VERSION_FILE = re.compile(rf"({_VERSION.pattern})\.json")


def find(reference: str, store: str | os.PathLike[str] | None = None) -> Path:
    """The file of "name" (its highest version) or "name@3", in the first store that has the name.

    Raises:
      CoefficientsError: no store has the name, or that store lacks the version.
    """
    name, separator, version = reference.partition("@")
    if not _NAME.fullmatch(name) or (separator and not _VERSION.fullmatch(version)):
        raise CoefficientsError(
            f"{reference!r} is not a valid reference; use NAME, NAME@VERSION or a path to a .json "
            "file"
        )
    files = find_name(name, store)
    path = files[-1].with_name(f"{version}.json") if separator else files[-1]
    if path not in files:
        present = ", ".join(f"{name}@{file.stem}" for file in files[-8:])
        raise CoefficientsError(
            f"{reference!r} does not exist in {path.parent.absolute()}; the newest versions there: "
            f"{present}"
        )
    return path


def find_name(name: str, store: str | os.PathLike[str] | None = None) -> list[Path]:
    """The files of a name in the first store that has it, lowest version first.

    Raises:
      CoefficientsError: no store has the name.
    """
    searched = [folder for _, folder in list_places(store)]
    for folder in searched:
        if files := list_files(folder, name):
            return files
    places = ", ".join(str(folder.absolute()) for folder in searched)
    raise CoefficientsError(
        f"no fit is named {name!r} in {places}; `calibrate fits list` lists them, and "
        f"./{name}.json is the path of a file"
    )


def list_places(store: str | os.PathLike[str] | None = None) -> list[tuple[str, Path]]:
    """The folders that a reference is looked up in, first to last, each after how it was chosen.

    Raises:
      CoefficientsError: `store` is given and is not a folder; the others need not exist yet.
    """
    if store and not os.path.isdir(store):
        raise CoefficientsError(f"{not_a('folder', Path(store))}; give a folder of fits")
    chosen = [("store", store), ("$CALIBRATE_FITS", os.environ.get("CALIBRATE_FITS"))]
    folders = [(origin, Path(folder)) for origin, folder in chosen if folder]
    return [*folders, ("./fits", Path("fits")), ("package", published_store())]


def list_names(store: Path) -> list[str]:
    """The names in one store."""
    names = sorted(_list_folder(store))
    return [name for name in names if _NAME.fullmatch(name) and list_versions(store, name)]


def list_versions(store: Path, name: str) -> list[int]:
    """The versions of a name in one store, lowest first."""
    matches = map(_VERSION_FILE.fullmatch, _list_folder(store / name))
    return sorted(int(match[1]) for match in matches if match)


def list_files(store: Path, name: str) -> list[Path]:
    """The files of a name in one store, lowest version first."""
    return [store / name / f"{version}.json" for version in list_versions(store, name)]


def _list_folder(folder: Path) -> list[str]:
    """The names in a folder; empty if it is absent."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as failure:
        raise CoefficientsError(f"cannot read {folder}: {failure}") from failure


def check_name(name: str) -> None:
    """Raises CoefficientsError unless it is a valid name of a fit in a store."""
    is_name = isinstance(name, str) and _NAME.fullmatch(name)
    if not is_name or name.endswith(".json"):
        raise CoefficientsError(
            f"{name!r} is not a valid fit name; use lower-case letters, digits, '.', '_' and '-', "
            "at most 64, the first a letter or digit, and no .json at the end"
        )


def published_store() -> Path:
    """The package's own fits: inside the package in a wheel, beside it in the repository."""
    package = Path(__file__).resolve().parents[1]
    inside = package / PUBLISHED
    return inside if os.path.isdir(inside) else package.parent / "fits"
