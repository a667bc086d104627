"""Heads: the protocol of a head, and loading one by its reference, your own included."""

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from calibrate.errors import CalibrateError
from calibrate.rows.protocol import check_head

WEIGHTS = Path(__file__).parent / "weights"
_BUILT_IN = re.compile(r"max-retrieval(?:-([0-9]))?")
_PLUGIN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Head(Protocol):
    """A trained attention head, as the pipeline sees it.

    A batch, and what `attend` returns, is any pytree whose leaves have `count` as first axis, so
    that the pipeline can cut it into pieces that fit in memory.

    `correct` is needed to score a head, but not to calibrate it. Two more members are optional.
    `correct_each(attended, weights)`, bool (count, rules) for weights (count, rules, size), makes
    evaluation faster; without it `correct` is called once per rule.
    `trained_up_to`, int, is the largest set size of its training: fits may not lose there.
    """

    name: str
    fingerprint: str  # "sha256:..." of what determines its logits, and whether it is right

    def sample(self, seed: int, size: int, count: int) -> Any:
        """Draws `count` inputs of `size` items; has `.target`, int (count,).

        Where any of several items may win, it is bool (count, size), True at those.
        The seed is a 64-bit number, as numpy.random.default_rng takes it; JAX's keys take at most
        63 bits of it (seed >> 1).
        """

    def attend(self, batch: Any) -> Any:
        """One forward pass; has `.logits`, (count, size), and whatever scoring needs."""

    def correct(self, attended: Any, weights: Any) -> Any:
        """bool (count,): is the head right with these attention weights, (count, size)?"""


# The heads that this process has loaded, by reference and folder.
_loaded: dict[tuple[str, Path], Head] = {}


def load_head(reference: str, folder: Path | None = None) -> Head:
    """The head of that name (max-retrieval, max-retrieval-0 .. -9), file, or module:attribute.

    Args:
      reference: name, path of a weights file, or module:attribute.
      folder: searched first for files and modules; None is the working folder.
    Raises:
      CalibrateError: no such head, one that breaks the protocol, or weights that are damaged.
    """
    head = _load(reference, folder or Path())
    _loaded[reference, (folder or Path()).absolute()] = head
    return head


def head_loader(head: Head) -> Callable[[], Head]:
    """A function that gives the head in another process: by its reference, or the head itself."""
    for (reference, folder), loaded in _loaded.items():
        if loaded is head:
            return partial(_load_once, reference, folder, head.fingerprint)
    return lambda: head


def _load_once(reference: str, folder: Path, fingerprint: str) -> Head:
    """A head that was loaded in another process, loaded once in this one."""
    head = _loaded.get((reference, folder))
    if head is None or head.fingerprint != fingerprint:
        head = load_head(reference, folder)
    if head.fingerprint != fingerprint:
        raise CalibrateError(
            f"head {reference!r} is {head.fingerprint} in a worker and {fingerprint} in this "
            f"process; give both the same files in {folder}"
        )
    return head


def _load(reference: str, folder: Path) -> Head:
    if _PLUGIN.fullmatch(reference):
        return _load_plugin(reference, folder)
    from calibrate.rows import max_retrieval

    match = _BUILT_IN.fullmatch(reference)
    path = WEIGHTS / f"max-retrieval-{match[1] or 0}.npz" if match else folder / reference
    if path.suffix != ".npz" or (match and not path.exists()):
        raise CalibrateError(
            f"no head is named {reference!r}; use one of {', '.join(built_in_heads())}, "
            "module:attribute of a head of yours, or a weights file (.npz) of scripts/train_heads"
        )
    return max_retrieval.load_head(path.stem, path)


def _load_plugin(reference: str, folder: Path) -> Head:
    """The head at module:attribute; `folder` is searched first.

    The attribute is a head, or a function or class that gives one without arguments.

    Raises:
      CalibrateError: no such module or attribute, one that fails, or that breaks the protocol.
    """
    module, attribute = reference.split(":")
    searched = str(folder.absolute())
    if searched not in sys.path:
        sys.path.insert(0, searched)
    try:
        head: Any = importlib.import_module(module)
    except ModuleNotFoundError as failure:
        if failure.name is None or not f"{module}.".startswith(f"{failure.name}."):
            raise _failed(f"importing {module!r}", failure) from failure
        raise CalibrateError(
            f"no module is named {module!r} in {searched} or on Python's path; "
            "give --head module:attribute"
        ) from None
    except Exception as failure:
        raise _failed(f"importing {module!r}", failure) from failure
    for name in attribute.split("."):
        if not hasattr(head, name):
            raise CalibrateError(f"{module!r} has no attribute {attribute!r}; check --head")
        head = getattr(head, name)
    if isinstance(head, type) or (callable(head) and not hasattr(head, "sample")):
        try:
            head = head()
        except Exception as failure:
            raise _failed(f"{reference}()", failure) from failure
    check_head(head, reference)
    found: Head = head
    return found


def _failed(action: str, failure: Exception) -> CalibrateError:
    return CalibrateError(
        f"{action} failed with {type(failure).__name__}: {failure}; --debug shows where"
    )


def is_built_in(reference: str) -> bool:
    """Whether a name is that of a head whose weights come with the package."""
    return _BUILT_IN.fullmatch(reference) is not None


def built_in_heads() -> list[str]:
    """The names of the heads whose weights come with the package."""
    return ["max-retrieval", *sorted(path.stem for path in WEIGHTS.glob("max-retrieval-*.npz"))]
