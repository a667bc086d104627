"""Loading what a command names: heads, fits, and the collection that a fit was made from."""

import contextlib
from pathlib import Path

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files import store as fit_store
from calibrate.files.coefficients import Coefficients
from calibrate.files.collection import kind_of, open_collection
from calibrate.files.examples import ExampleCollection
from calibrate.files.manifest import MANIFEST, Collection
from calibrate.files.rows import RowCollection
from calibrate.report.streams import stderr
from calibrate.rows.heads import Head, is_built_in
from calibrate.rows.heads import load_head as load_head_quietly


def load_head(reference: str) -> Head:
    """Loads a head by name, file or module:attribute, with a line on stderr."""
    stderr.print(f"loading head {reference}")
    return load_head_quietly(reference)


def head_of_fit(coefficients: Coefficients, reference: str | None) -> Head:
    """Loads the head that a fit was made for, or the one that `reference` names.

    Raises:
      CalibrateError: the fit names no head, or was made for another one.
    """
    name = reference or coefficients.source.get("head")
    if name is None:
        raise CalibrateError(
            f"{coefficients.reference} names no head; name the one to score: --head max-retrieval"
        )
    if not reference and not is_built_in(name):  # files record no local paths
        raise CalibrateError(
            f"{coefficients.reference} was made for head {name!r}, which does not come with the "
            "package; give its weights file or module:attribute with --head, or, if it was made "
            "from logits on disk, held-out logits with --logits FILE.npz"
        )
    head = load_head(name)
    if coefficients.fingerprint not in (None, head.fingerprint):
        raise CalibrateError(
            f"{coefficients.reference} was made for {coefficients.fingerprint}, and {head.name} "
            f"is {head.fingerprint}; give the head that it was made for, with --head"
        )
    return head


def load_fits(references: str, store: Path | None) -> dict[str, Coefficients]:
    """Loads the fits of "REF,...", each file once, by NAME@VERSION: no built-in rule has an @.

    Raises:
      CoefficientsError: there is no such fit.
    """
    fits: dict[str, Coefficients] = {}
    for reference in filter(None, map(str.strip, references.split(","))):
        fit = fit_store.load(reference, store)
        if any(fit.path == other.path for other in fits.values()):
            continue
        fits[fit.reference if fit.reference not in fits else f"{reference}@"] = fit
    return fits


def refuse_per_head(coefficients: Coefficients) -> None:
    """Raises CoefficientsError if a fit has an entry per head: no single head is scored with it."""
    try:
        assert coefficients.only
    except CoefficientsError as failure:
        raise CoefficientsError(
            f"{failure}, or score each head on logits on disk: --logits FILE.npz"
        ) from None


def find_fit(reference: str, store: Path | None) -> tuple[Coefficients, RowCollection | None]:
    """A fit by reference, or that of a collection's folder; and its collection, if in ./runs.

    Raises:
      CalibrateError: there is no such fit, or the collection is damaged.
    """
    folder = Path(reference)
    if folder.is_dir() and (fit_store.is_path(reference) or (folder / MANIFEST).exists()):
        collection = open_collection(folder, RowCollection)
        return _newest_fit_of(collection, store), collection
    coefficients = fit_store.load(reference, store)
    return coefficients, _collection_of(coefficients)


def made_through_model(reference: str, store: Path | None) -> bool:
    """Whether a fit, or that of a collection's folder, was made through a whole model."""
    folder = Path(reference)
    if folder.is_dir() and (fit_store.is_path(reference) or (folder / MANIFEST).exists()):
        return kind_of(folder) == "examples"
    return fit_store.load(reference, store).of_whole_model


def find_model_fit(reference: str, store: Path | None) -> tuple[Coefficients, Path | None]:
    """A fit by reference, or that of a collection of examples; and its collection, if in ./runs.

    Raises:
      CalibrateError: there is no such fit, or the collection is damaged.
    """
    folder = Path(reference)
    if kind_of(folder) == "examples":
        return _newest_fit_of(open_collection(folder, ExampleCollection), store), folder
    fit = fit_store.load(reference, store)
    return fit, examples_of(fit)


def examples_of(fit: Coefficients) -> Path | None:
    """The folder in ./runs of the collection of examples that a fit was made of, if it is there."""
    for manifest in sorted(Path("runs").glob(f"*/{MANIFEST}")):
        with contextlib.suppress(CalibrateError):
            collection = open_collection(manifest.parent, ExampleCollection)
            if collection.digest == fit.source.get("collection"):
                return manifest.parent
    return None


def _newest_fit_of(collection: Collection, store: Path | None) -> Coefficients:
    """The newest published fit of a collection that is not yanked."""
    fits = []
    folders = fit_store.stores(store)
    for stored in (
        fit_store.open_name(folder, name) for folder in folders for name in fit_store.names(folder)
    ):
        # Of one name the highest version is the newest, independent of clocks.
        usable = set(stored.versions) - stored.state.yanked
        for version in sorted(usable, reverse=True):
            with contextlib.suppress(CoefficientsError):  # a damaged file is passed over
                fit = stored.read(version)
                if fit.source.get("collection") == collection.digest:
                    fits.append(fit)
                    break
    if not fits:
        raise CalibrateError(
            f"{collection.folder} has no published fit; make one with "
            f"`calibrate fit {collection.folder} --name NAME` (if that refused, there is none)"
        )
    return max(fits, key=lambda fit: (fit.provenance.get("created", ""), fit.version))


def _collection_of(coefficients: Coefficients) -> RowCollection | None:
    for manifest in sorted(Path("runs").glob(f"*/{MANIFEST}")):
        with contextlib.suppress(CalibrateError):
            collection = open_collection(manifest.parent, RowCollection)
            if collection.digest == coefficients.source.get("collection"):
                return collection
    return None
