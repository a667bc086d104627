"""A model's folder on disk: its fingerprint, its tokenizer, and the causal model itself.

Nothing is fetched and nothing in the folder is executed: weights are safetensors or GGUF, and code
that a model brings is not run.
"""

import contextlib
import io
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files.json_shapes import Map, Pattern, read_field
from calibrate.files.model_fingerprint import fingerprint_of, require_folder
from calibrate.files.npz import read_bytes
from calibrate.files.safetensors_file import read_header
from calibrate.files.strict_json import parse
from calibrate.transformers.probing import N_TOKENS, first_line

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST_CONFIG_BYTES = 1 << 22
_MOST_INDEX_BYTES = 1 << 26
_LAYERS = re.compile(r"(n|num)_(hidden_)?layers?|block_count")
_HEADS = re.compile(r"(n|num)_(attention_)?heads?|head_count")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
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
        _require_regular(self.path)
        self.files = [file] if file else _weights_in(self.path)
        self.headers = {path: read_header(path) for path in self.shards}
        self._options: dict[str, Any] = dict(_LOCAL)
        if self.is_gguf:
            self._options["gguf_file"] = self.files[0].name
        with in_one_line(f"cannot read the configuration in {path}"):
            self._require_counts()
            self.config = AutoConfig.from_pretrained(self.path, **self._options)

    @property
    def context(self) -> int | None:
        """The most tokens that the model reads; None if its configuration does not say."""
        most = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise CalibrateError(
                f"{self.path} has max_position_embeddings = {most!r}; it must be a positive integer"
            )
        return most

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a .gguf file."""
        return self.files[0].suffix == ".gguf"

    @property
    def shards(self) -> list[Path]:
        """The files of safetensors."""
        return [path for path in self.files if path.suffix == ".safetensors"]

    def _require_counts(self) -> None:
        """Refuses layers and heads that the weights cannot have: models of them have no end."""
        if self.is_gguf:
            from calibrate.files.gguf_header import read_gguf

            file = read_gguf(self.files[0])
            shapes = [tensor.shape for tensor in file.tensors.values()]
            said: Any = {name.split(".")[-1]: key.value for name, key in file.keys.items()}
        else:
            shapes = [x.shape for header in self.headers.values() for x in header.values()]
            said = json.loads(read_bytes(self.path / CONFIG, MOST_CONFIG_BYTES))
        n_layers, n_heads = (max(_counts(said, of), default=1) for of in (_LAYERS, _HEADS))
        rows = sum(max(shape, default=1) for shape in shapes)
        if n_layers > len(shapes) or n_layers * n_heads > rows:
            raise CalibrateError(
                f"{self.path} declares {n_layers:,} layers of {n_heads:,} heads, and has "
                f"{len(shapes):,} tensors with {rows:,} rows; fetch it again"
            )

    def dtype(self, wanted: str = "auto") -> str:
        """The dtype to load the weights in: "auto" is bfloat16 if they are, and else float32."""
        if wanted == "auto":
            return "bfloat16" if self.config.dtype == torch.bfloat16 else "float32"
        return wanted

    def fingerprint(self) -> str:
        """sha256 of the weights and the configuration."""
        return fingerprint_of(self.files)

    def tokenizer(self) -> Any:
        """The tokenizer of files in the folder, or of the .gguf file; CalibrateError without."""
        own = any((self.path / name).is_file() for name in _TOKENIZER_FILES)
        try:
            found = AutoTokenizer.from_pretrained(self.path, **(_LOCAL if own else self._options))
            if len(found) > len(found.get_added_vocab()):  # classes load without any vocabulary
                return found
            reason = "it knows special tokens alone"
        except Exception as failure:
            reason = first_line(failure)
        lacks = f": it lacks {', '.join(_VOCABULARIES[:-1])} and {_VOCABULARIES[-1]}"
        if self.is_gguf or any((self.path / name).exists() for name in _VOCABULARIES):
            lacks = f" that loads ({reason})"
        raise CalibrateError(
            f"{self.path} has no tokenizer{lacks}; put the model's tokenizer files there "
            "(tokenizer.json), or give --prompts with token ids alone"
        )

    def load(self, dtype: str, device: str = "cpu") -> PreTrainedModel:
        """The model, frozen, for evaluation, with weights of that dtype.

        Raises:
          CalibrateError: it does not load, lacks weights, or sees later tokens.
        """
        options = self._options | {"use_safetensors": True}
        if self.is_gguf:
            options = self._options | {"config": self.config} | _unpacked()
        with in_one_line(f"cannot load the model in {self.path}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=DTYPES[dtype], output_loading_info=True, **options
            )
            model: PreTrainedModel = loaded[0].to(device).eval().requires_grad_(False)
            report: dict[str, Any] = loaded[1]
        absent = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
        if absent:
            raise CalibrateError(
                f"{self.path} lacks weights of {type(model).__name__}: {', '.join(absent[:3])}; "
                "give the folder of a whole causal model"
            )
        _require_causal(model)
        return model


def _require_regular(folder: Path) -> None:
    """Raises CalibrateError if a folder has a pipe or a device, which might never end."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CalibrateError(f"{path} is not a regular file; remove it from the model's folder")


def _counts(said: dict[str, Any], names: re.Pattern[str]) -> Iterator[int]:
    """The integers of such names in a configuration and those within it."""
    for name, value in said.items():
        if isinstance(value, dict):
            yield from _counts(value, names)
        elif isinstance(value, int) and names.fullmatch(name):
            yield value


def _weights_in(folder: Path) -> list[Path]:
    """The files that make a model: its weights, and the configuration."""
    if (folder / WEIGHTS).is_file():  # first, as in Transformers, which leaves old indices there
        names = [WEIGHTS]
    elif (folder / INDEX).is_file():
        names = _sharded(folder / INDEX)
    else:
        found = sorted(path for path in folder.glob("*.gguf") if path.is_file())
        if len(found) == 1:
            return found
        raise CalibrateError(
            f"{folder} has no {WEIGHTS} and {len(found)} .gguf files; give a folder with one model"
        )
    names = sorted(names) + ([INDEX] if names != [WEIGHTS] else [])
    return [folder / name for name in [*names, CONFIG]]


def _unpacked() -> dict[str, Any]:
    """Options to get plain weights: packed ones may make later versions fetch kernels."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _sharded(index: Path) -> list[str]:
    """The names of the files of weights that an index lists, all in its own folder."""
    plain = Pattern(_PLAIN_NAME, "give the name of a file in the same folder")
    try:
        listed = parse(read_bytes(index, _MOST_INDEX_BYTES))
        return sorted(set(read_field(listed, "weight_map", Map(plain)).values()))
    except CoefficientsError as failure:
        raise CalibrateError(f"{index} is not an index ({failure}); restore it") from failure


class _OtherThreads(io.StringIO):
    """A stream that passes on whole lines of other threads: `calibrate` says that it is at work."""

    def __init__(self, to: TextIO) -> None:
        super().__init__()
        self._to, self._quiet = to, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._quiet and text.endswith("\n") and "\r" not in text:
            self._to.write(text)
        return len(text)


@contextlib.contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Quiet loading; whatever Transformers raises becomes one line of a CalibrateError."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(_OtherThreads(sys.stderr)):  # bars
            yield
    except CalibrateError:
        raise
    except MemoryError:
        raise CalibrateError(f"{what}: out of memory; give --dtype bfloat16") from None
    except Exception as failure:
        raise CalibrateError(
            f"{what} ({first_line(failure)}); give a causal model's folder that this version of "
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
