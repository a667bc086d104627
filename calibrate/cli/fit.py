"""`calibrate fit`: fit a temperature rule to the rows of a head or heads, and publish it."""

from contextlib import nullcontext
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Context, Option

from calibrate.cli.options import (
    AsJson,
    Dask,
    FitName,
    Loss,
    MinBeta,
    MinEntropy,
    Paper,
    Processes,
    Q,
    RowsToFit,
    RuleKind,
    Store,
    Timeout,
    check_rule,
    given,
)
from calibrate.cli.progress_bar import Steps
from calibrate.defaults import MIN_BETA_LIMIT, NLL_TOLERANCE, TIMEOUT
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs
from calibrate.report.streams import stderr
from calibrate.report.terminal import show
from calibrate.store.coefficients import Coefficients

if TYPE_CHECKING:
    from calibrate.datasets.row_collection import RowCollection
    from calibrate.fitting.fit_result import FitResult
    from calibrate.fitting.options import Options
    from calibrate.report.fit_record import FitRecord
    from calibrate.rows.heads import Head


def fit(
    ctx: Context,
    run: Annotated[Path, Argument(help="Folder of a collection of rows.")],
    *,
    head: Annotated[
        str | None, Option(help="Head to tune q for, module:attribute [default: the built-in]")
    ] = None,
    name: FitName,
    kind: RuleKind = "auto",
    loss: Loss = "likelihood",
    paper: Paper = False,
    rows: RowsToFit = None,
    q: Q = None,
    min_entropy: MinEntropy = 0.0,
    min_beta: MinBeta = None,
    trained_up_to: Annotated[
        int | None, Option(min=0, help="Largest trained size [default: the head's own]")
    ] = None,
    tolerance: Annotated[
        float, Option(min=0, help="NLL in nats that may be lost up to --trained-up-to.")
    ] = NLL_TOLERANCE,
    allow_partial: Annotated[
        bool, Option("--allow-partial", help="Fit an unfinished collection.")
    ] = False,
    jobs: Processes = 1,
    dask: Dask = None,
    timeout: Timeout = TIMEOUT,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Fit a temperature rule to the rows of a head, and publish it.

    Kinds of rule are compared by cross-validation: a constant, kappa log n + b, a degree-4
    polynomial of entropy, and one of entropy and size. The simplest that is not significantly worse
    than the best is published as the next version of NAME. If no rule is significantly better than
    the baseline, nothing is published (exit code 3). If rows name a layer and head, each head that
    gains gets an entry.

    Example: calibrate fit runs/try --name try
    """
    if {"head", "q"} <= given(ctx):
        raise BadParameter("--head chooses q, and cannot be used with --q")
    check_rule(ctx, kind, loss, "trained_up_to", "tolerance", "head")
    from calibrate.fitting.fit_collection import check_no_head, open_for_fit
    from calibrate.store.publishing import check_store

    collection = open_for_fit(run, allow_partial)
    check_store(store)
    check_no_head(collection, head)
    limit = {"trained_up_to": trained_up_to, "tolerance": tolerance}
    rule = {"rows": rows, "min_entropy": min_entropy, "q": q, "loss": loss}
    options = fit_options(collection, paper, kind, min_beta, **rule, **limit)
    tuned = _head_to_tune_for(collection, head, name) if options.tunes_q else None
    result = fit_rows(collection, name, options, tuned, Jobs(jobs, dask, timeout))
    show(published_record(result, store), as_json)


def fit_options(
    collection: "RowCollection", paper: bool, kind: str, min_beta: float | None, **others: Any
) -> "Options":
    """The options of a fit to a collection, from those of the command line."""
    from calibrate.fitting.options import Options

    if paper:
        return Options.of_the_paper()
    is_of_arrays = collection.configuration.get("of") == "logits" and not collection.heads
    least = MIN_BETA_LIMIT if is_of_arrays else 1.0  # heads go below 1 by --min-beta alone
    return Options(kind=None if kind == "auto" else kind, min_beta=min_beta or least, **others)


def fit_rows(
    collection: "RowCollection",
    name: str,
    options: "Options",
    head: "Head | None",
    jobs: Jobs = ONE_PROCESS,
) -> "FitResult":
    """Fits a rule to the rows of a head, or of each head that they name; publishes nothing."""
    from calibrate.fitting.fit_collection import fit_collection

    which = f"the {len(collection.heads)} heads of " if collection.heads else ""
    stderr.print(f"solving and fitting {which}{collection.folder}")
    progress = Steps() if collection.heads else nullcontext(SILENT)  # one head has no steps
    with progress as steps:
        return fit_collection(collection, name, options, jobs, head, steps)


def _head_to_tune_for(
    collection: "RowCollection", reference: str | None, name: str
) -> "Head | None":
    """The head that was asked for, or the built-in one that the collection was made of."""
    from calibrate.cli.loading import load_named

    if collection.heads and reference is None:
        return None
    head = load_named(reference, collection.configuration["head"])
    if head is not None and (reference or head.fingerprint == collection.fingerprint):
        return head
    if collection.configuration.get("of") != "logits":
        known = collection.recorded_head() or "MODULE:ATTRIBUTE"
        words = ["calibrate", "fit", str(collection.folder), "--name", name, "--head", known]
        stderr.print(
            f"q = 0 (maximum likelihood); to tune q for the accuracy of the head: {join(words)}"
        )
    return None


def published_record(fit: "FitResult", store: Path | None) -> "FitRecord":
    """Publishes a fit; of a head that was scored, its verdict has the metrics on its sets."""
    from calibrate.report.before_after import with_metrics
    from calibrate.report.fit_record import FitRecord

    coefficients = fit.coefficients
    if fit.selection is not None:
        coefficients = with_metrics(coefficients, fit.selection)
    return FitRecord(publish_fit(coefficients, store), fit.heads)


def publish_fit(fit: Coefficients, store: Path | None) -> Coefficients:
    """Publishes a fit; it is returned as it is in the store."""
    from calibrate.store.publishing import publish, writing_store

    published, written = publish(fit, writing_store(store))
    if not written:
        stderr.print(f"{published.reference} is unchanged; no new version is written")
    return published
