"""A fit in vLLM's Transformers backend: its attention, its model classes, and what is refused.

The backend runs the code of Transformers. Its attention modules look up one function by the name
"vllm", and pass it queries of shape (1, heads of this rank, tokens, width). The tokens belong to
several sequences; `position_ids` counts each sequence from 0.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from calibrate.errors import CalibrateError
from calibrate.export.architectures import SOFT_CAP
from calibrate.export.plan import require_heads, require_made_for, slopes
from calibrate.store.coefficient_file import MODEL_KEY, require_original
from calibrate.store.fit import Fit, digest
from calibrate.store.inverse_temperature import Features, beta_at
from calibrate.transformers.folder_files import CONFIG, cached_snapshot
from calibrate.transformers.folders import ModelFolder

ANY_MODEL_VARIABLE = "CALIBRATE_VLLM_ANY_MODEL"
_ATTENTION = "vllm"
_ATTENTION_OF_VLLM = "attn"  # the attribute of an attention module with vLLM's own
_BETA = "calibrate_beta"  # the attribute of an attention module with a `QueryBeta`


class QueryBeta(nn.Module):
    """beta of this rank's heads of a layer, for queries at any positions.

    Args:
      fit: of the layer.
      heads: those of this rank, among `n_heads`.
      window: the most keys that a query sees; None means all up to its own.
    """

    table: Tensor  # (numbers, heads, 1), as `beta_at` takes it

    def __init__(self, fit: Fit, n_heads: int, heads: slice, window: int | None):
        super().__init__()
        numbers = torch.tensor(fit.by_head(n_heads), dtype=torch.float32)
        self.register_buffer("table", numbers[:, heads, None], persistent=False)
        self.fit, self.window = fit, window
        self.by_size = any(slopes(fit))

    def forward(self, query: Tensor, positions: Tensor | None) -> Tensor:
        """(1, heads, tokens or 1, 1) in float32.

        Args:
          query: (1, heads, tokens, width).
          positions: (1, tokens), from 0 in each sequence.
        """
        if query.shape[1] != self.table.shape[1]:
            raise CalibrateError(
                f"this rank has {query.shape[1]} heads of queries, and {self.table.shape[1]} were "
                "expected; serve the model without tensor parallelism"
            )
        log_n = torch.zeros(1, 1, device=query.device)
        if self.by_size:
            log_n = self._log_n(query, positions)
        H = log_n + self.fit.rule.min_entropy + 1 if self.fit.rule.by_entropy else None
        beta: Tensor = beta_at(Features(H, log_n), self.table, self.fit, torch)
        return beta[None, :, :, None]

    def _log_n(self, query: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None or positions.shape != (1, query.shape[2]):
            raise CalibrateError(
                "the model does not tell its attention the position of each token, which a rule "
                "of log n needs; serve a fit of constants"
            )
        n = positions + 1
        return (n if self.window is None else n.clamp(max=self.window)).float().log()


def apply_in_vllm(fit: Fit, any_model: bool) -> None:
    """Replaces vLLM's attention, and the model classes that its registry returns.

    Args:
      any_model: whether the model may have other files than those that the fit was made for.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.transformers.base import Base  # registers vLLM's attention

    attend = ALL_ATTENTION_FUNCTIONS[_ATTENTION]
    if getattr(attend, _BETA, False):  # a second call
        return
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention_with_beta(attend))
    registry: Any = type(ModelRegistry)
    registry.resolve_model_cls = _resolver(registry.resolve_model_cls, Base, fit, any_model)


