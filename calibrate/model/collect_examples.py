"""Collections of examples: makes the examples of a model and scores them under the baseline."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.model.runner import Loaded, ModelSource, Runner
from calibrate.model.scoring import score_unit
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.prompts.examples import (
    EXAMPLES_FILE,
    MODEL_FILE,
    ExampleCollection,
    ExampleSet,
    make_configuration,
    parse_scores,
    scores_name,
)
from calibrate.prompts.make_examples import ExampleSpec, make_examples
from calibrate.rows.manifest import ShardEntry, entry_of
from calibrate.rows.resume import Plan, Shard, run_units
from calibrate.transformers.folders import ModelFolder


class Job(NamedTuple):
    """A model and its examples, which a collection is made of."""

    folder: ModelFolder
    examples: ExampleSet
    configuration: dict[str, Any]  # of the collection
    device: str = "cpu"

    def runner(self, jobs: Jobs = ONE_PROCESS) -> Runner:
        """A runner for the model."""
        fingerprint, dtype = (self.configuration[key] for key in ("fingerprint", "dtype"))
        source = ModelSource(self.folder.path.resolve(), fingerprint, dtype, self.device)
        return Runner.of(source, jobs)


def plan(
    model: Path,
    spec: ExampleSpec,
    dtype: str = "auto",
    device: str = "cpu",
) -> Job:
    """Makes the examples for a model and takes its fingerprint, without loading its weights.

    Args:
      model: its folder.
      dtype: of the weights; "auto" is bfloat16 if they are stored so, else float32.
    Raises:
      CalibrateError: as `ModelFolder` and `make_examples`.
    """
    folder = ModelFolder(model)
    examples, sources = make_examples(spec, folder)
    configuration = make_configuration(
        folder.name, folder.fingerprint(), folder.dtype(dtype), sources, examples
    )
    return Job(folder, examples, configuration, device)


def collect_examples(
    job: Job, folder: Path, progress: Progress = SILENT, jobs: Jobs = ONE_PROCESS
) -> ExampleCollection:
    """Scores examples under the baseline, and keeps both in a folder.

    The same job resumes an interrupted collection, and leaves a complete one unchanged. On one
    machine it writes the same bytes for any `jobs`.

    Raises:
      CalibrateError: the folder holds another collection or cannot be written, or a log p is not
        finite.
      CoefficientsError: some attention of the model is not looked up by name.
    """
    examples, runner = job.examples, job.runner(jobs)
    shards = [
        Shard(
            scores_name(number),
            partial(_score_shard, runner.load, examples.only(unit)),
            _read_entry,
            examples.n_tokens(unit),
        )
        for number, unit in enumerate(examples.units())
    ]
    files = {
        EXAMPLES_FILE: examples.pack(),
        MODEL_FILE: f"{job.folder.path.resolve()}\n".encode(),
    }
    contents = Plan("scoring", ExampleCollection, job.configuration, shards, files)
    return run_units(Path(folder), contents, runner.jobs, progress)


def _score_shard(load: Callable[[], Loaded], examples: ExampleSet) -> tuple[bytes, ShardEntry]:
    (scores,) = score_unit(examples, [None], load())
    data = scores.pack()
    return data, entry_of(data)


def _read_entry(data: bytes, path: Path) -> ShardEntry:
    parse_scores(data, path)  # DamagedError if it is not whole
    return entry_of(data)
