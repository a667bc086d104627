"""`calibrate model run`: collect, fit, evaluate and report on a model."""

from dataclasses import dataclass
from pathlib import Path

from calibrate.cli import model_collect, model_fit
from calibrate.cli.options import Examples, RequiredModel
from calibrate.cli.run import RunOptions, name_after
from calibrate.report.blocks import Record


@dataclass(frozen=True)
class ModelRunRequest(RunOptions, Examples):
    model: RequiredModel


def run(request: ModelRunRequest) -> Record:
    """Collect, fit, evaluate and report on a model, in one command.

    Examples are made or read as by `model collect`, the heads are fitted through the model, and the
    report is on the examples that no fit has seen. The fit is published as NAME, the report beside
    it. The same command continues what was interrupted.

    Example: calibrate model run --model MODEL --task retrieval --text book.txt
    """
    from calibrate.files.publishing import check_store

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
    from calibrate.cli.loading import open_run
    from calibrate.cli.model_scoring import score_fit
    from calibrate.cli.scoring import end_run

    found = open_run(folder, request.model, request.device)
    return end_run(record, score_fit(record.coefficients, *found, []))
