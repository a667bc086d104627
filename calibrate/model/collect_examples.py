"""Collecting examples: plain softmax's scores of a model, resumably."""

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from calibrate.files import examples as files
from calibrate.files.manifest import Entry, entry_of
from calibrate.files.resuming import Plan, Progress, Shard, fill
from calibrate.model.passes import Report, report_resumed, score
from calibrate.model.prompts import Wanted, make_examples
from calibrate.transformers.betas import head_betas
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


def plan(model: Path, wanted: Wanted, dtype: str = "auto", device: str = "cpu") -> Job:
    """Makes the examples for a model and takes its fingerprint; loads no weights.

    Raises:
      CalibrateError: as `ModelFolder` and `make_examples`.
    """
    folder = ModelFolder(model)
    examples, sources = make_examples(wanted, folder)
    dtype = folder.dtype(dtype)
    configuration = files.configuration_of(
        folder.name, folder.fingerprint(), dtype, sources, examples
    )
    return Job(folder, examples, configuration, device)


def collect_examples(
    job: Job, folder: Path, report: Report = lambda tokens, resumed: None
) -> files.ExampleCollection:
    """Scores the examples with plain softmax and keeps both in a folder.

    The same job resumes an interrupted collection, repairs damaged files, and leaves a complete
    collection as it is. On one machine it gives the same bytes.

    Raises:
      CalibrateError: another collection is in the folder, it cannot be written, a log p is not
        finite, or the model does not look attention up.
    """
    units = {files.scores_name(i): u for i, u in enumerate(job.examples.units())}

    def tell_resumed(progress: Progress) -> None:
        if progress.resumed:
            report_resumed(job.examples, units[progress.name], report)

    with ExitStack() as stack:

        @cache
        def model() -> PreTrainedModel:
            loaded = job.folder.load(job.dtype, job.device)
            stack.enter_context(head_betas(loaded))
            return loaded

        def make(unit: list[int]) -> tuple[bytes, Entry]:
            data = score(model(), job.examples, unit, report).pack()
            return data, entry_of(data)

        def check(unit: list[int], data: bytes, path: Path) -> Entry:
            files.parse_scores(job.examples.n_answer(unit), data, path)
            return entry_of(data)

        shards = [
            Shard(name, files.most_bytes(len(unit)), partial(check, unit), partial(make, unit))
            for name, unit in units.items()
        ]
        beside = {
            files.EXAMPLES: job.examples.pack(),
            files.MODEL: f"{job.folder.path.resolve()}\n".encode(),
        }
        difference = partial(_difference, job.configuration)
        wanted = Plan(files.ExampleCollection, job.configuration, shards, difference, beside)
        return fill(Path(folder), wanted, report=tell_resumed)


def _difference(
    given: dict[str, Any], recorded: dict[str, Any]
) -> tuple[list[str], dict[str, Any], dict[str, Any]] | None:
    """See `Plan`: options and digests of files; that of the examples also knows the tokenizer."""
    if recorded == given:
        return None
    found, wanted = (
        {key: c[key] for key in ("model", "fingerprint", "dtype")}
        | c["sources"]
        | {"tokens": c["examples"]["sha256"]}
        for c in (recorded, given)
    )
    return [], found, wanted
