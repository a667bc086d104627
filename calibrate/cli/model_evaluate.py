"""`calibrate model evaluate`: score fits by the answers of a model."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from calibrate.cli.options import (
    AsJson,
    Dask,
    Device,
    FitsToScore,
    ModelFolderPath,
    Processes,
    ReadStore,
)
from calibrate.parallel import Jobs
from calibrate.report.terminal import show


def model_evaluate_command(
    run: Annotated[
        Path, Argument(metavar="collection", help="Folder of examples, from `model collect`.")
    ],
    fits: FitsToScore = None,
    *,
    model: ModelFolderPath = None,
    device: Device = "cpu",
    jobs: Processes = 1,
    dask: Dask = None,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate fits by the answers of a model.

    The tables show NLL by length, and exact match and gains by prompt template and length, beside
    the baseline and the paper's published polynomial. A fit to this collection is evaluated on its
    test split. The same command continues an interrupted evaluation.

    Example: calibrate model evaluate runs/Qwen3 mine
    """
    from calibrate.cli.loading import load_fits, open_model_run

    loaded = load_fits(fits or [], store)
    job, collection = open_model_run(run, model, device)
    from calibrate.cli.model_scoring import score_rules_on_answers
    from calibrate.evidence.baselines import paper

    workers = Jobs(jobs, dask)
    show(score_rules_on_answers(job, collection, loaded, {"paper": paper()}, workers), as_json)
