"""Verification of a model of Transformers by one forward pass: which attention can take a fit.

The path of a module is its name in the model with `*` for numbers: "decoder.layers.*.encoder_attn".
The attention of an encoder, of a decoder, and of a decoder to the encoder have one path each, and
count their layers each from 0. A part is a piece of a path, such as "encoder_attn".
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from calibrate.errors import CoefficientsError
from calibrate.store.fit import identity
from calibrate.transformers.attention import attend_with, temporary_attention

Run = Mapping[str, Any] | Callable[[], Any]  # the inputs of a model, or a function that runs it
Paths = Mapping[nn.Module, str]
N_TOKENS = 8
_PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::matmul")
_JOINED = ("aten::cat", "aten::stack", "aten::constant_pad_nd")


class AttentionModules(NamedTuple):
    """The attention modules of a verified model."""

    model: str  # its class
    n_heads: dict[nn.Module, int]  # query heads of each module of the part
    others: list[nn.Module]  # modules outside of the part
    paths: Paths


def verify(model: PreTrainedModel, run: Run, part: str | None = None) -> AttentionModules:
    """Verifies that all softmax attention of a model, or of its part, is registered attention.

    In one forward pass, with the baseline softmax, every attention module must run, and no softmax
    may weigh values except in registered attention.

    Args:
      run: inputs, or a function that runs the model; without inputs, a few tokens.
    Raises:
      CoefficientsError: there is no softmax attention; an attention module of the part keeps plain
        softmax or does not run (the message names it); the part has no attention; or the model does
        not run on a few tokens.
    """
    paths = module_paths(model)
    require_lookups(model, part)
    watch = probe(model, run)
    paths |= module_paths(model)  # some models replace modules while they run
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
    """Raises CoefficientsError unless a model has attention, and its part looks it up by name."""
    models = [inner for inner in model.modules() if isinstance(inner, PreTrainedModel)]
    own = {inner: [x for x in _own_modules(inner) if is_attention(x)] for inner in models}
    if not any(own.values()):
        raise CoefficientsError(f"{type(model).__name__} has no softmax attention")
    paths = module_paths(model)
    for inner, modules in own.items():
        is_meant = any(in_part(part, paths[module]) for module in modules)
        if is_meant and not inner._can_set_attn_implementation():
            raise CoefficientsError(
                f"{type(inner).__name__} does not look attention up by name: it continues with "
                "plain softmax; give a model that does, such as a Llama"
            )


def _own_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a model, without those of inner models with another configuration."""
    inner = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is not model.config
    ]
    not_own = {module for part in inner for module in part.modules()}
    return [module for module in model.modules() if module not in not_own]


def module_paths(model: nn.Module) -> dict[nn.Module, str]:
    """The path of each module of a model."""
    return {module: re.sub(r"\b\d+\b", "*", name) for name, module in model.named_modules()}


def in_part(part: str | None, path: str) -> bool:
    """True if a path belongs to a part; None is the whole model."""
    return part is None or part in path


def _named(modules: Iterable[nn.Module], paths: Paths, part: str | None) -> str:
    """The paths and classes of the modules of a part, for a message; "" without any."""
    names = {(paths[x], type(x).__name__) for x in modules if in_part(part, paths[x])}
    return ", ".join(f"{path} ({name})" for path, name in sorted(names))


def require_all_heads(module: Any, n_heads: int) -> None:
    """Raises CoefficientsError if this process runs a part of a module's heads.

    Each process counts its heads from 0. In one process, a layer with fewer heads than the
    configuration says has all of its heads.
    """
    of_model = getattr(getattr(module, "config", None), "num_attention_heads", None)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and isinstance(of_model, int) and n_heads < of_model:
        raise CoefficientsError(
            f"{type(module).__name__} has {n_heads} of {of_model} heads in this process: under "
            "tensor parallelism, they cannot be told apart; load the model without tp_plan="
        )


