"""Collecting examples: plain softmax's scores of a model, resumably."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.files import example_collection as files
from calibrate.files.atomic_io import write_atomically
from calibrate.files.collection import collection_lock
from calibrate.files.example_set import ExampleSet
from calibrate.files.manifest import MANIFEST, another_collection
from calibrate.files.shard import is_as_listed
from calibrate.model.passes import batch_tokens, score
from calibrate.model.prompts import Wanted, make_examples
from calibrate.transformers.betas import head_betas
from calibrate.transformers.folders import ModelFolder

Report = Callable[[int, bool], None]  # tokens of a batch, and whether it was scored before


class Job(NamedTuple):
    """A model and its examples: what a collection is made of."""

    folder: ModelFolder
    examples: ExampleSet
    configuration: dict[str, Any]
    device: str = "cpu"

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(self.configuration["dtype"])


def plan(model: Path, wanted: Wanted, dtype: str = "auto", device: str = "cpu") -> Job:
    """Makes the examples for a model and takes its fingerprint; loads no weights.

    Raises:
      CalibrateError: as `ModelFolder` and `make_examples`.
    """
    folder = ModelFolder(model)
    made, dtype = make_examples(wanted, folder), folder.dtype(dtype)
    configuration = files.configuration_of(
        folder.name, folder.fingerprint(), dtype, made.sources, made.set
    )
    return Job(folder, made.set, configuration, device)


def collect_examples(
    job: Job, folder: Path, report: Report = lambda tokens, resumed: None
) -> files.ExampleCollection:
    """Scores the examples with plain softmax and keeps both in a folder.

    The same job resumes an interrupted collection, repairs damaged files, and leaves a complete
    collection as it is. On one machine it gives the same bytes.

    Args:
      report: called after each batch.
    Raises:
      CalibrateError: another collection is in the folder, it cannot be written, a log p is not
        finite, or the model does not look attention up.
    """
    folder = Path(folder)
    with collection_lock(folder), ExitStack() as stack:
        listed = _claim(folder, job)
        data = job.examples.pack()
        if not is_as_listed(folder / files.EXAMPLES, files.entry_of(data)):
            write_atomically(folder / files.EXAMPLES, data)
        write_atomically(folder / files.MODEL, f"{job.folder.path.resolve()}\n".encode())

        @cache
        def model() -> PreTrainedModel:
            loaded = job.folder.load(job.dtype, job.device)
            stack.enter_context(head_betas(loaded))
            return loaded

        entries = [
            _collect_unit(job, folder, number, unit, listed, model, report)
            for number, unit in enumerate(job.examples.units(files.UNIT_TOKENS))
        ]
        if listed is None:
            files.write_manifest(folder, job.configuration, entries)
    return files.open_examples(folder)


def _collect_unit(
    job: Job, folder: Path, number: int, unit: range, listed: list[dict[str, Any]] | None,
    model: Callable[[], PreTrainedModel], report: Report,
) -> dict[str, Any]:  # fmt: skip
    """The entry of a file of scores, which is written unless it is there."""
    path, entry = files.scores_path(folder, number), None if listed is None else listed[number]
    data = files.find_scores(path, job.examples.n_answer(unit), entry)
    if data is not None:
        for tokens in batch_tokens(job.examples.examples, unit):
            report(tokens, True)
        return files.entry_of(data)
    data = score(model(), job.examples, unit, lambda tokens: report(tokens, False)).pack()
    _write(path, data, entry)
    return files.entry_of(data)


def _write(path: Path, data: bytes, listed: dict[str, Any] | None) -> None:
    """Writes a file of scores; of a complete collection, only as it was."""
    if listed is not None and files.entry_of(data) != listed:
        raise CalibrateError(
            f"{path} cannot be repaired: its examples, scored again, have another digest than "
            f"{MANIFEST} lists, as on another machine or with another version; restore the file "
            "from a copy, or collect into a new folder"
        )
    write_atomically(path, data)


def _another(folder: Path, recorded: dict[str, Any], given: dict[str, Any]) -> CalibrateError:
    """What differs: files that changed, or options; else the tokenizer, which makes the tokens."""
    options = [
        {key: c[key] for key in ("model", "dtype")} | c["sources"] for c in (recorded, given)
    ]
    changed = []
    for key in ("prompts", "text"):
        digests = {c.get(key) for c in options}
        if len(digests) > 1 and None not in digests:
            changed.append(f"the --{key} file")
        for c in options:
            c[key] = "given" if key in c else None
    if recorded["model"] == given["model"] and recorded["fingerprint"] != given["fingerprint"]:
        changed.append(f"the model {given['model']}")
    if options[0] == options[1] and not changed:
        changed = [f"the tokenizer of {given['model']}"]
    return another_collection(folder, changed, *options)


def _claim(folder: Path, job: Job) -> list[dict[str, Any]] | None:
    """Claims the folder for a job; the entries of its files of scores, if it is complete.

    Raises:
      CalibrateError: the folder is not empty, and is not this collection.
    """
    found, configuration = files.read_manifest(folder), job.configuration
    if found is None:
        if any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise CalibrateError(f"{folder} is not a collection and not empty; choose a new folder")
        files.write_manifest(folder, configuration)
        return None
    manifest, _ = found
    recorded = manifest["configuration"]
    empty = manifest["status"] == "partial" and not any(folder.glob("scores-*.npz"))
    if recorded != configuration and empty:  # its model did not load, say: nothing is lost
        files.write_manifest(folder, configuration)
        return None
    if recorded != configuration:
        raise _another(folder, recorded, configuration)
    scores: list[dict[str, Any]] | None = manifest.get("scores")
    if scores is not None and len(scores) != len(job.examples.units(files.UNIT_TOKENS)):
        raise CalibrateError(
            f"{folder / MANIFEST} does not list the scores of its examples; restore it or collect "
            "into a new folder"
        )
    return scores
