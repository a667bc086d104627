"""Capture in Transformers: attention logits of a running model, at given positions."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.files.logits_recorder import Recorder
from calibrate.torch.query_blocks import masked_logits
from calibrate.transformers.attention import (
    attention_function,
    is_causal_alone,
    mask_and_bias,
    registered,
    temporary_attention,
)
from calibrate.transformers.parts import PLAIN, applied, in_part, own_layer, paths_of
from calibrate.transformers.verification import verify_lookups

_NAME = "calibrate-capture"


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
    """Records what the heads of a model have before softmax, while it runs.

        with capture(model, "runs/captured") as recorder:
            for tokens, answer in prompts:
                recorder.next(query=-1, target=answer)
                model(tokens)

    After each `recorder.next`, the next call of every layer is recorded: scaled logits of all its
    query heads, capped, with position biases and masks, in float32; a sink is one more item. The
    model runs with the fit that it has, if any, and else as it would; its attention implementation
    is what it was when the block ends, also by an error.

    Args:
      model: any that looks up registered attention.
      folder: a new one, of npz files as `calibrate collect --logits` takes them.
      part: records attention modules whose path contains it, numbers written as `*`: "encoder_attn"
        or "decoder.layers.*.self_attn". None means all, if each layer number is of one module: in a
        model of encoder and decoder it is not.
      layers: their numbers, `layer_idx`; None means all.
      heads: query heads; None means all.
      max_bytes: of the folder. Of more forward passes a fair sample stays.
    Yields:
      A Recorder: `next(query, target)` names the positions, and `left_out` counts rows whose target
      the query does not see (a sliding window, say), which are not recorded.
    Raises:
      CalibrateError: the folder is not empty, a position is out of range, nothing was recorded, or
        the cache of a sliding window has lost keys.
      CoefficientsError: the model does not look up registered attention, or a layer number is of
        several modules.
    """
    recorder = Recorder(Path(folder), max_bytes, layers, heads)
    chosen = registered.get(model.config._attn_implementation, applied(PLAIN))
    attend = attention_function(chosen.fit, chosen.part)
    paths, module_of = paths_of(model), dict[int, Any]()

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if in_part(part, paths[module]):
            layer = own_layer(module, module_of, paths)
            if recorder.wants(layer):
                _refuse_cut_keys(layer, key.shape[2], options.get("position_ids"))
                at = torch.tensor(recorder.queries(len(query), query.shape[2]), device=query.device)
                with torch.no_grad():
                    z = _logits(module, query, key, attention_mask, at, **options)
                recorder.add(layer, z.cpu().numpy(), key.shape[2])
        return attend(module, query, key, value, attention_mask, **options)

    with temporary_attention(model, _NAME, record, chosen):
        verify_lookups(model)
        yield recorder
        recorder.finish()


def _refuse_cut_keys(layer: int, n_keys: int, positions: Tensor | None) -> None:
    """Raises CalibrateError if the cache of a window has lost keys: a target would be another."""
    if positions is not None and int(positions.max()) >= n_keys:
        raise CalibrateError(
            f"layer {layer} has {n_keys} keys at position {int(positions.max())}: its window's "
            "cache has lost the first ones, and targets would be other keys; run each prompt in "
            "one forward pass, or leave the layer out by layers="
        )


def _logits(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, at: Tensor,
    scaling: float | None = None, is_causal: bool | None = None,
    position_bias: Tensor | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, sinks: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """(batch, heads, keys, and the sink if there is one) of the queries at one position each."""
    B, N, T, W = query.shape
    S = key.shape[2]

    def at_queries(x: Tensor, width: int) -> Tensor:
        return x.expand(B, N, T, width).gather(2, at[:, None, None, None].expand(B, N, 1, width))

    both = mask_and_bias(mask, position_bias)
    row = None if both is None else at_queries(both, S)
    real, bias = (row, None) if row is not None and row.dtype == torch.bool else (None, row)
    if is_causal_alone(module, mask, T, is_causal):
        real = torch.arange(S, device=key.device) <= at[:, None, None, None]
    sinks = s_aux if sinks is None else sinks
    if sinks is not None:
        sinks = at_queries(sinks[:, None, None] if sinks.ndim == 1 else sinks, 1)
    scale = W**-0.5 if scaling is None else scaling
    z, real = masked_logits(
        at_queries(query, W).float(), key.float(), real, bias, sinks, 0, scale, False, softcap
    )
    return (z if real is None else z.masked_fill(~real, -torch.inf))[:, :, 0]
