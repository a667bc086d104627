"""Passes through a model, in this process or in workers, within a bounded memory.

A task is a batch, whatever the number of workers. A worker loads the model once and computes with
one thread, and results are put together in the order of the tasks. On processors of one kind, the
bits of a result are therefore the same for any number of workers. Tokens, rules and results travel
between processes; weights do not.

For the backward pass, a layer keeps about 20 numbers for each token and channel, as measured on a
Llama. On a CPU, a batch is divided so that all layers keep at most `Loaded.kept_bytes`. If a single
example would keep more, or a batch on a GPU, each layer keeps its input alone and computes the rest
again.
"""

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.parallel import ONE_PROCESS, Jobs, run
from calibrate.prompts.examples import Example
from calibrate.transformers.betas import HeadBetas, checkpointed, head_betas
from calibrate.transformers.folders import ModelFolder

MODEL_PACKAGES = ("torch", "transformers")  # results depend on their versions
MAX_KEPT_BYTES = 1 << 29
_KEPT_NUMBERS = 20  # for each token and channel of a layer
_SMALL_MODEL = 5_000_000  # parameters, below which one thread is as fast as several
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")

TaskResult = TypeVar("TaskResult")


class Loaded(NamedTuple):
    """A model, and the betas of its heads."""

    model: PreTrainedModel
    heads: HeadBetas
    held: AbstractContextManager[HeadBetas] | None = None  # keeps `heads` in force
    kept_bytes: int = MAX_KEPT_BYTES  # for the backward pass, on a CPU


class ModelSource(NamedTuple):
    """The folder that a model is loaded from, and how."""

    path: Path
    fingerprint: str
    dtype: str
    device: str


Task = Callable[[Loaded], TaskResult]


@dataclass(frozen=True, eq=False)
class Runner:
    """Calls tasks with a model, in this process or in workers."""

    load: Callable[[], Loaded]  # called for each task; loads the model once in a process
    device: str = "cpu"  # of the model, in each process
    jobs: Jobs = ONE_PROCESS

    @staticmethod
    def of(source: ModelSource, jobs: Jobs = ONE_PROCESS) -> "Runner":
        """A runner for the model of a folder."""
        jobs = replace(jobs, threads=1) if jobs.uses_workers else jobs
        return Runner(partial(load_model, source, jobs.uses_workers), source.device, jobs)

    def run(
        self,
        tasks: Sequence[Task[TaskResult]],
        done: Callable[[int, TaskResult], None] = lambda number, result: None,
    ) -> list[TaskResult]:
        """Calls tasks; returns their results in order.

        Args:
          done: called with the number and the result of each task when it is finished.
        Raises:
          CalibrateError: the model does not load, a task raises it, or as `parallel.run`.
          CoefficientsError: some attention of the model is not looked up by name.
        """
        numbered = [
            partial(_call_task, self.load, number, task) for number, task in enumerate(tasks)
        ]
        results = run(numbered, self.jobs, lambda result: done(*result))
        return [result for _, result in results]

    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of all heads of the model."""
        return self.run([_list_heads])[0]


def _call_task(
    load: Callable[[], Loaded], number: int, task: Task[TaskResult]
) -> tuple[int, TaskResult]:
    return number, task(load())


def _list_heads(loaded: Loaded) -> list[tuple[int, int]]:
    return loaded.heads.heads


@lru_cache(maxsize=1)
def load_model(source: ModelSource, in_worker: bool) -> Loaded:
    """Loads a model, once in a process.

    A small model computes with one thread, since several would mostly wait for each other: on a
    busy processor they took five times the processor time and three times the wall time of one.

    Raises:
      CalibrateError: the folder holds another model on the worker's machine.
    """
    folder = ModelFolder(source.path)
    if in_worker and folder.fingerprint() != source.fingerprint:
        raise CalibrateError(
            f"{source.path} holds another model where a worker runs; copy the model there"
        )
    model = folder.load(source.dtype, source.device)
    if in_worker or model.num_parameters() < _SMALL_MODEL:
        torch.set_num_threads(1)
    held = head_betas(model)
    return Loaded(model, held.__enter__(), held)


atexit.register(load_model.cache_clear)  # `held` cannot end once modules are torn down


# Memory


def count_tokens(examples: Sequence[Example]) -> int:
    """The number of tokens of some examples."""
    return sum(len(example.tokens) for example in examples)


@contextmanager
def convert_out_of_memory(examples: Sequence[Example]) -> Iterator[None]:
    """Raises CalibrateError if PyTorch runs out of memory on a batch."""
    try:
        yield
    except (MemoryError, RuntimeError) as failure:  # PyTorch has its own class for GPUs alone
        message = str(failure).lower()
        if not isinstance(failure, MemoryError) and not any(x in message for x in _OUT_OF_MEMORY):
            raise
        raise CalibrateError(
            f"out of memory at {len(examples)} x {len(examples[0].tokens):,} tokens; give shorter "
            "examples, or load the model in bfloat16"
        ) from failure


@contextmanager
def bounded_memory(examples: Sequence[Example], loaded: Loaded) -> Iterator[None]:
    """Bounds the memory that layers keep for the backward pass of a batch, by checkpoints.

    Raises CalibrateError if memory runs out all the same.
    """
    fits = _n_fitting(loaded, examples) > 0
    with convert_out_of_memory(examples), nullcontext() if fits else checkpointed(loaded.model):
        yield


def divide_batch(loaded: Loaded, examples: Sequence[Example]) -> list[slice]:
    """Divides a batch on a CPU into parts that fit into the bound; else the whole is one part."""
    on_cpu = loaded.model.device.type == "cpu"
    size = (on_cpu and _n_fitting(loaded, examples[:1])) or len(examples)
    return [slice(first, first + size) for first in range(0, len(examples), size)]


def _n_fitting(loaded: Loaded, examples: Sequence[Example]) -> int:
    """The number of such batches whose backward pass fits into the bound."""
    model = loaded.model
    config = model.config.get_text_config()
    bytes_per_token = config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return loaded.kept_bytes // int(_KEPT_NUMBERS * count_tokens(examples) * bytes_per_token)
