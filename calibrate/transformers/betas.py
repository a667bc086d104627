"""Inverse temperatures of a model's heads, or rules of them, that gradients flow to.

Logits are linear in the query, so stock attention of queries times beta computes softmax(beta z)
and its gradient. With a soft-cap, a bias or a sink they are not linear: then beta multiplies the
matrix of logits.

Letters for shapes: B batch, N query heads, K key heads, T queries, S keys, W width.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from calibrate.core.rule import RuleForm, beta_of
from calibrate.errors import CalibrateError
from calibrate.torch.attention import log_n_keys
from calibrate.torch.softmax import entropy
from calibrate.torch.softmax_passes import apply_mask, log_n_unmasked
from calibrate.transformers import attention
from calibrate.transformers.verification import (
    AttentionModules,
    modules_by_layer,
    require_all_heads,
    verify,
)

_NOT_LINEAR = ("softcap", "position_bias", "s_aux", "sinks")  # in the query


class HeadRules(NamedTuple):
    """A rule for each head of a model; gradients flow to the coefficients."""

    rule: RuleForm
    coefficients: Tensor  # (coefficients of the kind, heads)
    domain: tuple[float, ...]
    is_baseline: bool = False  # beta is 1 at any entropy, so H has no gradient

    def beta(self, H: Tensor | None, log_n: Tensor, heads: slice) -> Tensor:
        """(B, N, T) beta, from entropies (None for a rule by size alone) and log n."""
        of_heads = list(self.coefficients[:, heads, None].to(log_n.dtype))
        beta: Tensor = beta_of(H, log_n, of_heads, self.domain, self.rule, torch)
        return beta


@dataclass(eq=False)
class HeadBetas:
    """The heads of a model and the beta of each; gradients flow to the betas."""

    modules: AttentionModules
    # (B, heads), or (1, heads) for any batch, or (B or 1, heads, T) for each query; None means 1.
    betas: Tensor | None = None
    rules: HeadRules | None = None  # in place of `betas`, a rule for each head
    # Factors of the queries, before a soft-cap; they leave a sink as it is. Shaped as `betas`.
    query_factors: Tensor | None = None
    heads: list[tuple[int, int]] = field(init=False)  # (layer, head) of all query heads
    columns: dict[Any, slice] = field(init=False)  # by attention module

    def __post_init__(self) -> None:
        self.heads, self.columns = [], {}
        module_of = modules_by_layer(self.modules.n_heads, self.modules.paths)
        for layer, module in sorted(module_of.items()):
            n_heads, first = self.modules.n_heads[module], len(self.heads)
            require_all_heads(module, n_heads)
            self.columns[module] = slice(first, first + n_heads)
            self.heads += [(layer, head) for head in range(n_heads)]

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention as Transformers calls it in each layer, with (batch, heads, length, width)."""
        columns, rules = self.columns[module], self.rules
        factors = self._of_columns(self.query_factors, columns)
        query = query if factors is None else (query * factors).to(query.dtype)
        additive = attention_mask is not None and attention_mask.dtype != torch.bool
        by_entropy = rules is not None and rules.rule.by_entropy and not rules.is_baseline
        if additive or by_entropy or any(options.get(name) is not None for name in _NOT_LINEAR):
            return self._attend_with_logits(module, query, key, value, attention_mask, **options)
        beta = self._of_columns(self.betas, columns)
        if rules is not None:
            is_causal = options.get("is_causal")
            causal = attention.is_causal_alone(module, attention_mask, query.shape[2], is_causal)
            H = None
            if rules.rule.by_entropy:
                H = _entropy_of_keys(module, query, key, attention_mask, **options)
            beta = rules.beta(H, log_n_keys(query, key, attention_mask, causal), columns)
            beta = beta[..., None]
        if beta is not None:
            query = (query * beta).to(query.dtype)
        out: tuple[Tensor, None] = AttentionInterface()["sdpa"](
            module, query, key, value, attention_mask, **options
        )
        return out

    @staticmethod
    def _of_columns(of_heads: Tensor | None, columns: slice) -> Tensor | None:
        """(B or 1, N, T or 1, 1) the numbers of one layer's heads."""
        if of_heads is None:
            return None
        of_layer = of_heads[:, columns]
        return of_layer.reshape(*of_layer.shape[:2], -1, 1)

    def _attend_with_logits(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Multiplies the matrix of logits, in float32 or wider; a sink is an item too.

        Masked logits are 0 in the product, or the gradient of beta would be 0 times -inf. All
        logits are centred, or a row of finite padding alone would overflow.
        """
        (B, N, T, _), (K, S), columns = query.shape, key.shape[1:3], self.columns[module]
        z, real = attention.head_logits(module, query, key, mask, **options)
        z = z - apply_mask(z.detach(), real).amax(-1, keepdim=True)
        z = z if real is None else z.masked_fill(~real, 0)
        beta = self._of_columns(self.betas, columns)
        if self.rules is not None:
            H = entropy(z, where=real) if self.rules.rule.by_entropy else None
            log_n = log_n_unmasked(apply_mask(z.detach(), real))[..., 0]
            beta = self.rules.beta(H, log_n, columns)[..., None]
        z = z if beta is None else z * beta
        z = z if real is None else z.masked_fill(~real, -torch.inf)
        weights = z.softmax(-1)[..., :S].reshape(B, K, N // K * T, S)
        out = (weights @ value.to(weights.dtype)).reshape(B, N, T, value.shape[-1])
        return out.to(query.dtype).transpose(1, 2).contiguous(), None


@torch.no_grad()
def _entropy_of_keys(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """(B, N, T) the entropies of a layer's queries under the baseline, without a gradient."""
    z, real = attention.head_logits(module, query, key, mask, **options)
    H: Tensor = entropy(z, where=real)
    return H


@contextmanager
def head_betas(model: PreTrainedModel, run: Callable[[], Any] | None = None) -> Iterator[HeadBetas]:
    """Gives the heads of a frozen model inverse temperatures until the block ends.

        with head_betas(model) as heads:
            heads.betas = torch.ones(1, len(heads.heads), requires_grad=True)
            model(tokens)

    `run` calls a model that does not run on a few tokens alone.

    Raises:
      CoefficientsError: the model fails `verify`, attention modules have no layer number or share
        one, or the model runs under tensor parallelism.
    """
    heads = HeadBetas(verify(model, run or {}))
    with attention.temporary_attention(model, heads.attend):
        yield heads


@contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Keeps only the inputs of layers for the backward pass, which computes the rest again."""
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # uncovers the method of the class


class TokenExample(Protocol):
    """A prompt and its answer as token ids."""

    @property
    def tokens(self) -> np.ndarray:
        """(length,) int32."""
        ...

    @property
    def start(self) -> int:
        """The first token of the answer."""
        ...


def answer_logits(model: PreTrainedModel, examples: Sequence[TokenExample]) -> Tensor:
    """Logits (examples, tokens, vocabulary) of one forward pass over examples of equal length.

    If the model can leave out logits, only those from the first answer on are computed.
    """
    tokens = torch.from_numpy(np.stack([example.tokens for example in examples])).long()
    largest, known = int(tokens.max()), model.config.get_text_config().vocab_size
    if largest >= known:
        raise CalibrateError(
            f"an example has token {largest}, and this model knows 0 to {known - 1}; give the "
            "model that the examples were made for"
        )
    tokens = tokens.to(model.device)
    n_kept = max(len(example.tokens) - example.start for example in examples)
    inputs = tokens[:, :-1]
    takes_number = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": n_kept} if takes_number else {}
    mask = torch.ones_like(inputs)
    output = model(input_ids=inputs, attention_mask=mask, use_cache=False, **options)
    logits: Tensor = output.logits[:, -n_kept:]
    return logits
