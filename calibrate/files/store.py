"""The fits store: references resolved, new versions published.

A store is a folder of NAME/VERSION.json. Reading looks through the stores in order: the one given,
$CALIBRATE_FITS, ./fits, and the fits published with the package; the first that holds the name
decides. Versions are integers, immutable and never overwritten.
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from calibrate.errors import CoefficientsError
from calibrate.files.coefficient_file import NAME_PATTERN, dumps, read
from calibrate.files.coefficients import Coefficients
from calibrate.files.whole import write_whole

_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_VERSION_FILE = re.compile(rf"({_VERSION.pattern})\.json")


def published_store() -> Path:
    """The package's own fits: inside the package in a wheel, beside it in the repository."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "published_fits"
    return inside if inside.is_dir() else package.parent / "fits"


def stores(store: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that a reference is looked up in, first to last."""
    chosen = [store, os.environ.get("CALIBRATE_FITS"), "fits"]
    return [Path(folder) for folder in chosen if folder] + [published_store()]


def writing_store(store: str | os.PathLike[str] | None = None) -> Path:
    """The folder that new fits go to: the one given, $CALIBRATE_FITS, or ./fits."""
    return stores(store)[0]


def load(reference: str | os.PathLike[str], store=None) -> Coefficients:
    """Loads a fit.

    Args:
      reference: "name" (its highest version), "name@3", or the path of a coefficient file.
      store: a folder to look in first; then $CALIBRATE_FITS, ./fits and the package's own fits.
    Returns:
      Coefficients, whose `.path` is the file that was read.
    Raises:
      CoefficientsError: nothing has that reference, or the file is damaged. There is no fallback.
    """
    if not isinstance(reference, str) or "/" in reference or reference.endswith(".json"):
        return read(Path(reference))
    name, at, version = reference.partition("@")
    if not NAME_PATTERN.fullmatch(name) or (at and not _VERSION.fullmatch(version)):
        raise CoefficientsError(
            f"{reference!r} is no reference; use NAME, NAME@VERSION or a path to a .json file"
        )
    searched = stores(store)
    for folder in searched:
        present = versions(folder, name)
        if present:
            break
    else:
        places = ", ".join(str(place) for place in searched)
        raise CoefficientsError(f"no fit is named {name!r} in {places}; `calibrate fit` makes one")
    number = int(version) if version else present[-1]
    if number not in present:
        raise CoefficientsError(
            f"{reference!r} does not exist in {folder / name}; it has versions "
            + ", ".join(map(str, present))
        )
    return _read_version(folder / name, number)


def versions(store: Path, name: str) -> list[int]:
    """The versions of a name in one store, lowest first."""
    try:
        found = [_VERSION_FILE.fullmatch(entry) for entry in os.listdir(store / name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as failure:
        raise CoefficientsError(f"cannot read {store / name}: {failure.strerror}") from failure
    return sorted(int(match[1]) for match in found if match)


def check_name(name: str) -> None:
    """Raises CoefficientsError unless a store can hold a fit of that name."""
    if not NAME_PATTERN.fullmatch(name) or name.endswith(".json"):
        raise CoefficientsError(
            f"{name!r} is no name for a fit; use lower-case letters, digits, '.', '_' and '-', "
            "at most 64, the first a letter or digit, and no .json at the end"
        )


def publish(
    coefficients: Coefficients,
    store: Path,
    unchanged: Callable[[Coefficients, Coefficients], bool] = lambda newest, new: False,
) -> tuple[Coefficients, bool]:
    """Writes a fit as the next version of its name.

    Args:
      unchanged: (newest, new) -> whether the new fit says nothing that the newest does not.
    Returns:
      (the fit with its version and path, whether a file was written); the newest version as it
      stands if it is `unchanged`.
    Raises:
      CoefficientsError: a name that the store cannot hold, or a disk that cannot be written.
    """
    name = coefficients.name
    check_name(name)
    while True:
        present = versions(store, name)
        if present:
            newest = _read_version(store / name, present[-1])
            if unchanged(newest, coefficients):
                return newest, False
        number = present[-1] + 1 if present else 1
        path = store / name / f"{number}.json"
        numbered = replace(coefficients, version=number, path=path)
        try:
            write_whole(path, dumps(numbered).encode(), CoefficientsError, exclusive=True)
        except FileExistsError:
            continue  # another writer took the number
        return numbered, True


def _read_version(folder: Path, number: int) -> Coefficients:
    coefficients = read(folder / f"{number}.json")
    if (coefficients.name, coefficients.version) != (folder.name, number):
        raise CoefficientsError(
            f"{coefficients.path} says that it is {coefficients.reference}; "
            "files of a store keep their place, restore it"
        )
    return coefficients
