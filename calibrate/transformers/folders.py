"""A model's folder on disk: its fingerprint, its tokenizer, and the causal model itself.

Nothing is fetched and nothing in the folder is executed: weights are safetensors or GGUF, and code
that a model brings is not run.
"""

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_accelerate_available

from calibrate.errors import CalibrateError
from calibrate.storage.model_fingerprint import fingerprint_of, require_folder
from calibrate.storage.npz import read_bytes
from calibrate.storage.safetensors_file import read_header
from calibrate.store.carried_fit import KEY
from calibrate.transformers.folder_files import (
    CONFIG,
    MAX_CONFIG_BYTES,
    tokenizer_files,
    weight_files,
)
from calibrate.transformers.loading_report import (
    LoadingReport,
    dropped_of_gguf,
    is_quantised,
    loading_report,
    require_whole,
    text_part,
)
from calibrate.transformers.probing import N_TOKENS, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LAYERS = re.compile(r"(n|num)_(hidden_)?layers?|block_count")
_HEADS = re.compile(r"(n|num)_(attention_)?heads?|head_count")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_OWN_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class ModelFolder:
    """A folder that Transformers can load: config.json and safetensors, or a .gguf file.

    One .gguf file of several can be given itself. The fingerprint is of `files`: those of the
    weights, and the configuration.

    Raises:
      CalibrateError: it cannot be read, or holds no such model.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        file = self.path if self.path.suffix == ".gguf" and self.path.is_file() else None
        self.path = file.parent if file else self.path
        require_folder(self.path)
        name = self.path.resolve().name
        self.name = "".join(c if c.isprintable() else "?" for c in name)[:200] or "model"
        self.files = [file] if file else weight_files(self.path)
        self.headers = {path: read_header(path) for path in self.shards}
        self._options: dict[str, Any] = dict(_LOCAL)
        if self.is_gguf:
            self._options["gguf_file"] = self.files[0].name
        with in_one_line(f"cannot read the configuration in {path}"):
            self._require_counts()
            self.config = AutoConfig.from_pretrained(self.path, **self._options)
            self._is_quantised = is_quantised(self.config)
        if self.is_gguf:
            self._mark_export()
        more = [self.path / name for name in getattr(type(self.config), "extra_files", ())]
        more = [path for path in more if path.is_file() and path not in self.files]
        self.files += more
        self.headers |= {path: read_header(path) for path in more}

    @property
    def context(self) -> int | None:
        """The most tokens that the model reads; None if its configuration does not say."""
        most = getattr(text_part(self.config), "max_position_embeddings", None)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise CalibrateError(
                f"{self.path} has max_position_embeddings = {most!r}; it must be a positive integer"
            )
        return most

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(text_part(self.config).vocab_size)

    @property
    def is_gguf(self) -> bool:
        """True if the model is a .gguf file."""
        return self.files[0].suffix == ".gguf"

    @property
    def shards(self) -> list[Path]:
        """The files of safetensors."""
        return [path for path in self.files if path.suffix == ".safetensors"]

    def _mark_export(self) -> None:
        """Has the configuration say which fit a .gguf file carries, as that of a folder does."""
        from calibrate.storage.gguf_header import read_gguf

        if key := read_gguf(self.files[0]).keys.get(f"{KEY}.fit"):
            fit = key.value.decode(errors="replace") if isinstance(key.value, bytes) else key.value
            setattr(self.config, KEY, {"fit": str(fit)[:200]})

    def _require_counts(self) -> None:
        """Refuses layers and heads that the weights cannot have: models of them have no end."""
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
        """The tokenizer of files in the folder, or of the .gguf file; CalibrateError without."""
        own = any(path.name in _OWN_TOKENIZER for path in tokenizer_files(self.path))
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, **(_LOCAL if own else self._options)
            )
            n_special = len(tokenizer.get_added_vocab())
            if len(tokenizer) > n_special:  # classes load without any vocabulary
                return tokenizer
            reason = "it knows special tokens alone"
        except Exception as failure:
            reason = first_line(failure)
        lacks = f": it lacks {', '.join(_VOCABULARIES[:-1])} and {_VOCABULARIES[-1]}"
        if self.is_gguf or any((self.path / name).exists() for name in _VOCABULARIES):
            lacks = f" that loads ({reason})"
        raise CalibrateError(
            f"{self.path} has no tokenizer{lacks}; put the model's tokenizer files there "
            "(tokenizer.json), or give prompts of token ids alone"
        )

    def load(
        self, dtype: str, device: str = "cpu", allow_unexpected: bool = False
    ) -> PreTrainedModel:
        """The model, frozen, for evaluation, with weights of that dtype.

        Args:
          allow_unexpected: whether the files may have tensors that do not run; see `require_whole`.
        Raises:
          CalibrateError: it does not load, lacks weights, drops tensors, or sees later tokens.
        """
        options = {"config": self.config} | _unpacked() if self.is_gguf else {}
        model, report = self._loaded(device, dtype=DTYPES[dtype], **options)
        require_whole(self.path, report, allow_unexpected)
        _require_causal(model)
        return model

    def report(self) -> LoadingReport | None:
        """The report of Transformers on loading the folder, of which it reads no weights.

        Weights are read where the package accelerate is missing. None of a quantised model whose
        quantisation this machine does not run, and of a folder whose name is not UTF-8, which
        Transformers cannot open.

        Raises:
          CalibrateError: it does not load.
        """
        if not is_utf8(self.path):
            return None
        options = {"device_map": "meta"} if is_accelerate_available() else {}
        try:
            return self._loaded(dtype="auto", **options)[1]
        except CalibrateError:
            if self._is_quantised:
                return None
            raise

    def _loaded(
        self, device: str | None = None, **options: Any
    ) -> tuple[PreTrainedModel, LoadingReport]:
        """The model, moved to a device if one is given, and its loading report."""
        options = self._options | ({} if self.is_gguf else {"use_safetensors": True}) | options
        with in_one_line(f"cannot load the model in {self.path}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path, output_loading_info=True, **options
            )
            model: Any = loaded[0].eval().requires_grad_(False)
            model = model if device is None else model.to(device)
        info = loaded[1]
        if self.is_gguf:
            from calibrate.storage.gguf_header import read_gguf

            dropped = dropped_of_gguf(model, read_gguf(self.files[0]).tensors)
            info |= {"unexpected_keys": info["unexpected_keys"] | dropped}
        return model, loading_report(model, info, self.headers, self._is_quantised)


def is_utf8(path: Path) -> bool:
    """True if a path can be given to libraries that take UTF-8 alone."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def _counts(stored: dict[str, Any], names: re.Pattern[str]) -> Iterator[int]:
    """The integers of such names in a configuration and those within it."""
    for name, value in stored.items():
        if isinstance(value, dict):
            yield from _counts(value, names)
        elif isinstance(value, int) and names.fullmatch(name):
            yield value


def _unpacked() -> dict[str, Any]:
    """Options to get plain weights: packed ones may make later versions fetch kernels."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextlib.contextmanager
def in_one_line(message: str) -> Iterator[None]:
    """Quiet loading; whatever Transformers raises becomes one line of a CalibrateError."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # bars
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
    """Raises CalibrateError if a later token changes what the model says about an earlier one."""
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
