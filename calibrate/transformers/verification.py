"""Verification that a model applies a registered fit."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from calibrate.errors import CoefficientsError
from calibrate.transformers.attention import attention_function, registered, require_own
from calibrate.transformers.parts import PLAIN, fit_of, in_part, mark, note_verified, paths_of
from calibrate.transformers.probing import Run, is_attention, probe


def verify(model: PreTrainedModel, *, plain: Collection[str] = (), **inputs: Any) -> None:
    """Raises unless all softmax attention of a model looks up a registered fit.

    Transformers accepts any registered name, for models too that do not look it up everywhere: a
    pooling head, say, would continue with plain softmax. One forward pass (in evaluation mode,
    without gradients, on plain softmax) proves it: every attention module must run, and no softmax
    may weigh values but through registered attention. A model that calls a fit is verified by its
    first call; this is for models that may never call it, and for those that are compiled, where
    fits with entries per layer, or for a part, apply only once the model is verified.

    Its limits: seen is what those inputs run (long inputs take other code in some models). A
    softmax spelled out in exponentials is not seen; one that mixes other things than items by a
    matrix product (streams of the residual) is named, and can be excepted by `plain`.

    Args:
      model: any of Transformers' models.
      plain: what may keep plain softmax, or not run: names of classes, or pieces of paths, as the
        part of `register`.
      inputs: what the model is called with; if none are given, a few tokens.
    Raises:
      CoefficientsError: there is no softmax attention; some of it, named, has an attention
        implementation that is not a registered fit, keeps plain softmax or does not run; other
        attention or masks were registered under the fit's name; the model does not run without
        inputs of yours; or it lacks the fit's part, layers or heads.
    """
    verify_run(model, inputs, [plain] if isinstance(plain, str) else plain)


def verify_run(
    model: Any, run: Run, plain: Collection[str] = (), may_be_idle: bool = False
) -> None:
    """The same, with inputs or a call that runs the model.

    Args:
      may_be_idle: whether attention modules may stay without a call.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    names, paths = verify_lookups(model), paths_of(model)
    watch = probe(model, run, names, attention_function(PLAIN))
    paths |= paths_of(model)  # some models replace modules while they run
    if names_of_plain := _named(watch.plain, paths, plain):
        raise CoefficientsError(
            f"{type(model).__name__} keeps plain softmax in {names_of_plain}; verify the part that "
            "is to have a fit, or except these by plain="
        )
    idle = [m for m in model.modules() if is_attention(m) and m not in watch.ran]
    idle = [m for m in idle if not any(is_attention(x) for x in m.modules() if x is not m)]
    names_of_idle = "" if may_be_idle else _named(idle, paths, plain)
    if names_of_idle:
        raise CoefficientsError(
            f"{type(model).__name__} did not run {names_of_idle}; give verify(model, **inputs) "
            "that run them, or except these by plain="
        )
    mark(watch.reached, paths)
    for name in names:
        heads = {module: n for module, (used, n) in watch.reached.items() if used == name}
        _verify_fit(model, name, heads, paths, idle if may_be_idle else [])
        for module in heads:
            note_verified(module, registered[name])


def _named(
    modules: Iterable[nn.Module], paths: Mapping[nn.Module, str], excepted: Collection[str]
) -> str:
    """The paths and classes of modules that are not excepted, for a message; "" if all are."""
    names = sorted({(paths[module], type(module).__name__) for module in modules})
    return ", ".join(
        f"{path} ({name})"
        for path, name in names
        if not any(word == name or word in path for word in excepted)
    )


def _verify_fit(
    model: nn.Module,
    name: str,
    n_heads: Mapping[nn.Module, int],
    paths: Mapping[nn.Module, str],
    idle: Collection[nn.Module],
) -> None:
    """Raises CoefficientsError if the fit names a part, layers or heads that the model lacks.

    Modules that are idle may be of the part, and have layers.
    """
    fit, part, layers, _ = registered[name]
    covered = [module for module in n_heads if in_part(part, paths[module])]
    idle = [module for module in idle if in_part(part, paths[module])]
    if not covered and not idle:
        all_paths = ", ".join(sorted({paths[module] for module in n_heads}))
        raise CoefficientsError(
            f"{fit.reference} is registered for part {part!r}, and {type(model).__name__} has "
            f"attention in {all_paths or 'none'}; register it for one of these"
        )
    for module in covered:
        fit_of(module, registered[name]).by_head(n_heads[module])
    absent = set(layers) - {getattr(module, "layer_idx", None) for module in (*covered, *idle)}
    if absent:
        raise CoefficientsError(
            f"{fit.reference} has entries for layers {sorted(absent)}, "
            f"which {type(model).__name__} does not have; load the fit of this model"
        )


def verify_lookups(model: PreTrainedModel) -> set[str]:
    """The names of the fits that the parts of a model look up.

    Raises:
      CoefficientsError: it has no attention, a part looks up no registered fit, or the fit's name
        has been registered anew with other functions.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    parts = [part for part in parts if _has_attention(part)]
    if not parts:
        raise CoefficientsError(f"{type(model).__name__} has no softmax attention")
    for part in parts:
        name, model_type = part.config._attn_implementation, type(part).__name__
        if not part._can_set_attn_implementation():
            raise CoefficientsError(
                f"{model_type} does not look attention up by name: it continues with plain "
                "softmax; give a model that does, such as a Llama"
            )
        if name not in registered:
            raise CoefficientsError(
                f"{model_type} has attention implementation {name!r}; register a fit, and load the "
                "model with attn_implementation= its name"
            )
        require_own(name)  # the probe replaces what is registered, and would not see it
    return {part.config._attn_implementation for part in parts}


def _has_attention(model: PreTrainedModel) -> bool:
    """True if it has attention of its own, not only in inner models with another configuration."""
    inner = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is not model.config
    ]
    not_own = {module for part in inner for module in part.modules()}
    return any(is_attention(module) for module in model.modules() if module not in not_own)
