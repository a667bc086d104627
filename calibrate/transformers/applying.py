"""Application of a fit to a model of Transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from calibrate.errors import CoefficientsError
from calibrate.store.coefficient_file import MODEL_KEY, require_original
from calibrate.store.fit import Fit, identity
from calibrate.store.inverse_temperature import check_fit
from calibrate.transformers.attention import (
    NAME,
    attend_with,
    has_module_fit,
    set_module_fit,
    temporary_attention,
)
from calibrate.transformers.verification import (
    AttentionModules,
    modules_by_layer,
    require_all_heads,
    verify,
)

AnyModel = TypeVar("AnyModel", bound=nn.Module)


def apply(model: AnyModel, fit: Fit, *, part: str | None = None, **inputs: Any) -> AnyModel:
    """Applies a fit in the attention of a model of Transformers, and returns the model.

    First the model is verified, since parts of some models have their own code for attention, and
    would continue with plain softmax. One forward pass, in evaluation mode and without gradients,
    must run every attention module, and no softmax may weigh values except in attention that takes
    the fit. Then the model gets the attention implementation "calibrate", and each attention module
    its fit: the fit of its layer, by `layer_idx`, if the fit has entries for layers.

    Another fit replaces the first. Copies and pickles of the model keep the fit.
    `model.set_attn_implementation("sdpa")` restores stock attention, and "calibrate" the fit.
    Attention that was not verified raises CoefficientsError when it runs, as in a model loaded
    with `attn_implementation="calibrate"`.

    Limits of the verification: it sees only the code that the inputs run (long inputs take other
    code in some models). It does not see a softmax spelled out in exponentials. It takes a softmax
    for attention if a matrix product mixes other things than items by it (streams of the residual);
    `part` leaves that out.

    Args:
      model: any model of Transformers, or the result of torch.compile on one.
      fit: from `calibrate.load`; per head: along the query heads.
      part: a piece of the paths of attention modules, with `*` for numbers: "encoder_attn", or
        "decoder.layers.*.self_attn". Only these modules are verified and get the fit; others keep
        the fit that they have, or plain softmax. A model of encoder and decoder, which count their
        layers each from 0, needs it for entries per layer.
      inputs: inputs of the model for the verification; without any, a few tokens.
    Raises:
      CoefficientsError: no fit was given; the model is an export, whose weights carry a fit; the
        model, or its part, has no softmax attention; an attention module, named in the message,
        keeps plain softmax or does not run; the fit names layers or heads that do not exist, or a
        layer number that several modules have; it names heads, and the model runs under tensor
        parallelism; or the model does not run on a few tokens. The model is unchanged.
    Reference: Velickovic et al. 2024, section 3.

    >>> import calibrate
    >>> from calibrate.transformers import apply
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 10}
    >>> config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    >>> model = apply(LlamaForCausalLM(config), calibrate.load("max-retrieval"))
    >>> model.config._attn_implementation
    'calibrate'
    """
    check_fit(fit)
    inner: Any = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    _require_original(inner, fit)
    modules = verify(inner, inputs, part)
    fits = _fits_of_modules(fit, modules)
    others_have_fits = _is_applied(inner)
    inner.set_attn_implementation(NAME)
    for module in modules.others:
        if not (others_have_fits and has_module_fit(module)):
            set_module_fit(module, identity())
    for module, module_fit in fits.items():
        set_module_fit(module, module_fit)
    return model


@contextmanager
def applied_fit(model: PreTrainedModel, fit: Fit, modules: AttentionModules) -> Iterator[None]:
    """Applies a fit to a model with verified attention modules until the block ends.

    Raises:
      CoefficientsError: the fit names layers or heads that do not exist, or several modules; or the
        model carries a fit already.
    """
    _require_original(model, fit)
    fits = _fits_of_modules(fit, modules)

    def attend(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
        return attend_with(fits[module], module, *inputs, **options)

    with temporary_attention(model, attend):
        yield


def _require_original(model: nn.Module, fit: Fit) -> None:
    """Raises CoefficientsError if the weights of a model carry a fit, unless beta is 1."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not fit.is_identity:
            require_original(type(model).__name__, getattr(part.config, MODEL_KEY, None))


def _is_applied(model: nn.Module) -> bool:
    """True if a fit is applied in the model, or in a part of it."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return any(part.config._attn_implementation == NAME for part in parts)


def _fits_of_modules(fit: Fit, modules: AttentionModules) -> dict[nn.Module, Fit]:
    """The fit of each attention module of the part; identity in layers without entries.

    Raises:
      CoefficientsError: the fit names layers or heads that the model lacks, a layer number of
        several modules, or heads while this process has a part of them.
    """
    fits = dict.fromkeys(modules.n_heads, fit)
    layers = {entry.layer for entry in fit.entries if entry.layer is not None}
    if layers:
        module_of = modules_by_layer(modules.n_heads, modules.paths)
        if absent := layers - module_of.keys():
            raise CoefficientsError(
                f"{fit.reference} has entries for layers {sorted(absent)}, "
                f"which {modules.model} does not have; load the fit of this model"
            )
        fits = {
            module: fit.layer(layer) if layer in layers else identity()
            for layer, module in module_of.items()
        }
    for module, module_fit in fits.items():
        if module_fit.has_heads:
            require_all_heads(module, modules.n_heads[module])
        module_fit.by_head(modules.n_heads[module])
    return fits
