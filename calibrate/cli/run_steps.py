"""The main job, step by step: collect, fit, evaluate, report."""

from pathlib import Path

from calibrate.cli.collect_steps import collect_from_head
from calibrate.cli.evaluate_steps import score_with_progress
from calibrate.cli.fit import FitRequest
from calibrate.cli.fit_steps import fit_and_publish
from calibrate.cli.loading import load_head
from calibrate.cli.report_steps import write_head_report
from calibrate.evaluation.baselines import beside, fitted_rules, fixed_rules
from calibrate.files.publishing import check_name
from calibrate.report.fit_record import FitRecord
from calibrate.report.run_record import RunRecord


def run_all(
    reference: str,
    sizes: list[int],
    sets: int,
    seed: int,
    *,
    name: str,
    max_bytes: int,
    store: Path | None,
) -> RunRecord:
    """Runs the main job on one head."""
    check_name(name)
    head = load_head(reference)
    folder = Path("runs") / name
    collect_from_head(head, sizes, sets, seed, folder=folder, max_bytes=max_bytes)
    record = fit_and_publish(FitRequest(folder, name, store=store))
    assert isinstance(record, FitRecord)  # a head's rows name no layer
    fit = record.fit
    rules = beside(fit.coefficients, {**fixed_rules(), **fitted_rules(fit.rows, fit.choice)})
    scores = score_with_progress(head, sizes, sets, seed, rules)
    assert fit.coefficients.path is not None
    page = fit.coefficients.path.with_suffix(".html")
    report = write_head_report(page, fit.coefficients, head, scores, seed, needed=False)
    return RunRecord(record, head.name, scores, report)
