"""`calibrate fit`: fit a temperature rule to the inputs of a head or heads, and save it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Context, Option

from calibrate.cli.command import with_options
from calibrate.cli.options import (
    AsJson,
    Dask,
    FitName,
    Loss,
    MaxBeta,
    MinBeta,
    MinEntropy,
    Paper,
    Processes,
    RuleKind,
    Store,
    Tolerance,
    TrainedUpTo,
)
from calibrate.errors import CalibrateError
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.report.terminal import Steps, show, stderr

if TYPE_CHECKING:
    from calibrate.fitting.options import FitOptions
    from calibrate.report.fit_record import FitRecord
    from calibrate.rows.collection import RowCollection
    from calibrate.store.fit import Fit


def fit_command(
    ctx: Context,
    run: Annotated[Path, Argument(metavar="collection", help="Folder of inputs, from `collect`.")],
    *,
    name: FitName,
    kind: RuleKind = None,
    loss: Loss = None,
    paper: Paper = False,
    min_entropy: MinEntropy = None,
    min_beta: MinBeta = None,
    max_beta: MaxBeta = None,
    trained_up_to: TrainedUpTo = None,
    tolerance: Tolerance = None,
    seed: Annotated[int | None, Option(min=0, help="Seed of the folds [default: 0]")] = None,
    jobs: Processes = 1,
    dask: Dask = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Fit the temperature rule of a head, and save it.

    By default beta = 1/theta is a polynomial of degree 4 in the entropy, fitted to all inputs by
    maximum likelihood with a penalty towards the best constant. It is saved as the next version of
    NAME if it gains at least 0.01 nats over softmax on held-out folds, significantly, and loses no
    more than --tolerance in distribution; if not, nothing is saved (exit code 3). If inputs name a
    layer and head, each head that gains has a rule of its own.

    Example: calibrate fit runs/mine --name mine
    """
    options = fit_options(ctx.params)
    from calibrate.rows.collection import RowCollection, open_collection
    from calibrate.store.saving import check_store

    collection = open_collection(run, RowCollection)
    check_store(store)
    show(save_fit(collection, name, options, store, Jobs(jobs, dask)), as_json)


def fit_options(given: Mapping[str, Any]) -> "FitOptions":
    """The options of a fit, from the parameters of a command; None means the default.

    Raises:
      BadParameter: an option is out of range, or contradicts another.
    """
    from dataclasses import fields

    from calibrate.fitting.options import LEAST_SQUARES, FitOptions

    names = [field.name for field in fields(FitOptions)]
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("paper") and chosen.setdefault("loss", LEAST_SQUARES) != LEAST_SQUARES:
        raise BadParameter(f"--paper is --loss {LEAST_SQUARES}; leave out --loss {chosen['loss']}")
    options = FitOptions(**chosen)
    try:
        options.resolved()
    except CalibrateError as error:
        raise BadParameter(with_options(error, ())) from None
    return options


def save_fit(
    collection: "RowCollection",
    name: str,
    options: "FitOptions",
    store: Path | None,
    jobs: Jobs = ONE_PROCESS,
) -> "FitRecord":
    """Fits a rule to the inputs of a head, or of each head that they name, and saves it."""
    from calibrate.fitting.fit_collection import fit_collection
    from calibrate.report.fit_record import FitRecord

    heads = f"the {len(collection.heads)} heads of " if collection.heads else ""
    stderr.print(f"solving and fitting {heads}{collection.folder}")
    with Steps() as steps:
        result = fit_collection(collection, name, options, jobs, steps)
    return FitRecord(save_new_version(result.fit, store), result.heads, collection, result.solved)


def save_new_version(fit: "Fit", store: Path | None) -> "Fit":
    """Saves a fit to a store; returns the saved one."""
    from calibrate.store.saving import save_to_store, writing_store

    saved, written = save_to_store(fit, writing_store(store))
    if not written:
        stderr.print(f"{saved.reference} is unchanged; no new version is written")
    return saved
