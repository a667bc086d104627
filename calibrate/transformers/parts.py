"""Parts of a model: which attention modules a fit is for, where layers have the same number twice.

A module's path is its name in the model with `*` for numbers: "decoder.layers.*.encoder_attn". The
attention of an encoder, of a decoder, and of a decoder to the encoder have one path each, and count
their layers each from 0. A part is any piece of these paths, such as "encoder_attn".
"""

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any, NamedTuple

from torch import compiler, nn

from calibrate.errors import CoefficientsError
from calibrate.store.coefficients import Coefficients, identity

# Attributes of attention modules in verified models.
_PATHS = "_calibrate_paths"
_FIT = "_calibrate_fit"  # the number of an `Applied`, and the module's fit in it
_VERIFIED = "_calibrate_verified"  # the numbers of what a model was verified with

_count = count()


class Applied(NamedTuple):
    """A registered fit, and where it applies."""

    fit: Coefficients
    part: str | None  # None means the whole model
    layers: dict[int, Coefficients]  # of those that entries name; empty if all are alike
    number: int  # its own


def applied(fit: Coefficients, part: str | None = None) -> Applied:
    """A fit for a part of a model, with its entries by layer."""
    layers = {entry.layer for entry in fit.entries if entry.layer is not None}
    return Applied(fit, part, {layer: fit.layer(layer) for layer in layers}, next(_count))


PLAIN = applied(identity())


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """The path of each of its modules."""
    return {module: re.sub(r"\b\d+\b", "*", name) for name, module in model.named_modules()}


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


def note_layer(
    layer: int, module: Any, module_of: dict[int, Any], paths: Mapping[Any, str]
) -> None:
    """Notes in `module_of` that a layer number is of a module.

    Raises:
      CoefficientsError: another module has the same.
    """
    if (other := module_of.setdefault(layer, module)) is not module:
        raise_if_duplicate_layer(layer, [paths[other], paths[module]])


def in_part(part: str | None, path: str) -> bool:
    """True if a module's path is of a part; None is the whole model."""
    return part is None or part in path


def mark(attention: Collection[nn.Module], paths: Mapping[nn.Module, str]) -> None:
    """Tells attention modules their path, and all paths with the same layer number."""
    of_layer = defaultdict(list)
    for module in attention:
        of_layer[getattr(module, "layer_idx", None)].append(paths[module])
    for module in attention:
        setattr(module, _PATHS, (paths[module], of_layer[getattr(module, "layer_idx", None)]))
        setattr(module, _FIT, None)


def note_verified(module: nn.Module, chosen: Applied) -> None:
    """Notes that a verification of a model with this fit has reached the module."""
    setattr(module, _VERIFIED, {chosen.number, *getattr(module, _VERIFIED, ())})


def is_verified(module: nn.Module, chosen: Applied) -> bool:
    """True if a verification of its model with this fit has reached the module."""
    return chosen.number in getattr(module, _VERIFIED, ())


def fit_of(module: Any, chosen: Applied) -> Coefficients:
    """The fit of one attention module: identity outside of the part, or in layers without entries.

    Raises:
      CoefficientsError: the fit is for a part or for layers, and the module's are not known, or
        another attention of the model is the same part and layer.
    """
    if chosen.part is None and not chosen.layers:
        return chosen.fit
    known: tuple[int, Coefficients] | None = getattr(module, _FIT, None)
    if known is None or known[0] != chosen.number:
        known = chosen.number, _find_fit(module, chosen)
        if not compiler.is_compiling():
            # A compiler shares a graph among layers that look up no number. A fit that it met in
            # `layers` first it would take from there, for every layer: this has to be a copy.
            known = chosen.number, copy.copy(known[1])
            setattr(module, _FIT, known)
    return known[1]


def _find_fit(module: Any, chosen: Applied) -> Coefficients:
    fit, part, layers, _ = chosen
    paths: tuple[str, list[str]] | None = getattr(module, _PATHS, None)
    if paths is None:
        raise CoefficientsError(
            f"{fit.reference} is for some layers or for one part; call verify(model) first, which "
            f"finds those of {type(module).__name__}"
        )
    own, of_layer = paths
    if not in_part(part, own):
        return PLAIN.fit
    if not layers:
        return fit
    layer = layer_of(module)
    raise_if_duplicate_layer(layer, [path for path in of_layer if in_part(part, path)])
    return layers.get(layer, PLAIN.fit)


def raise_if_duplicate_layer(layer: int, paths: list[str]) -> None:
    """Raises CoefficientsError if one layer number stands for several attention modules."""
    if len(paths) > 1:
        named = ", ".join(sorted(set(paths)))
        raise CoefficientsError(f"layer {layer} is each of {named}; give part= of one of them")
