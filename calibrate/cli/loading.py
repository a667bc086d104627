"""Loading what a command names: heads, logits, fits, collections, and models."""

import contextlib
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from calibrate.cli.options import Examples
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files import store as fit_store
from calibrate.files.coefficients import Coefficients
from calibrate.files.collection import kind_of, open_collection
from calibrate.files.examples import ExampleCollection
from calibrate.files.manifest import MANIFEST, MOST_MANIFEST_BYTES
from calibrate.files.npz import digest_of, read_bytes
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.model.collect_examples import Job
    from calibrate.rows.heads import Head
    from calibrate.rows.logits_files import Arrays


def load_head(reference: str | None) -> "Head":
    """Loads a head by name (max-retrieval if none), file or module:attribute."""
    from calibrate.rows.heads import load_head as load

    reference = reference or "max-retrieval"
    stderr.print(f"loading head {reference}")
    return load(reference)


def load_head_of(fit: Coefficients, reference: str | None) -> "Head":
    """Loads the head that a fit was made for, or the one that `reference` names.

    Raises:
      CalibrateError: the fit names no head, or was made for another one.
    """
    from calibrate.rows.heads import is_built_in

    name = reference or fit.source.get("head")
    if name is None:
        raise CalibrateError(
            f"{fit.reference} names no head; name the one to score: --head max-retrieval"
        )
    if not reference and not is_built_in(name):  # files record no local paths
        raise CalibrateError(
            f"{fit.reference} was made for head {name!r}, which does not come with the "
            "package; give its weights file or module:attribute with --head, or, if it was made "
            "from logits on disk, held-out logits with --logits FILE.npz"
        )
    head = load_head(name)
    if fit.fingerprint not in (None, head.fingerprint):
        raise CalibrateError(
            f"{fit.reference} was made for {fit.fingerprint}, and {head.name} is "
            f"{head.fingerprint}; give the head that it was made for, with --head"
        )
    return head


def read_logits(path: Path) -> "Arrays":
    """Opens logits on disk, with a line on stderr."""
    from calibrate.rows.logits_files import Arrays

    stderr.print(f"reading {path}")
    return Arrays(path)


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


def refuse_per_head(fit: Coefficients) -> None:
    """Raises CoefficientsError if a fit has an entry per head: no single head is scored with it."""
    try:
        assert fit.only
    except CoefficientsError as failure:
        raise CoefficientsError(
            f"{failure}, or score each head on logits on disk: --logits FILE.npz"
        ) from None


class FoundFit(NamedTuple):
    """A fit, and the folder of the collection that it was made of, if that is known."""

    fit: Coefficients
    run: Path | None


def find_fit(reference: str, store: Path | None) -> FoundFit:
    """A fit by reference, or the newest of a collection's folder.

    Raises:
      CalibrateError: there is no such fit, or the collection is damaged.
    """
    folder = Path(reference)
    if folder.is_dir() and (fit_store.is_path(reference) or (folder / MANIFEST).exists()):
        return FoundFit(_newest_fit_of(folder, store), folder)
    fit = fit_store.load(reference, store)
    return FoundFit(fit, collection_of(fit))


def collection_of(fit: Coefficients) -> Path | None:
    """The folder in ./runs of the collection that a fit was made of, if it is there."""
    for manifest in sorted(Path("runs").glob(f"*/{MANIFEST}")):
        with contextlib.suppress(CalibrateError):
            data = read_bytes(manifest, MOST_MANIFEST_BYTES)
            if digest_of(data) == fit.source.get("collection"):
                return manifest.parent
    return None


def _newest_fit_of(folder: Path, store: Path | None) -> Coefficients:
    """The newest published fit of a collection that is not yanked."""
    digest: str = open_collection(folder).digest
    fits = []
    for stored in (
        fit_store.open_name(place, name)
        for place in fit_store.stores(store)
        for name in fit_store.names(place)
    ):
        # The highest version of a name is the newest, independent of clocks.
        usable = set(stored.versions) - stored.state.yanked
        for version in sorted(usable, reverse=True):
            with contextlib.suppress(CoefficientsError):  # a damaged file is passed over
                fit = stored.read(version)
                if fit.source.get("collection") == digest:
                    fits.append(fit)
                    break
    if not fits:
        command = "calibrate model fit" if kind_of(folder) == "examples" else "calibrate fit"
        raise CalibrateError(
            f"{folder} has no published fit; make one with `{command} {folder} --name NAME` (if "
            "that refused, there is none)"
        )
    return max(fits, key=lambda fit: (fit.provenance.get("created", ""), fit.version))


def refuse_examples(run: Path, command: str) -> None:
    """Raises CalibrateError if a folder holds examples of a model, where rows are needed."""
    if kind_of(run) == "examples":
        raise CalibrateError(
            f"{run} holds examples of a model, not rows; use `calibrate model {command} {run}`"
        )


def open_run(run: Path, model: Path | None, device: str) -> "tuple[Job, ExampleCollection]":
    """A collection of examples with its model; `model` is None where the collection was made.

    Raises:
      CalibrateError: the collection is absent, unfinished or damaged, or the model is not its own.
    """
    if kind_of(run) != "examples":
        raise CalibrateError(
            f"{run} is not a collection of a model's examples; make one with `calibrate model "
            "collect`"
        )
    require_transformers(device)
    from calibrate.model.collect_examples import Job
    from calibrate.transformers.folders import ModelFolder

    collection = open_collection(run, ExampleCollection)
    folder = ModelFolder(model or collection.recorded_model())
    if folder.fingerprint() != collection.fingerprint:
        raise CalibrateError(
            f"{folder.path} is not the model that {run} was made with, or has changed since; give "
            "that one with --model, or collect again"
        )
    return Job(folder, collection.set, collection.manifest["configuration"], device), collection


def open_or_make(
    model: Path | None, examples: Examples, run: Path | None
) -> "tuple[Job, ExampleCollection | None]":
    """The examples of a collection, or examples made for a model; and the collection, if any."""
    if run is not None:
        return open_run(run, model, examples.device)
    assert model is not None
    return make_examples(model, examples), None


def make_examples(model: Path, examples: Examples) -> "Job":
    """Makes examples for a model, whose weights are not loaded."""
    wanted = examples.wanted()
    require_transformers(examples.device)
    from calibrate.model.collect_examples import plan

    stderr.print(f"making examples for {model}")
    job = plan(model, wanted, examples.dtype, examples.device)
    cells = Counter(job.examples.cells[example.cell] for example in job.examples.examples)
    few = [
        f"{n} windows of {cell.length:,} tokens"
        for cell, n in cells.items()
        if cell.text and n < wanted.count
    ]
    if few:
        stderr.print(
            f"{wanted.text} gives {', '.join(few)}, not {wanted.count}: a longer text gives more"
        )
    return job


def require_transformers(device: str = "cpu") -> None:
    """Raises CalibrateError if the extra is not installed, or PyTorch has no such device."""
    try:
        import torch

        import calibrate.transformers  # noqa: F401
    except ImportError as failure:
        raise CalibrateError(str(failure)) from None
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as failure:
        reason = textwrap.shorten(str(failure), 100, placeholder=" ...")
        raise CalibrateError(f"--device {device} cannot be used: {reason}; give cpu") from None
