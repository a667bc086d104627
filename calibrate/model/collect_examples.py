"""Collecting examples: the baseline's scores of a model, resumably."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.datasets import examples as files
from calibrate.datasets.manifest import Entry, entry_of
from calibrate.datasets.resume import Plan, Shard, run_units
from calibrate.model.batches import batch_tokens
from calibrate.model.runner import Runner, Source, running
from calibrate.model.scoring import score
from calibrate.model.splits import warn_of_mixed_templates
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.prompts.make_examples import ExampleSpec, make_examples
from calibrate.transformers.folders import ModelFolder


class Job(NamedTuple):
    """A model and its examples: what a collection is made of."""

    folder: ModelFolder
    examples: files.ExampleSet
    configuration: dict[str, Any]
    device: str = "cpu"

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(self.configuration["dtype"])

    def running(self, jobs: Jobs = ONE_PROCESS) -> AbstractContextManager[Runner]:
        """Opens a runner of passes of the model, until the block ends."""
        path, fingerprint = self.folder.path.resolve(), self.configuration["fingerprint"]
        allowed = files.allows_unexpected(self.configuration)
        return running(Source(path, fingerprint, self.dtype, self.device, allowed), jobs)


def plan(
    model: Path,
    spec: ExampleSpec,
    dtype: str = "auto",
    device: str = "cpu",
    allow_unexpected: bool = False,
) -> Job:
    """Makes the examples for a model and takes its fingerprint; loads no weights.

    Args:
      allow_unexpected: whether the model may have tensors that do not run; see `ModelFolder.load`.
        The configuration says so, and whatever loads the model for the collection goes by it.
    Raises:
      CalibrateError: as `ModelFolder` and `make_examples`.
    """
    _ = spec.lines  # of a file, which are read before a model is
    folder = ModelFolder(model)
    examples, sources = make_examples(spec, folder)
    warn_of_mixed_templates(examples)
    sources |= {files.ALLOW_UNEXPECTED: True} if allow_unexpected else {}
    dtype = folder.dtype(dtype)
    configuration = files.configuration_of(
        folder.name, folder.fingerprint(), dtype, sources, examples
    )
    return Job(folder, examples, configuration, device)


def collect_examples(
    job: Job, folder: Path, progress: Progress = SILENT, jobs: Jobs = ONE_PROCESS
) -> files.ExampleCollection:
    """Scores the examples with the baseline and keeps both in a folder.

    The same job resumes an interrupted collection, repairs damaged files, and leaves a complete
    collection as it is. On one machine it gives the same bytes, whatever the jobs.

    Raises:
      CalibrateError: another collection is in the folder, it cannot be written, a log p is not
        finite, or the model does not look attention up.
    """
    units = {files.scores_name(i): u for i, u in enumerate(job.examples.units())}

    with job.running(jobs) as runner:
        per_batch = SILENT if jobs.uses_workers else progress
        in_process = replace(runner, jobs=ONE_PROCESS)
        shards = [
            Shard(
                name,
                files.most_bytes(len(unit)),
                partial(_check, job.examples.n_answer(unit)),
                partial(_make, in_process, job.examples.only(unit), per_batch),
                batch_tokens(job.examples, unit),
                advances=not jobs.uses_workers,
            )
            for name, unit in units.items()
        ]
        beside = {
            files.EXAMPLES: job.examples.pack(),
            files.MODEL: f"{job.folder.path.resolve()}\n".encode(),
        }
        difference = partial(_difference, job.configuration)
        contents = Plan(
            "scoring", files.ExampleCollection, job.configuration, shards, difference, beside
        )
        return run_units(Path(folder), contents, runner.jobs, progress)


def _make(runner: Runner, examples: files.ExampleSet, progress: Progress) -> tuple[bytes, Entry]:
    data = score(runner, examples, range(len(examples.examples)), progress).pack()
    return data, entry_of(data)


def _check(n_answer: np.ndarray, data: bytes, path: Path) -> Entry:
    files.parse_scores(n_answer, data, path)
    return entry_of(data)


def _difference(
    given: dict[str, Any], recorded: dict[str, Any]
) -> tuple[list[str], dict[str, Any], dict[str, Any]] | None:
    """See `Plan`: options and digests of files; that of the examples also knows the tokenizer."""
    if recorded == given:
        return None
    before, now = (
        {key: c[key] for key in ("model", "fingerprint", "dtype")}
        | c["sources"]
        | {"tokens": c["examples"]["sha256"]}
        for c in (recorded, given)
    )
    return [], before, now
