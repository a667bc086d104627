"""Runners of passes, here or in workers that load the model once each, within a bounded memory.

A task is a batch, the same for any number of workers. A worker computes with one thread, and what
the batches give is put together in their order: so on processors of one kind the bits are the same
for any number of workers. What travels are tokens, rules and results.

What a layer keeps for the backward pass is about 20 numbers for each token and channel (measured on
a Llama). On a CPU as many examples go together as keep no more than `Loaded.kept_bytes` in all
layers. Where that is none, and on a GPU, a batch that would keep more keeps each layer's input, and
computes again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from calibrate.datasets.examples import Example
from calibrate.errors import CalibrateError
from calibrate.model.batches import n_tokens
from calibrate.parallel import ONE_PROCESS, Jobs, run
from calibrate.transformers.betas import HeadBetas, checkpointed, head_betas
from calibrate.transformers.folders import ModelFolder

MODEL_PACKAGES = ("torch", "transformers")  # whose versions results of a model depend on
T = TypeVar("T")
_SMALL = 5_000_000  # parameters: with fewer, one thread is as fast
MAX_KEPT_BYTES = 1 << 29  # of what a batch keeps for its backward pass, on a CPU
_KEPT = 20  # numbers for each token and channel
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class Loaded(NamedTuple):
    """A model, and the betas of its heads."""

    model: PreTrainedModel
    heads: HeadBetas
    held: AbstractContextManager[HeadBetas] | None = None  # `heads` are in force as long as this
    kept_bytes: int = MAX_KEPT_BYTES


class Source(NamedTuple):
    """The source that a model is loaded from."""

    path: Path
    fingerprint: str
    dtype: str
    device: str
    allow_unexpected: bool = False  # see `ModelFolder.load`


Task = Callable[[Loaded], T]


@dataclass(frozen=True, eq=False)
class Runner:
    """Calls tasks with a model."""

    load: Callable[[], Loaded]  # called for each task, and loads once in a process
    device: str = "cpu"  # of the model, in each process
    jobs: Jobs = ONE_PROCESS

    def run(
        self, tasks: Sequence[Task[T]], done: Callable[[int, T], None] = lambda number, result: None
    ) -> list[T]:
        """The results of all tasks in their order; `done` is called with each as it arrives.

        Raises:
          CalibrateError: the model does not load, or whatever a task raises; see also `jobs.run`.
          CoefficientsError: the model does not look attention up.
        """
        numbered = [partial(_call, self.load, number, task) for number, task in enumerate(tasks)]
        results = run(numbered, self.jobs, lambda result: done(*result))
        return [result for _, result in results]

    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of all heads of the model."""
        return self.run([_heads])[0]


@contextmanager
def running(source: Source, jobs: Jobs = ONE_PROCESS) -> Iterator[Runner]:
    """Opens a runner of passes of a model here, or in workers, until the block ends."""
    if jobs.uses_workers:
        yield Runner(partial(load_in_worker, source), source.device, replace(jobs, threads=1))
        return
    with ExitStack() as stack:

        @cache
        def load() -> Loaded:
            folder = ModelFolder(source.path)
            model = folder.load(source.dtype, source.device, source.allow_unexpected)
            stack.enter_context(_threads_for(model))
            return Loaded(model, stack.enter_context(head_betas(model)))

        yield Runner(load, source.device)


@contextmanager
def _threads_for(model: PreTrainedModel) -> Iterator[None]:
    """One thread for a small model, whose threads would wait for each other most of the time.

    On a busy processor they took five times the processor time of one, and thrice its wall time.
    """
    before = torch.get_num_threads()
    if model.num_parameters() < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _call(load: Callable[[], Loaded], number: int, task: Task[T]) -> tuple[int, T]:
    return number, task(load())


def _heads(loaded: Loaded) -> list[tuple[int, int]]:
    return loaded.heads.heads


@lru_cache(maxsize=1)
def load_in_worker(source: Source) -> Loaded:
    """The model of a source, which this process loads once; CalibrateError if it is another one."""
    torch.set_num_threads(1)
    folder = ModelFolder(source.path)
    if folder.fingerprint() != source.fingerprint:
        raise CalibrateError(
            f"{source.path} holds another model where a worker runs; copy the model there"
        )
    model = folder.load(source.dtype, source.device, source.allow_unexpected)
    held = head_betas(model)
    return Loaded(model, held.__enter__(), held)


@contextmanager
def convert_out_of_memory(examples: Sequence[Example]) -> Iterator[None]:
    """Raises CalibrateError where PyTorch runs out of memory on a batch."""
    try:
        yield
    except (MemoryError, RuntimeError) as failure:  # PyTorch has a class of its own on GPUs only
        words = str(failure).lower()
        if not isinstance(failure, MemoryError) and not any(w in words for w in _NO_MEMORY):
            raise
        raise CalibrateError(
            f"out of memory at {len(examples)} x {len(examples[0].tokens):,} tokens; give shorter "
            "examples, or load the model in bfloat16"
        ) from failure


@contextmanager
def bounded_memory(examples: Sequence[Example], loaded: Loaded) -> Iterator[None]:
    """The same where gradients are taken: the model's layers keep no more than a bounded memory."""
    fits = _n_fitting(loaded, examples) > 0
    with convert_out_of_memory(examples), nullcontext() if fits else checkpointed(loaded.model):
        yield


def parts(loaded: Loaded, examples: Sequence[Example]) -> list[slice]:
    """A batch in parts that may be kept for the backward pass; whole where there are none."""
    on_cpu = loaded.model.device.type == "cpu"
    size = (on_cpu and _n_fitting(loaded, examples[:1])) or len(examples)
    return [slice(first, first + size) for first in range(0, len(examples), size)]


def _n_fitting(loaded: Loaded, examples: Sequence[Example]) -> int:
    """The number of times that these examples' memory for the backward pass fits into the limit."""
    model = loaded.model
    config = model.config.get_text_config()
    size = config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return loaded.kept_bytes // int(_KEPT * n_tokens(examples) * size)
