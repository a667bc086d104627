"""`calibrate fit`: fit a temperature rule to the rows of a head or heads, and publish it."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from calibrate.cli.options import FitName, RuleOptions, Store, Workers
from calibrate.cli.progress_bar import Steps
from calibrate.cli.request import Request
from calibrate.defaults import MIN_BETA_LIMIT, NLL_TOLERANCE
from calibrate.parallel import SILENT
from calibrate.report.streams import stderr
from calibrate.store.coefficients import Coefficients

if TYPE_CHECKING:
    from calibrate.datasets.row_collection import RowCollection
    from calibrate.fitting.fit_result import FitResult
    from calibrate.fitting.options import Options
    from calibrate.report.fit_record import FitRecord
    from calibrate.rows.heads import Head


@dataclass(frozen=True)
class FitRequest(Request, Workers, RuleOptions):
    run: Annotated[Path, Argument(help="Folder of a collection of rows.")]
    name: FitName
    head: Annotated[
        str | None,
        Option(help="Head to tune q for, module:attribute [default: the built-in]"),
    ] = None
    trained_up_to: Annotated[
        int | None,
        Option(min=0, help="Largest trained size [default: the head's own]"),
    ] = None
    tolerance: Annotated[
        float,
        Option(min=0, help="NLL in nats that may be lost up to --trained-up-to."),
    ] = NLL_TOLERANCE
    allow_partial: Annotated[
        bool, Option("--allow-partial", help="Fit an unfinished collection.")
    ] = False
    store: Store = None

    def __post_init__(self) -> None:
        """Checks that nothing is given that would be ignored."""
        if self.head is not None and self.q is not None:
            raise BadParameter("--head chooses q, and cannot be used with --q")
        tolerance = None if self.tolerance == FitRequest.tolerance else self.tolerance
        self.check_rule(trained_up_to=self.trained_up_to, head=self.head, tolerance=tolerance)


def fit(request: FitRequest) -> "FitRecord":
    """Fit a temperature rule to the rows of a head, and publish it.

    Kinds of rule are compared by cross-validation: a constant, kappa log n + b, a degree-4
    polynomial of entropy, and one of entropy and size. The simplest that is not significantly worse
    than the best is published as the next version of NAME. If no rule is significantly better than
    the baseline, nothing is published (exit code 3). If rows name a layer and head, each head that
    gains gets an entry.

    Example: calibrate fit runs/try --name try
    """
    from calibrate.fitting.fit_collection import open_for_fit
    from calibrate.store.publishing import check_store

    collection = open_for_fit(request.run, request.allow_partial)
    check_store(request.store)
    return published_record(fit_rows(collection, request), request.store)


def fit_rows(
    collection: "RowCollection", request: FitRequest, head: "Head | None" = None
) -> "FitResult":
    """Fits the head that the request may name, or each head of the rows; publishes nothing."""
    from calibrate.fitting.fit_collection import check_no_head, fit_collection

    check_no_head(collection, request.head)
    options = _options(collection, request)
    if head is None and options.tunes_q:
        head = _head_of(collection, request)
    which = f"the {len(collection.heads)} heads of " if collection.heads else ""
    stderr.print(f"solving and fitting {which}{collection.folder}")
    # Work on one head has no steps, after which an interrupt would take effect.
    progress = Steps() if collection.heads else nullcontext(SILENT)
    with progress as steps:
        return fit_collection(collection, request.name, options, request.workers, head, steps)


def published_record(fit: "FitResult", store: Path | None) -> "FitRecord":
    """Publishes a fit; of a head that was scored, its verdict has the metrics on its sets."""
    from calibrate.report.before_after import with_metrics
    from calibrate.report.fit_record import FitRecord

    coefficients = fit.coefficients
    if fit.selection is not None:
        coefficients = with_metrics(coefficients, fit.selection)
    return FitRecord(publish_fit(coefficients, store), fit.heads)


def _head_of(collection: "RowCollection", request: FitRequest) -> "Head | None":
    """The head that was asked for, or the built-in one that the collection was made of."""
    from calibrate.cli.loading import load_named

    if collection.heads and request.head is None:
        return None
    head = load_named(request.head, collection.configuration["head"])
    if head is not None and (request.head or head.fingerprint == collection.fingerprint):
        return head
    if collection.configuration.get("of") != "logits":
        known = collection.recorded_head() or "MODULE:ATTRIBUTE"
        words = ["calibrate", "fit", str(request.run), "--name", request.name, "--head", known]
        stderr.print(
            f"q = 0 (maximum likelihood); to tune q for the accuracy of the head: {join(words)}"
        )
    return None


def _options(collection: "RowCollection", request: FitRequest) -> "Options":
    from calibrate.fitting.options import Options

    if request.paper:
        return Options.of_the_paper()
    is_of_arrays = collection.configuration.get("of") == "logits" and not collection.heads
    least = MIN_BETA_LIMIT if is_of_arrays else 1.0  # heads go below 1 by --min-beta alone
    return Options(
        request.rows,
        request.min_entropy,
        q=request.q,
        trained_up_to=request.trained_up_to,
        tolerance=request.tolerance,
        kind=None if request.kind == "auto" else request.kind,
        min_beta=request.min_beta or least,
        loss=request.loss,
    )


def publish_fit(fit: Coefficients, store: Path | None) -> Coefficients:
    """Publishes a fit; it is returned as it is in the store."""
    from calibrate.store.publishing import publish, writing_store

    published, written = publish(fit, writing_store(store))
    if not written:
        stderr.print(f"{published.reference} is unchanged; no new version is written")
    return published
