"""Files that are copied into an exported folder beside the weights: tokenizer and licences.

They are copied byte for byte. An export of a rule of log n is a model of another type, for which
Transformers may choose another tokenizer class. `match_tokenizer` then replaces tokenizer.json by
the state of the original tokenizer, so that the export makes the same tokens.
"""

import fnmatch
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.storage.atomic_io import write_atomically
from calibrate.transformers.folder_files import CHAT_TEMPLATES
from calibrate.transformers.folders import ModelFolder, in_one_line

_TOKENIZER = "tokenizer.json"
_COPIED = (
    "tokenizer*",
    "*.jinja",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*tekken*.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "COPYING*",
    "USE_POLICY*",
)
_NEVER_COPIED = ("*.py", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")


def find_copied_files(folder: ModelFolder) -> list[Path]:
    """Returns the files of a model's folder that an export copies."""
    files = [
        path
        for path in sorted(folder.path.iterdir())
        if _matches(path.name, _COPIED) and not _matches(path.name, _NEVER_COPIED)
    ]
    files += sorted((folder.path / CHAT_TEMPLATES).glob("*.jinja"))
    return [path for path in files if not path.is_dir()]  # a broken link fails when it is read


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def match_tokenizer(source: ModelFolder, copy: ModelFolder) -> dict[str, str]:
    """Makes the tokenizer of a copied folder produce the tokens of the source.

    A source without a tokenizer that loads is left as it is.

    Returns:
      sha256 of the files that were rewritten, by name; mostly none.
    Raises:
      CalibrateError: the copied tokenizer does not load, or makes other tokens.
    """
    try:
        original = _load_tokenizer(source)
    except CalibrateError:
        return {}
    copied, state = _load_tokenizer(copy), _tokenizer_state(original)
    written = dict[str, str]()
    if state != _tokenizer_state(copied) and hasattr(original, "backend_tokenizer"):
        data = state.encode()
        write_atomically(copy.path / _TOKENIZER, data)
        written[_TOKENIZER] = hashlib.sha256(data).hexdigest()
        copied = _load_tokenizer(copy)
    if state != _tokenizer_state(copied):
        raise CalibrateError(
            f"the tokenizer of {source.path} makes other tokens in a {copy.config.model_type}; "
            "save its tokenizer.json again, with PreTrainedTokenizerFast as the tokenizer_class"
        )
    return written


def _load_tokenizer(folder: ModelFolder) -> Any:
    with in_one_line(f"cannot load the tokenizer in {folder.path}"):
        return folder.tokenizer()


def _tokenizer_state(tokenizer: Any) -> str:
    """Returns all that decides the tokens of a text; for a tokenizer in Python, its class."""
    if hasattr(tokenizer, "backend_tokenizer"):
        state: str = tokenizer.backend_tokenizer.to_str()
        return state
    return type(tokenizer).__qualname__
