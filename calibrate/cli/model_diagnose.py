"""`calibrate model diagnose`: which heads want to be sharper, by the model's own answers."""

from dataclasses import dataclass
from pathlib import Path

from calibrate.cli.diagnose import DiagnosisFolder, diagnosis_folder
from calibrate.cli.options import RunOrExamples
from calibrate.cli.request import Request
from calibrate.files.atomic_io import check_writable
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr


@dataclass(frozen=True)
class ModelDiagnoseRequest(Request, RunOrExamples):
    out: DiagnosisFolder = None


def diagnose(request: ModelDiagnoseRequest) -> Record:
    """Rank a model's heads by what calibration could add.

    The derivative of log p of its answers by log beta of every head, in one backward pass for each
    example: which heads want to be sharper, which more diffuse, and what a step gains to first
    order. By RUN, a collection of its examples, or by --model with the options of `model collect`.

    Example: calibrate model diagnose runs/model

    Example: calibrate model diagnose --model MODEL --task retrieval --examples 8
    """
    from calibrate.cli.loading import open_or_make

    job, collection = open_or_make(request.model, request, request.run)
    from calibrate.cli.model_scoring import model_steps
    from calibrate.model.first_look import derivatives, first_look
    from calibrate.report.first_look_record import RECORD, save_first_look

    beside = request.run or Path("runs") / job.folder.name
    folder = diagnosis_folder(beside, request.out, request.run)
    check_writable(folder / RECORD)
    stderr.print(f"loading {job.folder.path}")
    loaded = job.folder.load(job.dtype, request.device)
    everything = [range(len(job.examples.examples))]
    with model_steps("differentiating", job.examples, everything) as steps:
        found = derivatives(loaded, job.examples, lambda tokens: steps.advance(work=tokens))
    look = first_look(found, job.examples)
    fingerprint = job.configuration["fingerprint"]
    digest = collection.digest if collection else None
    return save_first_look(folder, look, job.folder.name, fingerprint, digest)