def _attention_with_beta(attend: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's attention, of queries times beta."""

    def attend_with_beta(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        if options.get("s_aux") is not None:
            raise _not_exact("it has attention sinks, which beta would have to multiply too")
        beta = getattr(module, _BETA)(query, options.get("position_ids"))
        query = (query * beta).to(query.dtype)
        return attend(module, query, key, value, attention_mask, **options)

    setattr(attend_with_beta, _BETA, True)
    return attend_with_beta


def _resolver(
    resolve: Callable[..., Any], base: type, fit: Fit, any_model: bool
) -> Callable[..., Any]:
    """The registry's method that finds the class of a model; it returns classes with the fit."""

    def resolve_model_cls(registry: Any, architectures: Any, model_config: Any) -> tuple[Any, str]:
        model_class, architecture = resolve(registry, architectures, model_config=model_config)
        if getattr(model_config, "runner_type", None) == "draft":  # vLLM checks its guesses
            return model_class, architecture
        if not issubclass(model_class, base):
            raise CalibrateError(
                f"vLLM would run {architecture} by {model_class.__name__}, "
                f"where {fit.reference} is not applied; start it with --model-impl transformers"
            )
        return _class_with_fit(model_class, fit, any_model), architecture

    return resolve_model_cls


def _class_with_fit(model_class: Any, fit: Fit, any_model: bool) -> Any:
    """A subclass of a model class of vLLM's backend that applies a fit."""

    class WithFit(model_class):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = ""):
            # Part of the hash by which vLLM finds compiled programs.
            vllm_config.additional_config[_BETA] = digest(fit)
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.calibrate_cache = vllm_config.load_config.download_dir
            attach_betas(self, fit)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
            loaded = super().load_weights(weights)
            is_first = self.tp_group.rank_in_group == 0 and self.pp_group.is_first_rank
            if is_first and not any_model:
                _require_own_model(fit, self.model_config, self.calibrate_cache)
            return loaded

    WithFit.__name__, WithFit.__qualname__ = (
        model_class.__name__,
        model_class.__qualname__,
    )
    return WithFit


def attach_betas(model: Any, fit: Fit) -> None:
    """Gives each attention module of a model of vLLM's backend the betas of its heads.

    Raises:
      CalibrateError: vLLM would not apply the fit exactly.
      CoefficientsError: the fit names layers or heads that the model lacks, or the model is an
        export, which carries one.
    """
    config = model.text_config
    require_original(
        model.model_config.model, getattr(model.model_config.hf_config, MODEL_KEY, None)
    )
    n_heads, n_ranks = config.num_attention_heads, model.tp_group.world_size
    require_heads(fit, config.num_hidden_layers, n_heads)
    if cap := getattr(config, SOFT_CAP, None):
        raise _not_exact(f"{SOFT_CAP} is {cap}, and would have to grow with beta")
    if config._attn_implementation != _ATTENTION:
        raise _not_exact(f"its attention is {config._attn_implementation!r}")
    if n_heads % n_ranks:
        raise _not_exact(f"{n_heads} heads are not divided evenly among {n_ranks} ranks")
    of_rank = n_heads // n_ranks
    first = model.tp_group.rank_in_group * of_rank
    for module in list(model.model.modules()):
        if hasattr(module, _ATTENTION_OF_VLLM) and hasattr(module, "layer_idx"):
            beta = QueryBeta(
                fit.layer(module.layer_idx),
                n_heads,
                slice(first, first + of_rank),
                getattr(module, _ATTENTION_OF_VLLM).sliding_window,
            )
            _require_causal(module, beta)
            setattr(module, _BETA, beta.to(model.device_config.device))


def _require_causal(module: Any, beta: QueryBeta) -> None:
    if beta.by_size and not getattr(module, "is_causal", True):
        raise _not_exact("a query sees later keys too, so that n is not its position")


def _not_exact(reason: str) -> CalibrateError:
    return CalibrateError(
        f"vLLM cannot apply a fit to this model exactly: {reason}; serve it with "
        "calibrate.transformers"
    )


def _require_own_model(fit: Fit, model_config: Any, download_dir: str | None) -> None:
    """Raises CoefficientsError if the model's files are not those that a fit was made for."""
    if fit.fingerprint is None:
        return
    remedy = f"serve the model that it was made for, or set {ANY_MODEL_VARIABLE}=1"
    with _model_folder(model_config, download_dir) as folder:
        fingerprint = ModelFolder(folder).fingerprint()
    require_made_for(fit, fingerprint, model_config.model, remedy)


@contextmanager
def _model_folder(model_config: Any, download_dir: str | None) -> Iterator[Path]:
    """The folder of the files that vLLM loads.

    vLLM downloads weights to `download_dir`, and the configuration to the Hub's cache. Then this is
    a folder of links to both.
    """
    name, revision = model_config.model, model_config.revision
    if Path(name).exists():
        yield Path(name)
        return
    weights = cached_snapshot(name, revision, download_dir)
    if (weights / CONFIG).exists():
        yield weights
        return
    with TemporaryDirectory() as links:
        (Path(links) / CONFIG).symlink_to(cached_snapshot(name, revision) / CONFIG)
        for path in weights.iterdir():
            (Path(links) / path.name).symlink_to(path.absolute())
        yield Path(links)
