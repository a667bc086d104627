"""Attention that a model has for the length of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from calibrate.transformers.attention import make_mask, registered
from calibrate.transformers.parts import Applied


@contextmanager
def temporary_attention(
    model: PreTrainedModel, name: str, attend: Callable[..., Any], chosen: Applied
) -> Iterator[None]:
    """Registers attention under a name and gives it to the model; then all is as it was.

    Args:
      attend: what Transformers calls in each attention layer.
      chosen: the fit that it applies.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    was = [(part.config, part.config._attn_implementation) for part in parts]
    registered[name] = chosen
    AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(name, attend)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, before in was:
            config._attn_implementation = before
        del registered[name]
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)
