"""`calibrate model run`: collect, fit, evaluate and report on a model."""

from dataclasses import dataclass
from pathlib import Path

from calibrate.cli import model_collect, model_fit
from calibrate.cli.loading import open_run
from calibrate.cli.model_collect import Examples, RequiredModel
from calibrate.cli.model_evaluate import score_fit
from calibrate.cli.report import write_report
from calibrate.cli.run import RunOptions, name_after, page_beside
from calibrate.files.publishing import check_store
from calibrate.report.blocks import Result


@dataclass(frozen=True)
class ModelRunRequest(RunOptions, Examples):
    """What `calibrate model run` is asked for."""

    model: RequiredModel


def run(request: ModelRunRequest) -> Result:
    """Collect, fit, evaluate and report on a model, in one command.

    Examples are made or read as by `model collect`, the heads are fitted through the model, and the
    report is on the examples that no fit has seen. The fit is published as NAME, the report beside
    it. The same command continues what was interrupted.

    Example: calibrate model run --model MODEL --task retrieval --text book.txt
    """
    check_store(request.store)
    name = request.name or name_after(request.model)
    folder = Path("runs") / name
    examples = {field: getattr(request, field) for field in Examples.__dataclass_fields__}
    model_collect.collect(
        model_collect.ModelCollectRequest(request.model, folder, request.fresh, **examples)
    )
    asked = model_fit.ModelFitRequest(
        folder, name, request.model, seed=request.seed, device=request.device, store=request.store
    )
    record = model_fit.fit(asked)
    from calibrate.report.run_record import run_result

    fit = record.coefficients
    scores = score_fit(fit, *open_run(folder, request.model, request.device))
    report = write_report(page_beside(fit), fit, scores, needed=False)
    return run_result(record, scores, report)
