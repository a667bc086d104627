"""`calibrate fit`: publish the rule that a collection's head or heads need."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from calibrate.cli.options import FitName, Request, Store, Workers
from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError
from calibrate.files.coefficients import Coefficients
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.rows import RowCollection
    from calibrate.report.fit_record import FitRecord
    from calibrate.rows.fit_collection import FitResult
    from calibrate.rows.heads import Head
    from calibrate.rows.rule_fitting import Options


@dataclass(frozen=True)
class FitRequest(Request, Workers):
    run: Annotated[Path, Argument(help="Folder of a collection of rows.")]
    name: FitName
    rows: Annotated[
        Literal["all", "misranked"] | None, Option(help="Rows to fit [default: all that are kept]")
    ] = None
    gate: Annotated[
        float,
        Option(min=0, max=20, help="Entropy in nats up to which softmax is unchanged; 0: none."),
    ] = 0.0
    q: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help="Sharpness: fit the mean of p^q; 0 is log p [default: that with which the head is "
            "right most often, or 0 without a head]",
        ),
    ] = None
    head: Annotated[
        str | None,
        Option(help="Head of the collection, module:attribute [default: if it is built in]"),
    ] = None
    trained_up_to: Annotated[
        int | None,
        Option(min=0, help="Size up to which mean log p may fall by 0.005 [default: the head's]"),
    ] = None
    min_beta: Annotated[
        float | None,
        Option(min=1 / 64, max=1, help="Least beta [default: 1, of arrays 1/64: may be too sharp]"),
    ] = None
    force_polynomial: Annotated[
        bool, Option("--force-polynomial", help="Publish it even if a simpler rule is as good.")
    ] = False
    paper: Annotated[bool, Option("--paper", help="The paper's procedure, without a verdict.")] = (
        False
    )
    allow_partial: Annotated[
        bool, Option("--allow-partial", help="Fit an unfinished collection.")
    ] = False
    store: Store = None

    def __post_init__(self) -> None:
        """Checks that nothing is given that would be ignored."""
        if self.head is not None and self.q is not None:
            raise BadParameter("--head chooses q, and cannot be used with --q")
        chosen = self.rows, self.gate or None, self.q, self.trained_up_to, self.head, self.min_beta
        if self.paper and (self.force_polynomial or any(x is not None for x in chosen)):
            raise BadParameter("other options of the fit cannot be used with --paper")


def fit(request: FitRequest) -> "FitRecord":
    """Fit the rule that a collection's head needs, and publish it.

    Every row is solved for its optimal beta. Four kinds of rule are fitted and compared on held-out
    rows: a constant, kappa log n + b, a degree-4 polynomial of entropy, and one of entropy and size
    together. The simplest that no other one beats is made as sharp (--q) as makes its head right
    most often, and published as the next version of NAME, unless the newest version is unchanged.
    If no rule beats plain softmax, nothing is published (exit code 3). If the rows name a layer and
    head, each head is fitted separately, and the file has an entry for each head that gains.

    Example: calibrate fit runs/try --name try
    """
    from calibrate.files.publishing import check_store
    from calibrate.rows.fit_collection import open_for_fit

    collection = open_for_fit(request.run, request.allow_partial)
    check_store(request.store)
    return published_record(fit_rows(collection, request), request.store)


def fit_rows(
    collection: "RowCollection", request: FitRequest, head: "Head | None" = None
) -> "FitResult":
    """Fits the head that the request may name, or each head of the rows; publishes nothing."""
    if not collection.heads or request.paper:
        return _fit_one(collection, request, head)
    if request.head is not None:
        raise CalibrateError(
            f"{request.run} is fitted head by head, and has q = 0 or --q; leave out --head"
        )
    return _fit_heads(collection, request)


def published_record(fit: "FitResult", store: Path | None) -> "FitRecord":
    """Publishes a fit."""
    from calibrate.report.fit_record import FitRecord

    return FitRecord(publish_fit(fit.coefficients, store), fit.heads)


def _fit_one(collection: "RowCollection", request: FitRequest, head: "Head | None") -> "FitResult":
    from calibrate.rows import fit_collection as fits

    if head is None and request.q is None and not request.paper:
        head = _head_of(collection, request.head)
    stderr.print(f"solving and fitting {collection.folder}")
    if request.paper:
        return fits.fit_collection_as_in_the_paper(collection, request.name)
    options = _options(collection, request)
    return fits.fit_collection(collection, request.name, options, request.workers, head)


def _head_of(collection: "RowCollection", reference: str | None) -> "Head | None":
    """The head that was asked for, or the built-in one that the collection was made of."""
    from calibrate.cli.loading import load_named

    head = load_named(reference, collection.configuration["head"])
    if head is not None and (reference or head.fingerprint == collection.fingerprint):
        return head
    stderr.print("q is 0: no head (--head) tells how often it is right with a larger one")
    return None


def _fit_heads(collection: "RowCollection", request: FitRequest) -> "FitResult":
    """Fits each head, with a step per group of heads."""
    from calibrate.rows.fit_collection import fit_heads_of_collection
    from calibrate.rows.solved_rows import group_heads

    n_groups, n_heads = len(group_heads(collection)), len(collection.heads)
    options = _options(collection, request)
    stderr.print(f"solving and fitting the {n_heads} heads of {collection.folder}")
    with Steps("fitting heads", n_groups, n_heads, request.workers.uses_workers) as steps:
        return fit_heads_of_collection(
            collection, request.name, options, request.workers, report=steps.advance
        )


def _options(collection: "RowCollection", request: FitRequest) -> "Options":
    from calibrate.rows.rule_fitting import LEAST_MIN_BETA, Options

    is_of_arrays = collection.configuration.get("of") == "logits" and not collection.heads
    least = LEAST_MIN_BETA if is_of_arrays else 1.0  # heads go below 1 by --min-beta alone
    return Options(
        request.rows, request.gate, q=request.q, trained_up_to=request.trained_up_to,
        force="polynomial" if request.force_polynomial else None,
        min_beta=request.min_beta or least,
    )  # fmt: skip


def publish_fit(fit: Coefficients, store: Path | None) -> Coefficients:
    """Publishes a fit; it is returned as it is in the store."""
    from calibrate.files.publishing import publish, writing_store
    from calibrate.files.unchanged_fit import same_fit

    published, written = publish(fit, writing_store(store), same_fit)
    if not written:
        stderr.print(f"{published.reference} is unchanged; no new version is written")
    return published
