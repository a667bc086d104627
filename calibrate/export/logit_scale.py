"""The key by which a model's configuration scales all its logits, and the model that has it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.export.architectures import (
    ScaleKey,
    architecture_of,
    architectures_with_key,
    require_supported,
)
from calibrate.export.configuration import soft_cap
from calibrate.export.numerical_check import attention_layers
from calibrate.export.plan import check_not_exported
from calibrate.export.preparation import KEY, read_configuration
from calibrate.storage.model_fingerprint import fingerprint_of
from calibrate.transformers.folder_files import CONFIG
from calibrate.transformers.folders import ModelFolder
from calibrate.transformers.loading_report import text_part


@dataclass(frozen=True)
class LogitScale:
    """The keys of a configuration by which a model scales and caps its logits."""

    key: ScaleKey
    value: float
    cap: tuple[str, float] | None = None  # key and cap of a soft-cap, which grows with beta

    def beta(self, beta: float) -> float:
        """The factor of logits that the nearest value of the key makes."""
        return self.key.beta(self.value, self.key.scaled(self.value, beta))

    def values(self, beta: float) -> dict[str, float]:
        """The values, by key, that multiply logits by beta, or what is nearest to it."""
        values = {self.key.name: self.key.scaled(self.value, beta)}
        return values | ({self.cap[0]: self.cap[1] * self.beta(beta)} if self.cap else {})


@dataclass(frozen=True)
class ScaledModel:
    """A model whose configuration has a key that scales its logits.

    Attributes:
      path: its folder, or its .gguf file.
      model_type: of the part that has attention, or the graph of a .gguf file.
      sizes: the numbers of layers and of query heads, and the context.
      layers: those that have attention.
      section: the part of its configuration that has the keys; None for the whole.
      config: that part, as Transformers reads it; None of a .gguf file.
    """

    path: Path
    model_type: str
    fingerprint: str
    scale: LogitScale
    sizes: tuple[int, int, int | None]
    layers: tuple[int, ...]
    section: str | None = None
    config: Any = None

    @property
    def is_gguf(self) -> bool:
        """True if the model is a .gguf file."""
        return self.config is None


def scaled_model(path: Path) -> ScaledModel:
    """The model in a folder or a .gguf file; CalibrateError if no key scales all its logits."""
    return _model_of_file(path) if path.suffix == ".gguf" else _model_of_folder(ModelFolder(path))


def _model_of_folder(folder: ModelFolder) -> ScaledModel:
    config = text_part(folder.config)
    require_supported(config, architectures_with_key())
    architecture = architecture_of(config)
    if architecture.scale_key is None or architecture.sinks:
        raise _without_key(config.model_type, bool(architecture.sinks))
    if folder.is_gguf:
        raise CalibrateError(f"{folder.path} has a .gguf file; give {folder.files[0]}")
    stored = read_configuration(folder.path / CONFIG)
    check_not_exported(folder.path, (stored.get(KEY) or {}).get("fit"))
    sections = getattr(type(folder.config), "sub_configs", {})
    section = next((x for x in sections if getattr(folder.config, x, None) is config), None)
    return ScaledModel(
        folder.path,
        config.model_type,
        folder.fingerprint(),
        logit_scale(config),
        (config.num_hidden_layers, config.num_attention_heads, folder.context),
        tuple(attention_layers(config, folder.path)),
        section,
        config,
    )


def _model_of_file(path: Path) -> ScaledModel:
    from calibrate.export.gguf_model import GgufModel

    model = GgufModel(path)
    key = model.graph.scale_key
    if key is None:
        raise _without_key(model.graph.name)
    check_not_exported(path, model.key("calibrate.fit"))
    name = f"{model.architecture}.{key.name}"
    value = _positive(name, model.key(name))
    return ScaledModel(
        path,
        model.architecture,
        fingerprint_of([path]),
        LogitScale(ScaleKey(name, key.power, key.is_integer), value),
        (model.n_layers, model.n_heads, model.context),
        tuple(range(model.n_layers)),
    )


def _without_key(model_type: str, has_sinks: bool = False) -> CalibrateError:
    types = ", ".join(x.model_type for x in architectures_with_key())
    reason = "its key leaves attention sinks as they are" if has_sinks else "it has none"
    return CalibrateError(
        f"no key of the configuration of a {model_type} scales all its logits: {reason}; export "
        f"its weights, or give a model of type {types}"
    )


def logit_scale(config: Any) -> LogitScale:
    """The keys of a configuration whose type has a key that scales logits."""
    key = architecture_of(config).scale_key
    assert key is not None
    return LogitScale(key, _positive(key.name, getattr(config, key.name, None)), soft_cap(config))


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise CalibrateError(f"{name} is {value!r} in the model, and must be a positive number")
    return float(value)