def layer_number(module: Any) -> int:
    """The layer number of an attention module.

    Raises:
      CoefficientsError: the module has none.
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
    modules_of = defaultdict[int, list[nn.Module]](list)
    for module in modules:
        modules_of[layer_number(module)].append(module)
    for layer, same_number in modules_of.items():
        require_one_module(layer, same_number, paths)
    return {layer: module for layer, (module,) in modules_of.items()}


def require_one_module(layer: int, modules: Iterable[nn.Module], paths: Paths) -> None:
    """Raises CoefficientsError if several attention modules have one layer number."""
    if len(set(modules)) > 1:
        names = ", ".join(sorted({paths[module] for module in modules}))
        raise CoefficientsError(f"layer {layer} is each of {names}; give part= of one of them")


class Probe(TorchDispatchMode):
    """Watches every operation of a forward pass.

    A softmax is attention if the class of its module is named so, or if a matrix product takes its
    result, possibly masked, padded, cut or reshaped before. The softmax of a router, whose weights
    choose or scale experts, is not.

    Attributes:
      reached: modules that called registered attention, with their numbers of query heads.
      plain: modules in which another softmax, or a fused kernel, weighed values.
      ran: all modules that were called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reached: dict[nn.Module, int] = {}
        self.plain: dict[nn.Module, None] = {}
        self.ran: set[nn.Module] = set()
        self._running: list[nn.Module] = []
        self._weights = WeakTensorKeyDictionary()  # from softmax -> the module that called it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._running:
            self._follow(func, tree_leaves((args, kwargs)), tree_leaves(out))
        return out

    def _follow(self, func: Any, inputs: list[Any], outputs: list[Any]) -> None:
        name = func._schema.name
        if "attention" in name or "transformer_encoder" in name:
            self.plain[self._running[-1]] = None
        elif "softmax" in name and "log_softmax" not in name:
            self._weights.update(dict.fromkeys(_tensors(outputs), self._running[-1]))
            if is_attention(self._running[-1]):
                self.plain[self._running[-1]] = None
        else:
            weights = [x for x in _tensors(inputs) if x in self._weights]
            if weights and name in _PRODUCTS:
                self.plain.update(dict.fromkeys(self._weights[x] for x in weights))
            elif weights:
                kept = func.is_view or name in _JOINED
                for x in _tensors(outputs):
                    if kept or x.numel() in {w.numel() for w in weights}:
                        self._weights[x] = self._weights[weights[0]]

    def attend(self, module: nn.Module, query: Tensor, *inputs: Any, **options: Any) -> Any:
        """Baseline attention of a module; records the module."""
        self.reached[module] = query.shape[1]
        with _disable_current_modes():
            return attend_with(identity(), module, query, *inputs, **options)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches modules, and all operations."""

        def enter(module: nn.Module, _: Any) -> None:
            self.ran.add(module)
            self._running.append(module)

        def leave(*_: Any) -> None:
            self._running.pop()

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self)
            yield


def is_attention(module: nn.Module) -> bool:
    """True if the class of a module is named so."""
    return "Attention" in type(module).__name__


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def probe(model: PreTrainedModel, run: Run) -> Probe:
    """Runs one forward pass in evaluation mode, without gradients, and restores the model.

    Attention is that of the baseline. Without inputs the model gets a few tokens.

    Raises:
      CoefficientsError: no inputs were given, and the model does not run on a few tokens.
    """
    watch, modes = Probe(), {module: module.training for module in model.modules()}
    inputs = {} if callable(run) else run or _small_inputs(model)
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.compiler.set_stance("force_eager"),
            temporary_attention(model, watch.attend),
            watch.watching(),
        ):
            run() if callable(run) else model(**inputs)
    except Exception as failure:
        if run:
            raise
        raise CoefficientsError(
            f"{type(model).__name__} does not run on {' and '.join(inputs) or 'nothing'} alone "
            f"({first_line(failure)}); give apply(model, fit, **inputs) what it is called with"
        ) from failure
    finally:
        for module, mode in modes.items():
            module.training = mode
    return watch


def first_line(failure: Exception) -> str:
    """The first line of an error's message, at most 300 characters."""
    message = f"{failure} is unknown or missing" if isinstance(failure, KeyError) else str(failure)
    return (message.strip() or type(failure).__name__).splitlines()[0][:300]


def _small_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """A few tokens, by the names of the model's inputs."""
    names = inspect.signature(model.forward).parameters
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or N_TOKENS
    ids = torch.arange(N_TOKENS, device=model.device)[None] % vocabulary
    return {name: ids for name in ("input_ids", "decoder_input_ids") if name in names}
