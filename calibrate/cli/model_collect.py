"""`calibrate model collect`: make examples for a model, and keep them with its scores."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from calibrate.cli.options import Examples, Fresh, RequiredModel
from calibrate.cli.request import Request
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr


@dataclass(frozen=True)
class ModelCollectRequest(Request, Examples):
    model: RequiredModel
    out: Annotated[
        Path | None, Option(help="Folder of the collection [default: runs/NAME of the model]")
    ] = None
    fresh: Fresh = False


def collect(request: ModelCollectRequest) -> Record:
    """Collect examples of a model: prompts with their right answers.

    They are kept with the model's scores under plain softmax. Give --prompts, --task and --text, or
    some of them. Run the same command again to continue an interrupted collection or to repair
    damaged and missing files; a complete collection is left as it is.

    Example: calibrate model collect --model MODEL --task retrieval --text book.txt --out runs/model
    """
    from calibrate.cli.loading import make_examples

    job = make_examples(request.model, request)
    from calibrate.cli.model_scoring import model_steps
    from calibrate.files.resuming import discard_collection
    from calibrate.model.collect_examples import collect_examples
    from calibrate.report.collection_record import examples_result

    folder = request.out or Path("runs") / job.folder.name
    if request.fresh:
        discard_collection(folder)
    with model_steps("scoring", job.examples, job.examples.units()) as steps:
        collection = collect_examples(
            job, folder, lambda tokens, resumed: steps.advance(work=tokens, resumed=resumed)
        )
    if not steps.done:
        stderr.print(f"{folder} is already complete")
    return examples_result(collection)
