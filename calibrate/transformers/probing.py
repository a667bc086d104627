"""Probe: which attention of a model looks up registered attention, in one forward pass."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

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

Run = Mapping[str, Any] | Callable[[], Any]  # what a model is called with, or calls it
N_TOKENS = 8
_PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::matmul")
_JOINED = ("aten::cat", "aten::stack", "aten::constant_pad_nd")


class Probe(TorchDispatchMode):
    """Watches every operation of a forward pass.

    Softmax is attention where the class is named so, or where its result is multiplied, as a
    matrix, with another: possibly masked, padded, cut or reshaped before. A router's, whose weights
    choose or scale experts, is not.

    Attributes:
      reached: modules that called registered attention, and how many query heads they have.
      plain: modules in which softmax weighed values otherwise, or a fused kernel did.
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
        """Plain attention of a module, which is noted."""
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
    """True if its class is named so."""
    return "Attention" in type(module).__name__


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def probe(model: PreTrainedModel, run: Run) -> Probe:
    """One forward pass, as in evaluation and without gradients, that leaves the model as it was.

    Attention is plain. Without inputs, a few tokens are given.

    Raises:
      CoefficientsError: no inputs were given, and the model does not run on those.
    """
    watch, modes = Probe(), {module: module.training for module in model.modules()}
    given = {} if callable(run) else run or _small_inputs(model)
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.compiler.set_stance("force_eager"),
            temporary_attention(model, watch.attend),
            watch.watching(),
        ):
            run() if callable(run) else model(**given)
    except Exception as failure:
        if run:
            raise
        raise CoefficientsError(
            f"{type(model).__name__} does not run on {' and '.join(given) or 'nothing'} alone "
            f"({first_line(failure)}); give apply(model, fit, **inputs) what it is called with"
        ) from failure
    finally:
        for module, mode in modes.items():
            module.training = mode
    return watch


def first_line(failure: Exception) -> str:
    """The message of an error, in 300 letters at most."""
    message = f"{failure} is unknown or missing" if isinstance(failure, KeyError) else str(failure)
    return (message.strip() or type(failure).__name__).splitlines()[0][:300]


def _small_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """A few tokens, by the names that the model gives its inputs."""
    names = inspect.signature(model.forward).parameters
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or N_TOKENS
    ids = torch.arange(N_TOKENS, device=model.device)[None] % vocabulary
    return {name: ids for name in ("input_ids", "decoder_input_ids") if name in names}
