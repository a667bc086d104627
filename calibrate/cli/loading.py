"""Loads what a command names: heads, logits, fits, collections, and models."""

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.prompts.examples import ExampleCollection
from calibrate.report.terminal import stderr
from calibrate.rows.collection import open_collection
from calibrate.rows.manifest import MANIFEST
from calibrate.storage.fingerprints import sha256_of
from calibrate.store.fit import Fit
from calibrate.store.loading import load as load_fit

if TYPE_CHECKING:
    from calibrate.model.collect_examples import Job
    from calibrate.rows.heads import Head
    from calibrate.rows.logits_files import Arrays

ANY_HEAD = "MODULE:ATTRIBUTE"


def open_head(reference: str | None) -> "Head":
    """Loads a head by name (max-retrieval if None), file or module:attribute."""
    from calibrate.rows.heads import load_head

    reference = reference or "max-retrieval"
    stderr.print(f"loading head {reference}")
    return load_head(reference)


def load_head_of_fit(fit: Fit, reference: str | None) -> "Head":
    """Loads the head that `reference` names, or the built-in head of a fit.

    A file never chooses code to run: the user must name heads that are not the package's.

    Raises:
      CalibrateError: the fit names no head of the package, or is for another head.
    """
    from calibrate.rows.heads import is_built_in

    name = reference or fit.source.get("head")
    if not name or not (reference or is_built_in(name)):
        raise CalibrateError(
            f"{fit.reference} was made for no head that comes with the package; name its head with "
            f"--head {ANY_HEAD} (no file chooses code to run), or give held-out logits "
            "with --logits FILE.npz"
        )
    head = open_head(name)
    if fit.fingerprint not in (None, head.fingerprint):
        raise CalibrateError(
            f"{fit.reference} was made for {fit.fingerprint}, and {head.name} is "
            f"{head.fingerprint}; give the head that it was made for, with --head"
        )
    return head


def open_logits(path: Path) -> "Arrays":
    """Opens logits on disk."""
    from calibrate.rows.logits_files import Arrays

    stderr.print(f"reading {path}")
    return Arrays.read(path)


def load_fits(references: Iterable[str], store: Path | None) -> dict[str, Fit]:
    """Loads fits, by NAME@VERSION; the names of baselines have no @.

    Raises:
      CoefficientsError: a fit does not exist, or two files have the same name and version.
    """
    fits: dict[str, Fit] = {}
    for reference in references:
        fit = load_fit(reference, store)
        if fits.setdefault(fit.reference, fit).place != fit.place:
            raise CoefficientsError(f"two fits are {fit.reference}; score them one by one")
    return fits


def collection_of(fit: Fit) -> Path | None:
    """The folder of the collection of a fit, if it is in ./runs."""
    for manifest in sorted(Path("runs").glob(f"*/{MANIFEST}")):
        if sha256_of(manifest.read_bytes()) == fit.source.get("collection"):
            return manifest.parent
    return None


def open_model_run(run: Path, model: Path | None, device: str) -> "tuple[Job, ExampleCollection]":
    """Opens a collection of examples with its model, by default the folder that it records.

    Raises:
      CalibrateError: the collection is absent, unfinished or damaged, or of another model.
    """
    collection = open_collection(run, ExampleCollection)
    require_transformers(device)
    from calibrate.model.collect_examples import Job
    from calibrate.transformers.folders import ModelFolder

    folder = ModelFolder(model or collection.recorded_model())
    if folder.fingerprint() != collection.fingerprint:
        raise CalibrateError(
            f"{folder.path} is not the model that {run} was made with, or has changed since; give "
            "that one with --model, or collect again"
        )
    return Job(folder, collection.set, collection.manifest["configuration"], device), collection


def require_transformers(device: str = "cpu") -> None:
    """Raises CalibrateError if Transformers is not installed, or PyTorch has no such device."""
    try:
        import calibrate.transformers  # noqa: F401
    except ImportError as failure:  # it names the extra
        raise CalibrateError(str(failure)) from None
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as failure:
        reason = textwrap.shorten(str(failure), 100, placeholder=" ...")
        raise CalibrateError(f"--device {device} cannot be used: {reason}; give cpu") from None
