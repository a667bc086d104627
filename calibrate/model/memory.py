"""Memory of a pass: parts of a batch that fit for the backward pass, and an error if it runs out.

What a layer keeps for the backward pass is about 20 numbers for each token and channel (measured on
a Llama). On a CPU as many examples go together as keep no more than MAX_KEPT_BYTES in all layers.
Where that is none, and on a GPU, a batch that would keep more keeps each layer's input, and
computes again.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from calibrate.datasets.examples import Example
from calibrate.errors import CalibrateError
from calibrate.model.answers import n_tokens
from calibrate.transformers.betas import checkpointed

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_KEPT = 20  # numbers for each token and channel
MAX_KEPT_BYTES = 1 << 29


@contextmanager
def convert_out_of_memory(
    examples: Sequence[Example], backward: PreTrainedModel | None = None
) -> Iterator[None]:
    """Raises CalibrateError where PyTorch runs out of memory on a batch.

    If gradients are taken of `backward`, its layers keep no more than a bounded memory.
    """
    try:
        with ExitStack() as stack:
            if backward is not None and not _n_kept(backward, examples):
                stack.enter_context(checkpointed(backward))
            yield
    except (MemoryError, RuntimeError) as failure:  # PyTorch has a class of its own on GPUs only
        words = str(failure).lower()
        if not isinstance(failure, MemoryError) and not any(w in words for w in _NO_MEMORY):
            raise
        raise CalibrateError(
            f"out of memory at {len(examples)} x {len(examples[0].tokens):,} tokens; give shorter "
            "--lengths, or --dtype bfloat16"
        ) from failure


def parts(model: PreTrainedModel, examples: Sequence[Example]) -> list[slice]:
    """A batch in parts that may be kept for the backward pass; whole where there are none."""
    on_cpu = model.device.type == "cpu"
    size = (on_cpu and _n_kept(model, examples[:1])) or len(examples)
    return [slice(first, first + size) for first in range(0, len(examples), size)]


def _n_kept(model: PreTrainedModel, examples: Sequence[Example]) -> int:
    """The number of times that these examples' memory for the backward pass fits into the limit."""
    config = model.config.get_text_config()
    size = config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return MAX_KEPT_BYTES // int(_KEPT * n_tokens(examples) * size)
