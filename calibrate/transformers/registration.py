"""Registration of a fit with Transformers, and the verification of a model by its first call.

Transformers accepts a registered name for any model, also for one that does not look attention up
everywhere. So the first attention module of a model that calls a registered fit, and is not
verified, has `verify` check the model: with the arguments of the call that runs, which are found
in the frames above. Under torch.compile there are no frames, and nothing is checked.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from types import FrameType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, Cache, PreTrainedModel

from calibrate.errors import CoefficientsError
from calibrate.store.coefficients import Coefficients, check_fit
from calibrate.transformers.attention import attention_function, put, registered
from calibrate.transformers.parts import Applied, applied, is_verified, note_verified
from calibrate.transformers.probing import Run, first_line
from calibrate.transformers.verification import verify_run

# Transformers treats a model whose implementation contains one of these as that implementation.
_RESERVED = ("eager", "sdpa", "flash", "flex", "paged")
_PLAIN = (Tensor, str, bytes, int, float, NoneType, torch.dtype, torch.device)  # unchanged by calls
_CALL = nn.Module._wrapped_call_impl.__code__  # its frames have what a module was called with


def register(name: str, coefficients: Coefficients, *, part: str | None = None) -> None:
    """Registers a fit with Transformers as an attention implementation of that name.

    Models loaded with `attn_implementation=name`, or given it by `set_attn_implementation`, apply
    it in every attention layer; with entries per layer, by the layer's `layer_idx`. A function that
    makes masks is registered too, or causality would be lost.

    The first call of a model verifies it, as `verify` does, by a second forward pass with the same
    arguments. Modules that it does not run are verified when they do.

    Masks may be boolean or additive (more than 9,000 below the highest number of a query's row
    means masked); causality, padding, sliding windows, grouped queries, a logit soft-cap, attention
    sinks (items of the entropy like others), position biases and dropout are honoured.

    Args:
      name: letters, digits, ".", "_" and "-". The same name again changes the fit of all models
        that use it.
      coefficients: a fit, from `calibrate.load`; per head: along the query heads.
      part: what the paths of its attention modules contain, with `*` for numbers: "encoder_attn",
        or "decoder.layers.*.self_attn". The rest of the model keeps plain softmax. A model of
        encoder and decoder, which count their layers each from 0, needs it for entries per layer.
    Raises:
      CoefficientsError: no fit was given; in a forward pass, one that does not fit the heads, a
        model with attention that keeps plain softmax, a module that does not know its layer, or a
        layer number that several modules have; under `torch.compile`, entries per layer, or a part,
        for a model that is not verified.
      ValueError: a name that is taken, or that Transformers interprets; in a forward pass, a model
        that chooses keys by other arguments than its mask.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    is_name = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)
    taken = name in AttentionInterface() and name not in registered
    if not is_name or taken or any(word in name.lower() for word in _RESERVED):
        raise ValueError(
            f"name is {name!r}; give a new one of letters, digits, '.', '_' or '-', and none of "
            f"{', '.join(_RESERVED)}, which Transformers interprets"
        )
    chosen = applied(fit, part)
    attend = attention_function(chosen)
    put(name, chosen, attend if fit.is_identity else _verifying(attend, chosen))


def _verifying(attend: Callable[..., Any], chosen: Applied) -> Callable[..., Any]:
    """Attention that has the first call of a model verify it."""

    @wraps(attend)
    def attend_once_verified(module: Any, query: Tensor, *inputs: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and not is_verified(module, chosen):
            _verify_by_call(module, query.shape[2])
            note_verified(module, chosen)  # also if no model calls it that could be verified
        return attend(module, query, *inputs, **options)

    return attend_once_verified


def _verify_by_call(module: nn.Module, n_queries: int) -> None:
    """Verifies the model whose call has reached an attention module, if there is one.

    A call that cannot be repeated is replaced by one with a few tokens.
    """
    call = _outermost_call(module)
    if call is None:  # the module is called by itself, or through a function of the user's
        return
    model, inputs, options = call.f_locals["self"], call.f_locals["args"], call.f_locals["kwargs"]
    runs: list[Run] = [{}]
    if _can_be_repeated((*inputs, *options.values()), n_queries):
        runs = [partial(model, *inputs, **_without_cache(options)), {}]
    failures = []
    for run in runs:
        try:
            verify_run(model, run, may_be_idle=True)
        except CoefficientsError:
            raise
        except Exception as failure:
            failures.append(failure)
        else:
            return
    raise CoefficientsError(
        f"{type(model).__name__} cannot be verified by its first call ({first_line(failures[0])}); "
        "call verify(model, **inputs) before"
    ) from failures[0]


def _can_be_repeated(arguments: Iterable[Any], n_queries: int) -> bool:
    """True unless a call changes its arguments, as caches are, but for one that was empty before.

    A cache in which this call has put its own keys already has as many as there are queries.
    """
    for x in tree_leaves(list(arguments)):
        if isinstance(x, Cache):
            if x.get_seq_length() not in (0, n_queries):
                return False
        elif not isinstance(x, _PLAIN):
            return False
    return True


def _without_cache(options: dict[str, Any]) -> dict[str, Any]:
    kept = {name: x for name, x in options.items() if not isinstance(x, Cache)}
    return kept if len(kept) == len(options) else kept | {"use_cache": False}


def _outermost_call(module: nn.Module) -> FrameType | None:
    """The frame of the outermost call of a model that looks up a fit, and has this module."""
    found = None
    for frame in _calls():
        model = frame.f_locals["self"]
        if isinstance(model, PreTrainedModel) and model.config._attn_implementation in registered:
            found = frame if any(x is module for x in model.modules()) else found
    return found


def _calls() -> Iterator[FrameType]:
    """The frames of calls of modules that run, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back
