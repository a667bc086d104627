"""Fitting a collection and publishing the fit, with progress on stderr."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from calibrate.cli.fit import FitRequest
from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError
from calibrate.files.coefficients import Coefficients
from calibrate.files.publishing import check_store, publish, writing_store
from calibrate.files.rows import RowCollection
from calibrate.files.store import names, published_store
from calibrate.files.unchanged_fit import same_fit
from calibrate.report.fit_plots import save_fit_figure, save_gains_figure
from calibrate.report.fit_record import FitRecord
from calibrate.report.per_head_record import PerHeadRecord
from calibrate.report.streams import stderr
from calibrate.rows.baselines import paper
from calibrate.rows.fit_collection import (
    fit_collection,
    fit_collection_as_in_the_paper,
    fit_heads_of_collection,
    open_for_fit,
)
from calibrate.rows.rule_fitting import Options
from calibrate.rows.solved_rows import group_heads


def fit_and_publish(request: FitRequest) -> FitRecord | PerHeadRecord:
    """Fits one head or each head of a collection, and publishes the fit with its figure."""
    collection = open_for_fit(request.folder, request.allow_partial)
    check_store(request.store)
    if collection.heads and not request.paper:
        return _fit_heads(collection, request)
    stderr.print(f"solving and fitting {collection.folder}")
    if request.paper:
        fit = fit_collection_as_in_the_paper(collection, request.name)
    else:
        fit = fit_collection(
            collection, request.name, _options(request), _forced(request), request.jobs
        )
    coefficients, written = publish_fit(fit.coefficients, request.store)
    fit = replace(fit, coefficients=coefficients)
    figure = draw_fit(
        coefficients, written, request.figure,
        lambda path: save_fit_figure(path, fit.rows, coefficients, paper()),
    )  # fmt: skip
    return FitRecord(fit, figure)


def _fit_heads(collection: RowCollection, request: FitRequest) -> PerHeadRecord:
    """Fits each head, with a step per group of heads."""
    n_groups, n_heads = len(group_heads(collection)), len(collection.heads)
    stderr.print(f"solving and fitting the {n_heads} heads of {collection.folder}")
    with Steps("fitting heads", n_groups, n_heads, at_once=request.jobs.uses_workers) as steps:
        fits = fit_heads_of_collection(
            collection, request.name, _options(request), _forced(request), request.jobs,
            report=lambda heads: steps.advance(work=heads),
        )  # fmt: skip
    coefficients, written = publish_fit(fits.coefficients, request.store)
    fits = replace(fits, coefficients=coefficients)
    figure = draw_fit(
        coefficients, written, request.figure, lambda path: save_gains_figure(path, fits)
    )
    return PerHeadRecord(fits, figure)


def _options(request: FitRequest) -> Options:
    return Options(
        rows=request.rows and request.rows.value, gate=request.gate, q=request.q,
        trained_up_to=request.trained_up_to,
    )  # fmt: skip


def _forced(request: FitRequest) -> str | None:
    return "polynomial" if request.force_polynomial else None


def publish_fit(coefficients: Coefficients, store: Path | None) -> tuple[Coefficients, bool]:
    """The fit as it is in the store, and whether a new version was written."""
    name = coefficients.name
    published, written = publish(coefficients, writing_store(store), same_fit)
    if not written:
        stderr.print(f"{published.reference} is unchanged; no new version is written")
    elif name in names(published_store()) and not _in_package(published):
        stderr.print(f"the package also has a fit named {name!r}; yours hides it here")
    return published, written


def _in_package(coefficients: Coefficients) -> bool:
    """Whether a fit lies in the package's own store, as in a clone."""
    assert coefficients.path is not None
    return coefficients.path.resolve().is_relative_to(published_store().resolve())


def draw_fit(
    coefficients: Coefficients, written: bool, figure: Path | None, save: Callable[[Path], None]
) -> Path | None:
    """The path of a published fit's figure; None if it could not be drawn."""
    assert coefficients.path is not None
    path = figure or coefficients.path.with_suffix(".png")
    try:
        if written or figure or not path.exists():
            save(path)
    except CalibrateError as error:  # the fit itself is published
        stderr.print(f"the figure is not drawn: {error}")
        return None
    return path
