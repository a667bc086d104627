"""`calibrate run`: collect, fit, evaluate and report on one head."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.fit import FitRequest
from calibrate.cli.options import (
    BytesOption,
    HeadOption,
    JsonOption,
    SeedOption,
    SetsOption,
    SizesOption,
    StoreOption,
    parse_bytes,
    parse_sizes,
)
from calibrate.report.terminal import show

NameOption = Annotated[str, typer.Option(help="Name of the fit, and of its folder in runs/.")]


def run(
    head: HeadOption = "max-retrieval",
    sizes: SizesOption = "16..4096",
    sets: SetsOption = 4096,
    seed: SeedOption = 0,
    name: NameOption = "quickstart",
    max_bytes: BytesOption = "1GB",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Collect, fit, evaluate and report on one head.

    The head is scored before and after on fresh sets; the fit is published as NAME.

    Example: calibrate run
    """
    from calibrate.cli.collect_steps import collect_from_head
    from calibrate.cli.evaluate_steps import score_with_progress
    from calibrate.cli.fit_steps import fit_and_publish
    from calibrate.cli.loading import load_head
    from calibrate.cli.report_steps import write_head_report
    from calibrate.evaluation.baselines import (
        beside,
        by_sharpness,
        fitted_rules,
        fixed_rules,
    )
    from calibrate.files.publishing import check_name
    from calibrate.report.fit_record import FitRecord
    from calibrate.report.run_record import RunRecord

    n, n_bytes = parse_sizes(sizes), parse_bytes(max_bytes)
    check_name(name)
    loaded, folder = load_head(head), Path("runs") / name
    collect_from_head(loaded, n, sets, seed, folder=folder, max_bytes=n_bytes)
    record = fit_and_publish(FitRequest(folder, name, store=store))
    assert isinstance(record, FitRecord)  # a head's rows name no layer
    fit = record.fit
    assert fit.choice is not None  # not the paper's procedure
    others = by_sharpness(fit.choice) | fitted_rules(fit.rows, fit.choice)
    rules = beside(fit.coefficients, fixed_rules() | others)
    scores = score_with_progress(loaded, n, sets, seed, rules)
    assert fit.coefficients.path is not None
    page = fit.coefficients.path.with_suffix(".html")
    report = write_head_report(page, fit.coefficients, loaded, scores, seed, needed=False)
    show(RunRecord(record, loaded.name, scores, report), as_json)
