"""Verification of a model: which of its attention can take a fit, by one forward pass.

A module's path is its name in the model with `*` for numbers: "decoder.layers.*.encoder_attn". The
attention of an encoder, of a decoder, and of a decoder to the encoder have one path each, and count
their layers each from 0. A part is any piece of these paths, such as "encoder_attn".
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.errors import CoefficientsError
from calibrate.transformers.probing import Run, is_attention, probe

Paths = Mapping[nn.Module, str]


class AttentionModules(NamedTuple):
    """The attention modules of a verified model."""

    model: str  # its class
    n_heads: dict[nn.Module, int]  # query heads of those of the part
    others: list[nn.Module]  # those outside of the part
    paths: Paths


def verify(model: PreTrainedModel, run: Run, part: str | None = None) -> AttentionModules:
    """Verifies that all softmax attention of a model, or of its part, looks attention up by name.

    In one forward pass, on plain softmax, every attention module must run, and no softmax may
    weigh values but through registered attention.

    Args:
      run: inputs, or a function that runs the model; if there are none, a few tokens.
    Raises:
      CoefficientsError: there is no softmax attention; some of the part, named, keeps plain softmax
        or does not run; no attention is of the part; or the model does not run on a few tokens.
    """
    paths = paths_of(model)
    require_lookups(model, part)
    watch = probe(model, run)
    paths |= paths_of(model)  # some models replace modules while they run
    if plain := _named(watch.plain, paths, part):
        raise CoefficientsError(
            f"{type(model).__name__} keeps plain softmax in {plain}; apply the fit to a part= "
            "without them, or to a submodel"
        )
    if idle := _named(_idle_attention(model, watch.ran), paths, part):
        raise CoefficientsError(
            f"{type(model).__name__} did not run {idle}; give apply(model, fit, **inputs) that "
            "run these, or a part= without them"
        )
    n_heads = {module: n for module, n in watch.reached.items() if in_part(part, paths[module])}
    if not n_heads:
        known = ", ".join(sorted({paths[module] for module in watch.reached}))
        raise CoefficientsError(
            f"part is {part!r}, and {type(model).__name__} has attention in {known or 'none'}; "
            "give a piece of one of these"
        )
    others = [
        module
        for module, path in paths.items()
        if (is_attention(module) or module in watch.reached) and not in_part(part, path)
    ]
    return AttentionModules(type(model).__name__, n_heads, others, paths)


def _idle_attention(model: nn.Module, ran: Collection[nn.Module]) -> list[nn.Module]:
    """Attention modules that did not run; of nested ones, the innermost."""
    return [
        module
        for module in model.modules()
        if is_attention(module)
        and module not in ran
        and not any(is_attention(inner) for inner in module.modules() if inner is not module)
    ]


def require_lookups(model: PreTrainedModel, part: str | None = None) -> None:
    """Raises CoefficientsError unless a model has attention, and looks its part up by name."""
    models = [inner for inner in model.modules() if isinstance(inner, PreTrainedModel)]
    own = {inner: [x for x in _own_modules(inner) if is_attention(x)] for inner in models}
    if not any(own.values()):
        raise CoefficientsError(f"{type(model).__name__} has no softmax attention")
    paths = paths_of(model)
    for inner, modules in own.items():
        is_meant = any(in_part(part, paths[module]) for module in modules)
        if is_meant and not inner._can_set_attn_implementation():
            raise CoefficientsError(
                f"{type(inner).__name__} does not look attention up by name: it continues with "
                "plain softmax; give a model that does, such as a Llama"
            )


def _own_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Its modules, without those of inner models with another configuration."""
    inner = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is not model.config
    ]
    not_own = {module for part in inner for module in part.modules()}
    return [module for module in model.modules() if module not in not_own]


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """The path of each of its modules."""
    return {module: re.sub(r"\b\d+\b", "*", name) for name, module in model.named_modules()}


def in_part(part: str | None, path: str) -> bool:
    """True if a module's path is of a part; None is the whole model."""
    return part is None or part in path


def _named(modules: Iterable[nn.Module], paths: Paths, part: str | None) -> str:
    """The paths and classes of the modules of a part, for a message; "" if there are none."""
    names = {(paths[x], type(x).__name__) for x in modules if in_part(part, paths[x])}
    return ", ".join(f"{path} ({name})" for path, name in sorted(names))


def require_all_heads(module: Any, n_heads: int) -> None:
    """Raises CoefficientsError if a process runs a part of a module's heads, and counts from 0.

    Some models have fewer heads in a layer than their configuration says; in one process, these are
    all of them.
    """
    of_model = getattr(getattr(module, "config", None), "num_attention_heads", None)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and isinstance(of_model, int) and n_heads < of_model:
        raise CoefficientsError(
            f"{type(module).__name__} has {n_heads} of {of_model} heads in this process: under "
            "tensor parallelism, they cannot be told apart; load the model without tp_plan="
        )


def layer_of(module: Any) -> int:
    """The number that a module gives its layer.

    Raises:
      CoefficientsError: it has none.
    """
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None:
        raise CoefficientsError(
            f"{type(module).__name__} has no layer_idx, so its heads have no names; leave it out "
            "by part="
        )
    return layer


def modules_by_layer(modules: Iterable[nn.Module], paths: Paths) -> dict[int, nn.Module]:
    """The one module of each layer number.

    Raises:
      CoefficientsError: a module has no number, or several have the same.
    """
    of_layer = defaultdict[int, list[nn.Module]](list)
    for module in modules:
        of_layer[layer_of(module)].append(module)
    for layer, those in of_layer.items():
        raise_if_duplicate_layer(layer, those, paths)
    return {layer: module for layer, (module,) in of_layer.items()}


def raise_if_duplicate_layer(layer: int, modules: Iterable[nn.Module], paths: Paths) -> None:
    """Raises CoefficientsError if one layer number stands for several attention modules."""
    if len(those := set(modules)) > 1:
        named = ", ".join(sorted({paths[module] for module in those}))
        raise CoefficientsError(f"layer {layer} is each of {named}; give part= of one of them")
