"""Diagnosing a collection and drawing the figures, with progress on stderr."""

from pathlib import Path

from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError
from calibrate.evaluation.diagnosis import diagnose, require_all_rows
from calibrate.files.atomic_io import check_writable
from calibrate.files.collection import open_collection
from calibrate.files.manifest import MANIFEST
from calibrate.fitting.solved_rows import group_heads
from calibrate.report.console import stderr
from calibrate.report.diagnosis_record import RECORD, DiagnosisRecord, save_diagnosis


def diagnose_and_draw(run: Path, out: Path | None, eps: float) -> DiagnosisRecord:
    """Diagnoses a collection, and writes the record and the figures into a folder of their own."""
    collection = open_collection(run)
    require_all_rows(collection)
    folder = out or _default_folder(run)
    if folder.resolve().is_relative_to(run.resolve()) or (folder / MANIFEST).exists():
        raise CalibrateError(f"{folder} is a collection's folder; choose another one with --out")
    check_writable(folder / RECORD)
    n_steps = len(group_heads(collection)) * len(collection.manifest["shards"])
    with Steps(f"measuring the rows of {run}", n_steps) as steps:
        diagnosis = diagnose(collection, eps, steps.advance)
    stderr.print(f"drawing into {folder}")
    return save_diagnosis(folder, diagnosis)


def _default_folder(run: Path) -> Path:
    """runs/NAME-diagnosis."""
    named = run if run.name not in ("", "..") else run.resolve()
    return named.with_name(f"{named.name}-diagnosis")
