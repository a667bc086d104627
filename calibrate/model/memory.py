"""Memory of a pass: parts of a batch that fit for the backward pass, and an error if it runs out.

What a layer keeps for the backward pass is about 20 numbers for each token and channel (measured on
a Llama). On a CPU as many examples go together as keep no more than `Loaded.kept_bytes` in all
layers. Where that is none, and on a GPU, a batch that would keep more keeps each layer's input, and
computes again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from calibrate.datasets.examples import Example
from calibrate.errors import CalibrateError
from calibrate.model.batches import n_tokens
from calibrate.model.runner import Loaded
from calibrate.transformers.betas import checkpointed

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_KEPT = 20  # numbers for each token and channel


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
