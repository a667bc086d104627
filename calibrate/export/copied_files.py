"""Files that go with the weights into an exported folder: of the tokenizer, and licences.

They are copied byte for byte. An export by size is a model of another type, for which Transformers
may choose another class of tokenizer: tokenizer.json then becomes what the original class made.
"""

import hashlib
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.storage.atomic_io import write_atomically
from calibrate.transformers.folder_files import CHAT_TEMPLATES, tokenizer_files
from calibrate.transformers.folders import ModelFolder, in_one_line

TOKENIZER = "tokenizer.json"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_BESIDE = (
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "COPYING*",
    "USE_POLICY*",
)


def copied_files(folder: ModelFolder) -> list[Path]:
    """The files to copy.

    Raises:
      CalibrateError: one of them is a link to nothing, or a pointer of Git LFS.
    """
    named = getattr(type(tokenizer_of(folder)), "vocab_files_names", {})  # such as emoji.json
    files = tokenizer_files(folder.path, (*_BESIDE, *filter(None, named.values())))
    for path in files:
        with open(path, "rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CalibrateError(
                    f"{path} is a pointer of Git LFS, and not the file itself; run git lfs pull in "
                    f"{folder.path}, or fetch the model with hf download"
                )
    return files


def check_no_links(folder: Path, files: list[Path]) -> None:
    """Raises CalibrateError for a link out of a folder; blobs of the Hub's cache are within it."""
    root = folder.resolve()
    repository = root.parents[1] if root.parent.name == "snapshots" else root
    for path in files:
        target = path.resolve()
        if not any(target.is_relative_to(x) for x in (root, repository / "blobs")):
            raise CalibrateError(
                f"{path} is a link to {target}, outside of the model's folder; put a copy there, "
                "or remove it"
            )


def tokenizer_of(folder: ModelFolder) -> Any:
    """The tokenizer of a folder; None if none loads."""
    try:
        return _loaded(folder)
    except CalibrateError:
        return None


def match_tokenizer(source: ModelFolder, copy: ModelFolder) -> dict[str, str]:
    """Makes the tokenizer of a copy give the tokens of the source's, if that has any.

    Returns:
      sha256 of the files that had to be written again, by name; mostly none.
    Raises:
      CalibrateError: the copy's tokenizer does not load, has other chat templates, or other tokens.
    """
    original = tokenizer_of(source)
    if original is None:
        return {}
    copied = _copied_tokenizer(source, copy)
    if original.chat_template != copied.chat_template:
        raise CalibrateError(
            f"{source.path} has chat templates that a copy of its tokenizer's files lacks; put "
            f"them into chat_template.jinja and {CHAT_TEMPLATES}/NAME.jinja"
        )
    state, written = _state(original), {}
    if state != _state(copied) and hasattr(original, "backend_tokenizer"):
        data = state.encode()
        write_atomically(copy.path / TOKENIZER, data)
        written[TOKENIZER] = hashlib.sha256(data).hexdigest()
        copied = _copied_tokenizer(source, copy)
    if state != _state(copied):
        raise CalibrateError(
            f"the tokenizer of {source.path} makes other tokens in a {copy.config.model_type}; "
            "save its tokenizer.json again, with PreTrainedTokenizerFast as the tokenizer_class"
        )
    return written


def _loaded(folder: ModelFolder) -> Any:
    with in_one_line(f"cannot load the tokenizer in {folder.path}"):
        return folder.tokenizer()


def _copied_tokenizer(source: ModelFolder, copy: ModelFolder) -> Any:
    try:
        return _loaded(copy)
    except CalibrateError as failure:
        raise CalibrateError(
            f"the tokenizer of {source.path} does not load from a copy of its files; save it again "
            "(AutoTokenizer.from_pretrained, save_pretrained)"
        ) from failure


def _state(tokenizer: Any) -> str:
    """All that decides the tokens of a text; of a tokenizer in Python, its class."""
    if hasattr(tokenizer, "backend_tokenizer"):
        state: str = tokenizer.backend_tokenizer.to_str()
        return state
    return type(tokenizer).__qualname__
