"""Heads: the protocol of a head, its checks, and loading one by its reference."""

import difflib
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from calibrate.datasets.logits_checks import check_target
from calibrate.errors import CalibrateError, command

WEIGHTS = Path(__file__).parent / "weights"
_BUILT_IN = re.compile(r"max-retrieval(?:-([0-9]))?")
_FINGERPRINT = re.compile(r"sha256:[0-9a-zA-Z._-]+")
_PLUGIN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_DOTTED = re.compile(r"([A-Za-z_][\w.]*)\.([A-Za-z_]\w*)")
_SHOWS_WHERE = f"the traceback (`{command('', debug=True)}`) shows where"


class Head(Protocol):
    """A trained attention head: any object with these five members.

        from typing import NamedTuple

        import calibrate
        import numpy as np

        class Batch(NamedTuple):
            logits: np.ndarray  # (count, size)
            target: np.ndarray  # (count,)

        class NoisyHead:
            name = "noisy-head"
            noise = 0.7  # stands for the weights
            fingerprint = calibrate.fingerprint({"noise": noise})

            def sample(self, seed, size, count):
                rng = np.random.default_rng(seed)
                value = rng.uniform(0, 6, (count, size))
                logits = value + self.noise * rng.standard_normal((count, size))
                return Batch(logits.astype(np.float32), value.argmax(axis=1).astype(np.int32))

            def attend(self, batch):
                return batch

            def correct(self, attended, weights):
                return np.take_along_axis(weights, attended.target[:, None], 1)[:, 0] > 0.3

        rows = calibrate.collect(NoisyHead(), sizes=[32, 64], sets=300)
        print(calibrate.fit_polynomial(calibrate.solve(rows)).r_squared)

    `name` is for people: messages, tables and pages show it. It is a printable text, and two heads
    may have the same name.

    `fingerprint` identifies the head: "sha256:" and a digest of what determines its logits and
    `correct`, such as weights. `calibrate.fingerprint` computes it from arrays or from a file. A
    collection stores it, and is not resumed with a head that has another one. So a fingerprint must
    change if the weights change, and must be the same in every process.

    A batch, and the result of `attend`, are any pytrees whose leaves have `count` as first axis, so
    that they can be cut into pieces that fit in memory.

    `correct` gives the accuracy of a head; without it a head is scored by NLL. Two more members are
    optional.
    `correct_each(attended, weights)`, bool (count, rules) for weights (count, rules, size), makes
    evaluation faster; without it `correct` is called once per rule.
    `trained_up_to`, int, is the largest n of the training data. At sizes up to it the default fit
    may lose at most NLL_TOLERANCE of `calibrate/defaults.py` in nats of mean log-likelihood.
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
        """One forward pass; has `.logits`, (count, size), and whatever scoring needs."""

    def correct(self, attended: Any, weights: Any) -> Any:
        """bool (count,): is the head right with these attention weights, (count, size)?"""


# The heads that this process has loaded, by reference and folder.
_loaded: dict[tuple[str, Path], Head] = {}


def load_head(reference: str, folder: Path | None = None) -> Head:
    """The head of that name (max-retrieval, max-retrieval-0 .. -9), file, or module:attribute.

    `folder` is searched first for files and modules; None is the working folder. Raises
    CalibrateError: no such head, one that breaks the protocol, or weights that are damaged.
    """
    head = _load(reference, folder or Path())
    _loaded[reference, (folder or Path()).absolute()] = head
    return head


@dataclass(frozen=True)
class HeadReference:
    """A head that another process loads in place of being sent it."""

    reference: str
    folder: Path
    fingerprint: str


def to_send(head: Head) -> Head | HeadReference:
    """What is sent to another process for a head: its reference, if it has one, or the head."""
    for (reference, folder), loaded in _loaded.items():
        if loaded is head:
            return HeadReference(reference, folder, head.fingerprint)
    return head


def received(sent: Head | HeadReference) -> Head:
    """The head that was sent; by a reference it is loaded once in a process."""
    if not isinstance(sent, HeadReference):
        return sent
    head = _loaded.get((sent.reference, sent.folder))
    if head is None or head.fingerprint != sent.fingerprint:
        head = load_head(sent.reference, sent.folder)
    if head.fingerprint != sent.fingerprint:
        raise CalibrateError(
            f"head {sent.reference!r} is {head.fingerprint} in a worker and {sent.fingerprint} in "
            f"this process; give both the same files in {sent.folder}"
        )
    return head


def reference_of(head: Head) -> str | None:
    """The reference that `load_head` was given for this head; None if it was made otherwise."""
    return next((reference for (reference, _), loaded in _loaded.items() if loaded is head), None)


def _load(reference: str, folder: Path) -> Head:
    if _PLUGIN.fullmatch(reference):
        return _load_plugin(reference, folder)
    from calibrate.rows import max_retrieval

    match = _BUILT_IN.fullmatch(reference)
    path = WEIGHTS / f"max-retrieval-{match[1] or 0}.npz" if match else folder / reference
    if path.suffix != ".npz" or (match and not path.exists()):
        near = difflib.get_close_matches(reference, built_in_heads(), n=1)
        if dotted := _DOTTED.fullmatch(reference):
            near = [f"{dotted[1]}:{dotted[2]}"]
        meant = f"did you mean {near[0]}? U" if near else "u"
        raise CalibrateError(
            f"no head is named {reference!r}; {meant}se one of {', '.join(built_in_heads())}, "
            "module:attribute of a head of yours, or a weights file (.npz) of "
            "scripts/studies/train_heads.py"
        )
    return max_retrieval.load_head(path.stem, path)


def _load_plugin(reference: str, folder: Path) -> Head:
    """The head at module:attribute, or what that gives without arguments."""
    module, attribute = reference.split(":")
    searched = str(folder.absolute())
    if searched not in sys.path:
        sys.path.insert(0, searched)
    try:
        head: Any = importlib.import_module(module)
        for name in attribute.split("."):
            head = getattr(head, name)
        if isinstance(head, type) or (callable(head) and not hasattr(head, "sample")):
            head = head()
    except Exception as failure:
        raise CalibrateError(
            f"loading the head {reference!r} failed with {type(failure).__name__}: {failure}; "
            f"modules are searched in {searched} first; {_SHOWS_WHERE}"
        ) from failure
    check_head(head, reference)
    checked: Head = head
    return checked


def is_built_in(reference: str) -> bool:
    """True if a name is that of a head whose weights come with the package."""
    return _BUILT_IN.fullmatch(reference) is not None


def built_in_heads() -> list[str]:
    """The names of the heads whose weights come with the package."""
    return ["max-retrieval", *sorted(path.stem for path in WEIGHTS.glob("max-retrieval-*.npz"))]


def check_head(head: Any, reference: str) -> None:
    """Raises CalibrateError, with its name, for a member that is absent or invalid.

    The results of `sample`, `attend` and `correct` are checked when they are called.
    """
    name, fingerprint = getattr(head, "name", None), getattr(head, "fingerprint", None)
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise CalibrateError(f"head {reference}: name is {name!r}; give a printable text")
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise CalibrateError(
            f'head {reference}: fingerprint is {fingerprint!r}; give "sha256:" and a digest of '
            "what determines its logits, such as its weights"
        )
    for member in ("sample", "attend", "correct"):
        method = getattr(head, member, None)
        if not callable(method) and (member != "correct" or method is not None):
            raise CalibrateError(
                f"head {reference}: {member} is {method!r}; give a method (help(calibrate.Head))"
            )


def call(head: Any, member: str, *arguments: Any) -> Any:
    """Calls a member of a head; raises CalibrateError with its name if it fails."""
    method = getattr(head, member, None)
    if method is None:
        raise CalibrateError(
            f"head {head.name!r} has no {member}; give the member (help(calibrate.Head))"
        )
    try:
        return method(*arguments)
    except CalibrateError:
        raise
    except Exception as failure:
        raise CalibrateError(
            f"head {head.name!r}: {member} failed with {type(failure).__name__}: {failure}; "
            f"{_SHOWS_WHERE}"
        ) from failure


def check_batch(head: Any, batch: Any, size: int, count: int) -> None:
    """Raises CalibrateError unless a batch has `count` rows and valid targets."""
    import jax

    leaves = jax.tree.leaves(batch)
    if not hasattr(batch, "target") or any(np.shape(leaf)[:1] != (count,) for leaf in leaves):
        raise CalibrateError(
            f"head {head.name!r}: sample gave a {type(batch).__name__}; give a pytree with "
            f".target, such as a NamedTuple, whose leaves have {count} rows each"
        )
    check_target(batch.target, size, count, f"head {head.name!r}: sample gave a target of")


def check_logits(head: Any, attended: Any, size: int, count: int) -> None:
    """Raises CalibrateError unless `attend` gave float logits, one row per set."""
    logits: Any = getattr(attended, "logits", None)
    given = "no .logits" if logits is None else f".logits {logits.dtype}{np.shape(logits)}"
    if np.ma.is_masked(logits):
        raise CalibrateError(
            f"head {head.name!r}: attend gave a masked array of NumPy as .logits; give "
            ".logits.filled(-numpy.inf)"
        )
    if np.shape(logits) != (count, size) or not np.issubdtype(np.dtype(logits.dtype), np.floating):
        raise CalibrateError(
            f"head {head.name!r}: attend gave {given}; give .logits of shape {(count, size)}, "
            "floats, the scores before softmax"
        )
