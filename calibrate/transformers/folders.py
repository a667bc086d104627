"""A model's folder on disk: its fingerprint, its tokenizer, and the causal model itself.

Nothing is downloaded, and no code of the folder runs: weights are safetensors or GGUF. Transformers
prints a report of loading and continues: it draws missing weights at random, drops tensors that the
class does not know, and takes weights in a type of few bits without their scales. Such a model is
refused.
"""

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_accelerate_available

from calibrate.errors import CalibrateError
from calibrate.storage.atomic_io import read_bytes
from calibrate.storage.fingerprints import fingerprint_of, require_folder
from calibrate.storage.safetensors_file import FLOATS, read_header
from calibrate.store.coefficient_file import MODEL_KEY
from calibrate.transformers.folder_files import (
    CONFIG,
    MAX_CONFIG_BYTES,
    Headers,
    weight_files,
)
from calibrate.transformers.verification import N_TOKENS, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OTHER_WEIGHTS = "transformers_weights"  # a key of CONFIG
_N_SHOWN = 3
_ROTARY = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_\w+)\.weight")
_LAYERS = re.compile(r"(n|num)_(hidden_)?layers?|block_count")
_HEADS = re.compile(r"(n|num)_(attention_)?heads?|head_count")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_OWN_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


class ModelFolder:
    """A folder that Transformers can load: config.json and safetensors, or a .gguf file.

    Of several .gguf files in a folder, give one. The fingerprint is that of `files`, which are the
    weights and the configuration.

    Raises:
      CalibrateError: the folder cannot be read, or holds no such model.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        file = self.path if self.path.suffix == ".gguf" and self.path.is_file() else None
        self.path = file.parent if file else self.path
        require_folder(self.path)
        self.name = self.path.resolve().name or "model"
        self.files = [file] if file else weight_files(self.path)
        self.headers = {path: read_header(path) for path in self.shards}
        self._options: dict[str, Any] = dict(_LOCAL)
        if self.is_gguf:
            self._options["gguf_file"] = self.files[0].name
        with in_one_line(f"cannot read the configuration in {path}"):
            self._require_counts()
            self.config = AutoConfig.from_pretrained(self.path, **self._options)
            self._is_quantised = _is_quantised(self.config)
        self._require_own_weights()
        if self.is_gguf:
            self._mark_export()
        more = [self.path / name for name in getattr(type(self.config), "extra_files", ())]
        more = [path for path in more if path.is_file() and path not in self.files]
        self.files += more
        self.headers |= {path: read_header(path) for path in more}

    @property
    def _text_config(self) -> Any:
        """The configuration of the text model, or the whole if there are no other parts."""
        return self.config.get_text_config(decoder=True)

    @property
    def context(self) -> int | None:
        """The context length in tokens; None if the configuration does not say."""
        most = getattr(self._text_config, "max_position_embeddings", None)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise CalibrateError(
                f"{self.path} has max_position_embeddings = {most!r}; it must be a positive integer"
            )
        return most

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self._text_config.vocab_size)

    @property
    def is_gguf(self) -> bool:
        """True if the model is a .gguf file."""
        return self.files[0].suffix == ".gguf"

    @property
    def shards(self) -> list[Path]:
        """The files of safetensors."""
        return [path for path in self.files if path.suffix == ".safetensors"]

    def _mark_export(self) -> None:
        """Writes the fit that a .gguf file carries into the configuration, as a folder has it."""
        from calibrate.storage.gguf_header import read_gguf

        if key := read_gguf(self.files[0]).keys.get(f"{MODEL_KEY}.fit"):
            fit = key.value.decode(errors="replace") if isinstance(key.value, bytes) else key.value
            setattr(self.config, MODEL_KEY, {"fit": str(fit)[:200]})

    def _require_own_weights(self) -> None:
        """Raises CalibrateError if the configuration names another file of weights to load."""
        for part in (self.config, self._text_config):
            if named := getattr(part, _OTHER_WEIGHTS, None):
                raise CalibrateError(
                    f"{self.path / CONFIG} has {_OTHER_WEIGHTS} = {named!r}, which Transformers "
                    "loads in place of the usual files; load the model with Transformers, and give "
                    "the folder that its save_pretrained writes"
                )

    def _require_counts(self) -> None:
        """Refuses more layers and heads than the weights can have: they would fill the memory."""
        if self.is_gguf:
            from calibrate.storage.gguf_header import read_gguf

            file = read_gguf(self.files[0])
            shapes = [tensor.shape for tensor in file.tensors.values()]
            stored: Any = {name.split(".")[-1]: key.value for name, key in file.keys.items()}
        else:
            shapes = [x.shape for header in self.headers.values() for x in header.values()]
            stored = json.loads(read_bytes(self.path / CONFIG, MAX_CONFIG_BYTES))
        n_layers = max(_counts(stored, _LAYERS), default=1)
        n_heads = max(_counts(stored, _HEADS), default=1)
        rows = sum(max(shape, default=1) for shape in shapes)
        if n_layers > len(shapes) or n_layers * n_heads > rows:
            raise CalibrateError(
                f"{self.path} declares {n_layers:,} layers of {n_heads:,} heads, and has "
                f"{len(shapes):,} tensors with {rows:,} rows; fetch it again"
            )

    def dtype(self, requested: str = "auto") -> str:
        """The dtype to load the weights in: "auto" is bfloat16 if they are, and else float32."""
        if requested == "auto":
            return "bfloat16" if self.config.dtype == torch.bfloat16 else "float32"
        return requested

    def fingerprint(self) -> str:
        """sha256 of the weights and the configuration."""
        return fingerprint_of(self.files)

    def tokenizer(self) -> Any:
        """The tokenizer of the folder's files, or of the .gguf file; CalibrateError without one."""
        own = any((self.path / name).exists() for name in _OWN_TOKENIZER)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, **(_LOCAL if own else self._options)
            )
            if len(tokenizer) > len(tokenizer.get_added_vocab()):  # some classes load without words
                return tokenizer
            reason = "it knows special tokens alone"
        except Exception as failure:
            reason = first_line(failure)
        raise CalibrateError(
            f"{self.path} has no tokenizer that loads ({reason}); put the model's tokenizer files "
            "there (tokenizer.json), or give prompts of token ids alone"
        )

    def load(self, dtype: str, device: str = "cpu") -> PreTrainedModel:
        """The frozen model in evaluation mode, with weights of a dtype.

        Raises:
          CalibrateError: the model does not load, lacks weights, drops tensors, or sees later
            tokens.
        """
        options = {"config": self.config} | _unpacked() if self.is_gguf else {}
        model, info = self._loaded(device, dtype=DTYPES[dtype], **options)
        self._require_whole(model, info)
        _require_causal(model)
        return model

    def require_whole(self) -> None:
        """Raises CalibrateError unless the files have exactly the weights of the model's class.

        Their headers are read; without the package accelerate, the weights too. A quantised model
        that this machine cannot run is not checked.
        """
        options = {"device_map": "meta"} if is_accelerate_available() else {}
        try:
            model, info = self._loaded(dtype="auto", **options)
        except CalibrateError:
            if self._is_quantised:
                return
            raise
        self._require_whole(model, info)

    def _loaded(
        self, device: str | None = None, **options: Any
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model, moved to a device if one is given, and what Transformers says of loading."""
        options = self._options | ({} if self.is_gguf else {"use_safetensors": True}) | options
        with in_one_line(f"cannot load the model in {self.path}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path, output_loading_info=True, **options
            )
            model: Any = loaded[0].eval().requires_grad_(False)
            model = model if device is None else model.to(device)
        return model, loaded[1]

    def _require_whole(self, model: PreTrainedModel, info: dict[str, Any]) -> None:
        name, unexpected = type(model).__name__, set(info["unexpected_keys"])
        if self.is_gguf:
            from calibrate.storage.gguf_header import read_gguf

            unexpected |= _dropped_of_gguf(model, read_gguf(self.files[0]).tensors)
        if missing := {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}:
            raise CalibrateError(
                f"{self.path} lacks weights of {name}: {_shown(missing)}; give the folder of a "
                "whole causal model"
            )
        faults = []
        if unscaled := {} if self._is_quantised else _unscaled(model, self.headers):
            types = " and ".join(sorted({*unscaled.values()}))
            faults.append(f"takes weights of {types} without their scales ({_shown(unscaled)})")
        if unexpected:
            n = len(unexpected)
            count = "a tensor" if n == 1 else f"{n:,} tensors"
            faults.append(f"drops {count} that {name} does not have ({_shown(unexpected)})")
        if faults:
            raise CalibrateError(
                f"{self.path}: Transformers {' and '.join(faults)}; give plain weights and the "
                "config.json that they were trained with, or what save_pretrained writes of the "
                "loaded model"
            )


def _counts(stored: dict[str, Any], names: re.Pattern[str]) -> Iterator[int]:
    """The integers under matching names in a configuration and its inner ones."""
    for name, value in stored.items():
        if isinstance(value, dict):
            yield from _counts(value, names)
        elif isinstance(value, int) and names.fullmatch(name):
            yield value


def _unpacked() -> dict[str, Any]:
    """Options that unpack weights: for packed ones, later versions may download kernels."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextlib.contextmanager
def in_one_line(message: str) -> Iterator[None]:
    """Silences loading, and turns errors of Transformers into a CalibrateError of one line."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        # The bar of a .gguf file is tqdm's own, which Transformers' `disable_progress_bar` leaves.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except CalibrateError:
        raise
    except MemoryError:
        raise CalibrateError(f"{message}: out of memory; load it in bfloat16") from None
    except Exception as failure:
        raise CalibrateError(
            f"{message} ({first_line(failure)}); give a causal model's folder that this version of "
            "Transformers loads"
        ) from failure
    finally:
        transformers_logging.set_verbosity(level)


def _require_causal(model: PreTrainedModel) -> None:
    """Raises CalibrateError if a later token changes the logits of an earlier one."""
    early = N_TOKENS // 2
    tokens = torch.arange(N_TOKENS, device=model.device).repeat(2, 1)
    tokens[1, early:] += 1
    with torch.no_grad():
        first, second = model(input_ids=tokens, use_cache=False).logits[:, :early].float()
    rounding = 1e-5 if model.dtype == torch.float32 else 1e-2
    if (first - second).abs().max() > rounding * first.abs().max():
        raise CalibrateError(
            f"{type(model).__name__} sees later tokens: it is not a causal model; give one that "
            "continues text"
        )


def _unscaled(model: PreTrainedModel, headers: Headers) -> dict[str, str]:
    """The types of weights other than plain floats, by name; without masks and counts."""
    ignored = [re.compile(x) for x in model._keys_to_ignore_on_load_unexpected or ()]
    prefix, weights = f"{model.base_model_prefix}.", {name for name, _ in model.named_parameters()}
    weights |= {name.removeprefix(prefix) for name in weights}
    return {
        name: tensor.dtype
        for header in headers.values()
        for name, tensor in header.items()
        if tensor.dtype not in FLOATS
        and (name.endswith("weight") or tensor.dtype.startswith("F") or name in weights)
        and not any(pattern.search(name) for pattern in ignored)
    }


def _dropped_of_gguf(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Tensors of a .gguf file that Transformers drops silently.

    They are factors of rotary positions, as in Llama 3, and biases for a class without biases.
    """
    has_biases = any(name.endswith("bias") for name in model.state_dict())
    return {
        name
        for name in names
        if _ROTARY.fullmatch(name) or (name.endswith(".bias") and not has_biases)
    }


def _is_quantised(config: Any) -> bool:
    """True if Transformers knows the quantisation of the weights, and applies their scales."""
    for part in (config, config.get_text_config(decoder=True)):
        if quantisation := getattr(part, "quantization_config", None):
            with contextlib.suppress(ValueError):  # without the name of a method
                keys = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
                return bool(AutoHfQuantizer.supports_quant_method(keys))
    return False


def _shown(names: Iterable[str]) -> str:
    """The first few names for a message."""
    names = sorted(names)
    return ", ".join([*names[:_N_SHOWN], *(["..."] if len(names) > _N_SHOWN else [])])
