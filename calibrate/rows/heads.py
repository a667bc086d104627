"""Heads: the protocol of a head, its checks, and loading a head by its reference."""

import importlib
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from calibrate.errors import CalibrateError

WEIGHTS_FOLDER = Path(__file__).parent / "weights"
_BUILT_IN = re.compile(r"max-retrieval(?:-([0-9]))?")
_FINGERPRINT = re.compile(r"sha256:[0-9a-zA-Z._-]+")
_PLUGIN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Head(Protocol):
    """A trained attention head: any object with `name`, `fingerprint`, `sample` and `attend`.

    >>> from typing import NamedTuple
    >>> import calibrate
    >>> import numpy as np
    >>> class Batch(NamedTuple):
    ...     logits: np.ndarray  # (count, size)
    ...     target: np.ndarray  # (count,)
    >>> class NoisyHead:
    ...     name = "noisy-head"
    ...     noise = 0.7  # in place of weights
    ...     fingerprint = calibrate.fingerprint({"noise": noise})
    ...
    ...     def sample(self, seed, size, count):
    ...         rng = np.random.default_rng(seed)
    ...         value = rng.uniform(0, 6, (count, size))
    ...         logits = value + self.noise * rng.standard_normal((count, size))
    ...         return Batch(logits.astype(np.float32), value.argmax(axis=1).astype(np.int32))
    ...
    ...     def attend(self, batch):
    ...         return batch
    ...
    ...     def correct(self, attended, weights):
    ...         return np.take_along_axis(weights, attended.target[:, None], 1)[:, 0] > 0.3
    >>> print(calibrate.collect(NoisyHead(), sizes=[32, 64], sets=100))
    Collection of noisy-head, in memory
    200 inputs, 200 of them kept
    152 misranked (n = 32: 70, n = 64: 82)

    `name` appears in messages, tables and pages. It is a printable text, and two heads may have the
    same name.

    `fingerprint` identifies the head: "sha256:" and a digest of everything that determines its
    logits and `correct`, such as weights. `calibrate.fingerprint` computes it from arrays or from a
    file. A collection records it, and is not resumed with a head of another fingerprint. Therefore
    it must change when the weights change, and must be the same in every process.

    A batch and the result of `attend` are any pytrees whose leaves have `count` as first axis, so
    that they can be divided into pieces that fit in memory.

    `correct` gives the accuracy of a head; a head without it is scored by NLL alone. Two more
    members are optional.
    `correct_each(attended, weights)`, bool (count, rules) for weights (count, rules, size), makes
    evaluation faster; without it `correct` is called once per rule.
    `trained_up_to`, int, is the largest n of the training data. At sizes up to it a fit may lose at
    most `tolerance` nats of mean log-likelihood.
    """

    name: str
    fingerprint: str

    def sample(self, seed: int, size: int, count: int) -> Any:
        """Draws `count` inputs of `size` items. The result has `.target`, int (count,).

        If any of several items may win, `.target` is bool (count, size), True at these items.
        The seed is a 64-bit number, as numpy.random.default_rng takes it; JAX's keys take at most
        63 bits of it (seed >> 1).
        """

    def attend(self, batch: Any) -> Any:
        """Runs one forward pass. The result has `.logits` (count, size)."""

    def correct(self, attended: Any, weights: Any) -> Any:
        """bool (count,), True where the answer is correct with attention weights (count, size)."""


def load_head(reference: str, folder: Path | None = None) -> Head:
    """Loads a head by its name (max-retrieval, max-retrieval-0 .. -9), file or module:attribute.

    Other processes that are sent the head load it by this reference, too.

    Args:
      reference: name, path of a weights file, or module:attribute.
      folder: searched first for files and modules; None is the working folder.
    Raises:
      CalibrateError: there is no such head, it breaks the protocol, or its weights are damaged.
    """
    folder = (folder or Path()).absolute()
    loaded: Any = _LoadedHead(_load(reference, folder), reference, folder)
    head: Head = loaded
    return head


class _LoadedHead:
    """A head; pickling it takes its reference in place of its weights."""

    def __init__(self, head: Head, reference: str, folder: Path):
        self._head, self._reference, self._folder = head, reference, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (self._reference, self._folder, self.fingerprint)


@cache
def _load_again(reference: str, folder: Path, fingerprint: str) -> Head:
    """Loads a head that another process has loaded, once in this process."""
    head = load_head(reference, folder)
    if head.fingerprint != fingerprint:
        raise CalibrateError(
            f"head {reference!r} is {head.fingerprint} in a worker and {fingerprint} in the "
            f"process that started it; give both the same files in {folder}"
        )
    return head


def _load(reference: str, folder: Path) -> Head:
    if _PLUGIN.fullmatch(reference):
        return _load_plugin(reference, folder)
    from calibrate.rows import max_retrieval

    match = _BUILT_IN.fullmatch(reference)
    path = WEIGHTS_FOLDER / f"max-retrieval-{match[1] or 0}.npz" if match else folder / reference
    if path.suffix != ".npz" or (match and not path.exists()):
        raise CalibrateError(
            f"no head is named {reference!r}; give one of {', '.join(built_in_heads())}, "
            "module:attribute of a head of yours, or a weights file (.npz) of "
            "scripts/studies/train_heads.py"
        )
    return max_retrieval.load_max_retrieval(path.stem, path)


def import_attribute(reference: str, folder: Path) -> Any:
    """The object at module:attribute; modules are searched in the folder first."""
    module, attribute = reference.split(":")
    searched = str(folder.absolute())
    if searched not in sys.path:
        sys.path.insert(0, searched)
    value: Any = importlib.import_module(module)
    for name in attribute.split("."):
        value = getattr(value, name)
    return value


def _load_plugin(reference: str, folder: Path) -> Head:
    """Loads the head at module:attribute; a class or a function is called without arguments."""
    head = import_attribute(reference, folder)
    if isinstance(head, type) or (callable(head) and not hasattr(head, "sample")):
        head = head()
    check_head(head, reference)
    checked: Head = head
    return checked


def is_built_in(reference: str) -> bool:
    """True if a reference names a head whose weights come with the package."""
    return _BUILT_IN.fullmatch(reference) is not None


def built_in_heads() -> list[str]:
    """Names of the heads whose weights come with the package."""
    return [
        "max-retrieval",
        *sorted(path.stem for path in WEIGHTS_FOLDER.glob("max-retrieval-*.npz")),
    ]


def check_head(head: Any, reference: str) -> None:
    """Raises CalibrateError with the name of a member that is absent or invalid."""
    name, fingerprint = getattr(head, "name", None), getattr(head, "fingerprint", None)
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise CalibrateError(f"head {reference}: name is {name!r}; give a printable text")
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise CalibrateError(
            f'head {reference}: fingerprint is {fingerprint!r}; give "sha256:" and a digest of '
            "everything that determines its logits, such as its weights"
        )
    for member in ("sample", "attend"):
        if not callable(getattr(head, member, None)):
            raise CalibrateError(
                f"head {reference} has no method {member}; give one (help(calibrate.Head))"
            )
