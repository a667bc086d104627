"""Capture of attention logits in Transformers: those of a running model, at given positions."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.rows.recorder import Recorder
from calibrate.store.fit import identity
from calibrate.transformers import attention
from calibrate.transformers.verification import (
    in_part,
    module_paths,
    require_all_heads,
    require_lookups,
    require_one_module,
)


@contextmanager
def capture(
    model: PreTrainedModel,
    folder: Path,
    *,
    part: str | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    max_bytes: int = 10**9,
) -> Iterator[Recorder]:
    """Records the logits of a model's heads before softmax, while the model runs.

        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes))
        >>> with capture(model, "captured") as recorder:
        ...     recorder.next(query=-1, target=3)  # the position that it should attend to
        ...     _ = model(torch.arange(8)[None])

    After each `recorder.next`, the next call of every layer is recorded: scaled logits of all its
    query heads, capped, with position biases and masks, in float32; a sink is one more item. The
    model runs with the fit that it has, if any, and is restored when the block ends.

    Args:
      model: any that looks up registered attention.
      folder: a new one, of npz files as `calibrate collect --logits` takes them.
      part: a piece of the paths of the attention modules to record, as in `apply`. None means all,
        if no two have the same layer number, as in a model of encoder and decoder.
      layers: their numbers, `layer_idx`; None means all. Modules without `layer_idx` are counted
        as they run, from 0: ALBERT runs one module twelve times, which are its layers 0 to 11.
      heads: query heads; None means all.
      max_bytes: of the folder; a fair sample of the forward passes that exceed it stays.
    Yields:
      A Recorder: `next(query, target)` names the positions, and `left_out` counts rows whose target
      the query does not see (a sliding window, say), which are not recorded.
    Raises:
      CalibrateError: the folder is not empty, a position is out of range, nothing was recorded, or
        the cache of a sliding window has lost keys.
      CoefficientsError: the model does not look up registered attention, or a layer number is of
        several modules, or the model runs under tensor parallelism.
    """
    recorder = Recorder(Path(folder), max_bytes, layers, heads)
    has_fit = model.config._attn_implementation == attention.NAME
    attend = attention.attend if has_fit else partial(attention.attend_with, identity())
    numbers = _LayerNumbers(module_paths(model))
    record = _recording_attention(numbers, attend, part, recorder)
    require_lookups(model)
    begin = model.register_forward_pre_hook(lambda *_: numbers.begin_pass())
    try:
        with attention.temporary_attention(model, record):
            yield recorder
            recorder.finish()
    finally:
        begin.remove()


class _LayerNumbers:
    """The layer number of each call of attention: `layer_idx`, or the order of the calls."""

    def __init__(self, paths: Mapping[Any, str]):
        self.paths = paths
        self._module_of: dict[int, Any] = {}
        self._calls = 0  # in this forward pass, of modules without a number

    def begin_pass(self) -> None:
        """Starts to count from 0."""
        self._calls = 0

    def number_call(self, module: Any) -> int:
        """The layer number of a call of this module.

        Raises:
          CoefficientsError: another module has the same number.
        """
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            layer, self._calls = self._calls, self._calls + 1
        other = self._module_of.setdefault(layer, module)
        require_one_module(layer, [other, module], self.paths)
        return int(layer)


def _recording_attention(
    numbers: _LayerNumbers,
    attend: Callable[..., tuple[Tensor, None]],
    part: str | None,
    recorder: Recorder,
) -> Callable[..., tuple[Tensor, None]]:
    """Attention that records the logits of layers, and then calls `attend`."""

    def record(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if in_part(part, numbers.paths[module]):
            layer = numbers.number_call(module)
            if recorder.wants(layer):
                require_all_heads(module, query.shape[1])
                _require_all_keys(layer, key.shape[2], options.get("position_ids"))
                rows = recorder.queries(len(query), query.shape[2])
                positions = torch.tensor(rows, device=query.device)
                with torch.no_grad():
                    z, real = attention.head_logits(
                        module, query, key, attention_mask, query_positions=positions, **options
                    )
                z = z if real is None else z.masked_fill(~real, -torch.inf)
                recorder.add(layer, z[:, :, 0].float().cpu().numpy(), key.shape[2])
        return attend(module, query, key, value, attention_mask, **options)

    return record


def _require_all_keys(layer: int, n_keys: int, positions: Tensor | None) -> None:
    """Raises CalibrateError if a cache has lost keys, so that positions name other keys."""
    if positions is not None and int(positions.max()) >= n_keys:
        raise CalibrateError(
            f"layer {layer} has {n_keys} keys at position {int(positions.max())}: its "
            "window's cache has lost the first; run each prompt in one forward pass"
        )
