"""Collecting the examples of a model and the first look at it, with progress on stderr."""

import contextlib
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.cli.diagnose import diagnosis_folder
from calibrate.cli.model_options import Source
from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError
from calibrate.files import examples as files
from calibrate.files.atomic_io import check_writable
from calibrate.files.collection import discard_collection, open_collection
from calibrate.files.examples import ExampleSet
from calibrate.files.publishing import check_store
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.export.proof import Exportable
    from calibrate.model.collect_examples import Job
    from calibrate.model.prompts import Wanted
    from calibrate.report.first_look_record import FirstLookRecord
    from calibrate.report.fit_record import FitRecord
    from calibrate.transformers.folders import ModelFolder


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


def collect_from_model(source: Source, out: Path | None, *, fresh: bool) -> files.ExampleCollection:
    """Makes the examples and scores them; the default folder is runs/NAME."""
    job, _ = job_of(source)
    from calibrate.model.collect_examples import collect_examples

    folder = out or Path("runs") / job.folder.name
    if fresh:
        discard_collection(folder)
    with model_progress("scoring", job.examples, job.examples.units(files.UNIT_TOKENS)) as steps:
        collection = collect_examples(
            job, folder, lambda tokens, resumed: steps.advance(work=tokens, resumed=resumed)
        )
    if not steps.done:
        stderr.print(f"{folder} is already complete")
    return collection


def _say_few_windows(job: "Job", wanted: "Wanted") -> None:
    """Says at which lengths the text has fewer windows than are wanted."""
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


def look_at_model(source: Source, out: Path | None) -> "FirstLookRecord":
    """The first look at a model, by a collection of examples or by examples made for it.

    Raises:
      CalibrateError: the model is not that of the collection, or cannot be found.
    """
    job, collection = job_of(source)
    from calibrate.model.first_look import derivatives, first_look
    from calibrate.report.first_look_record import RECORD, save_first_look

    folder = diagnosis_folder(source.run or Path("runs") / job.folder.name, out, source.run)
    check_writable(folder / RECORD)
    stderr.print(f"loading {job.folder.path}")
    loaded = job.folder.load(job.dtype, source.device)
    everything = [range(len(job.examples.examples))]
    with model_progress("differentiating", job.examples, everything) as steps:
        found = derivatives(loaded, job.examples, lambda tokens: steps.advance(work=tokens))
    look = first_look(found, job.examples)
    fingerprint = job.configuration["fingerprint"]
    digest = collection.digest if collection else None
    return save_first_look(folder, look, job.folder.name, fingerprint, digest)


@dataclass(frozen=True)
class ModelFitRequest:
    """What `calibrate fit` is asked for of a collection of examples."""

    run: Path
    name: str
    model: Path | None  # None: where the collection was made
    device: str
    kind: str | None = None
    trained_up_to: int | None = None
    allowed_loss: float = 0.005
    steps: int = 100
    seed: int = 0
    for_export: bool = False
    store: Path | None = None
    figure: Path | None = None


def fit_model_and_publish(request: ModelFitRequest) -> "FitRecord":
    """Fits the heads of a collection's model through the model, and publishes the fit.

    Raises:
      CalibrateError: the model is not that of the collection, or cannot be found; and what
        `fit_through` raises.
    """
    job, collection = job_of(Source(request.run, request.model, None, device=request.device))
    assert collection is not None
    check_store(request.store)
    from calibrate.cli.fit_steps import draw_fit, publish_fit
    from calibrate.model.fit import fit_through
    from calibrate.model.passes import batch_tokens
    from calibrate.model.problem import ModelOptions
    from calibrate.report.collection_record import nearly_none_right
    from calibrate.report.fit_record import through_model
    from calibrate.report.model_plots import save_head_betas

    options = ModelOptions(
        request.kind, request.trained_up_to, request.allowed_loss, request.steps, request.seed,
        _engines(job.folder) if request.for_export else None,
    )  # fmt: skip
    if warning := nearly_none_right(collection):
        stderr.print(warning)
    stderr.print(f"fitting the heads of {job.folder.path} through the model")
    with _scores_if_refused(), Steps("loading the model", 1, at_most=True) as steps:

        def begin(what: str, passes: list[list[int]]) -> None:
            work = [n for which in passes for n in batch_tokens(collection.set.examples, which)]
            steps.begin(what, len(work), sum(work))

        fit = fit_through(
            lambda: job.folder.load(job.dtype, request.device), collection, request.name, options,
            lambda tokens, resumed: steps.advance(work=tokens, resumed=resumed), begin,
            lambda found: stderr.print(
                f"{found.form.label}: {found.value.gain:+.3f} nats on examples that choose"
            ),
        )  # fmt: skip
    coefficients, written = publish_fit(fit.coefficients, request.store)
    n = round(math.exp(fit.published.form.center))
    figure = draw_fit(
        coefficients, written, request.figure,
        lambda path: save_head_betas(path, coefficients, n, fit.heads),
    )  # fmt: skip
    return through_model(fit, coefficients, figure)


@contextlib.contextmanager
def _scores_if_refused() -> Iterator[None]:
    """Prints of a refused fit what is known at each length."""
    from calibrate.model.fit import NotWorthItError
    from calibrate.report.scores_record import ScoresRecord
    from calibrate.report.terminal import as_text

    try:
        yield
    except NotWorthItError as failure:
        tables = ScoresRecord(failure.evidence).tables()
        stderr.print("\n".join(as_text(table) for table in tables if not table.detail))
        raise


def _engines(folder: "ModelFolder") -> "Exportable":
    """What engines run of a model, and on stderr what they do not."""
    from calibrate.export.plan import HEAD
    from calibrate.export.proof import exportable

    stderr.print(f"trying exports of a small copy of {folder.path}")
    found = exportable(folder)
    if found.factors != HEAD:
        stderr.print(f"for export, rules are for {found.factors}: heads share what is scaled")
    if found.no_size:
        stderr.print(f"for export, no rules by log n: {found.no_size}")
    return found


def job_of(source: Source) -> "tuple[Job, files.ExampleCollection | None]":
    """Examples with their model, and the collection that they are of, if any.

    Raises:
      CalibrateError: the collection is incomplete or damaged, or the model is not its own.
    """
    require_transformers(source.device)
    from calibrate.model.collect_examples import Job, plan
    from calibrate.transformers.folders import ModelFolder

    if source.run is None:
        assert source.model is not None
        assert source.wanted is not None
        stderr.print(f"making examples for {source.model}")
        job = plan(source.model, source.wanted, source.dtype, source.device)
        _say_few_windows(job, source.wanted)
        return job, None
    collection = open_collection(source.run, files.ExampleCollection)
    folder = ModelFolder(source.model or collection.recorded_model())
    if folder.fingerprint() != collection.fingerprint:
        raise CalibrateError(
            f"{folder.path} is not the model that {source.run} was made with, or has changed "
            "since; give that one with --model, or collect again"
        )
    configuration = collection.manifest["configuration"]
    return Job(folder, collection.set, configuration, source.device), collection


def model_progress(title: str, examples: ExampleSet, units: Sequence[Sequence[int]]) -> Steps:
    """A step for each batch of each unit of work, of as much work as it has tokens."""
    from calibrate.model.passes import batches

    n_batches = sum(len(batches(examples.examples, unit)) for unit in units)
    n_tokens = sum(len(examples.examples[i].tokens) for unit in units for i in unit)
    return Steps(title, n_batches, n_tokens)
