"""Collecting, fitting, scoring and reporting on a head, logits or a model."""

import re
from pathlib import Path

from calibrate.cli.fit import FitRequest
from calibrate.cli.model_options import Source
from calibrate.evidence.evidence import OWN
from calibrate.files.coefficients import Coefficients
from calibrate.files.publishing import check_store
from calibrate.report.run_record import RunRecord
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.streams import stderr

_NOT_IN_NAMES = re.compile(r"[^a-z0-9._]+")


def run_on_head(
    head: str, sizes: list[int], sets: int, seed: int, name: str | None, max_bytes: int,
    store: Path | None, *, fresh: bool,
) -> RunRecord:  # fmt: skip
    """Fits a head, and scores it before and after on fresh sets."""
    from calibrate.cli.collect_steps import collect_from_head
    from calibrate.cli.evaluate_steps import score_with_progress
    from calibrate.cli.fit_steps import fit_one_and_publish
    from calibrate.cli.loading import load_head
    from calibrate.cli.report_steps import write_report
    from calibrate.evidence.baselines import beside, fixed_rules
    from calibrate.files.collection import open_collection
    from calibrate.rows.rivals import by_sharpness, fitted_rules

    check_store(store)
    name = name or "quickstart"
    loaded, folder = load_head(head), Path("runs") / name
    collect_from_head(loaded, sizes, sets, seed, folder=folder, max_bytes=max_bytes, fresh=fresh)
    fit, record = fit_one_and_publish(
        open_collection(folder), FitRequest(folder, name, store=store)
    )
    assert fit.choice is not None  # not the paper's procedure
    others = by_sharpness(fit.choice) | fitted_rules(fit.rows, fit.choice)
    rules = beside(fit.coefficients, fixed_rules() | others)
    evidence = score_with_progress(loaded, sizes, sets, seed, rules)
    page = _page(fit.coefficients)
    scores = ScoresRecord(evidence, (OWN,), fit.coefficients.reference)
    return RunRecord(record, scores, write_report(page, fit.coefficients, scores, needed=False))


def run_on_logits(
    logits: Path, name: str | None, held_out: float, seed: int, max_bytes: int,
    store: Path | None, *, fresh: bool,
) -> RunRecord:  # fmt: skip
    """Fits most of the rows of a file or folder, and judges the fit by the others."""
    from calibrate.cli.collect_steps import collect_from_arrays
    from calibrate.cli.evaluate_steps import score_arrays
    from calibrate.cli.fit_steps import fit_and_publish
    from calibrate.cli.report_steps import write_report
    from calibrate.rows.groups import hold_out
    from calibrate.rows.logits_files import Arrays

    check_store(store)
    name = name or _name_of(logits.resolve())
    stderr.print(f"reading {logits}")
    split, folder = hold_out(Arrays(logits), held_out, seed), Path("runs") / name
    collect_from_arrays(split.fitted, folder, max_bytes, fresh=fresh)
    record = fit_and_publish(FitRequest(folder, name, store=store))
    fit = record.coefficients
    evidence = score_arrays(split.held_out, {fit.reference: fit})
    scores = ScoresRecord(evidence, (fit.reference,))
    return RunRecord(record, scores, write_report(_page(fit), fit, scores, needed=False))


def run_on_model(source: Source, name: str | None, store: Path | None, *, fresh: bool) -> RunRecord:
    """Makes examples, fits a model's heads to most of them, and judges the fit by the others."""
    from calibrate.cli.model_steps import ModelFitRequest, collect_from_model, fit_model_and_publish
    from calibrate.cli.report_steps import score_model_fit, write_report

    model, wanted = source.model, source.wanted
    assert model is not None
    assert wanted is not None
    check_store(store)
    name = name or _name_of(model.resolve())
    folder = Path("runs") / name
    collect_from_model(source, folder, fresh=fresh)
    request = ModelFitRequest(folder, name, model, source.device, seed=wanted.seed, store=store)
    record = fit_model_and_publish(request)
    fit = record.coefficients
    scores = score_model_fit(fit, source._replace(run=folder, wanted=None))
    return RunRecord(record, scores, write_report(_page(fit), fit, scores, needed=False))


def _name_of(path: Path) -> str:
    """The name of a file or folder as that of a fit."""
    stem = path.stem if path.suffix in (".npz", ".gguf") else path.name
    return _NOT_IN_NAMES.sub("-", stem.lower()).strip("-._")[:64] or "mine"


def _page(fit: Coefficients) -> Path:
    """Where the report goes: beside the fit's file."""
    assert fit.path is not None
    return fit.path.with_suffix(".html")
