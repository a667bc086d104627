"""Checks of a head against the protocol; errors name the member."""

import re
from typing import Any

import numpy as np

from calibrate.errors import CalibrateError

_FINGERPRINT = re.compile(r"sha256:[0-9a-zA-Z._-]+")
ALMOST_ALL, NEAR_ONE = 0.9, 0.01  # of rows that are probabilities, and how bfloat16 adds them up
_CALLS = {
    "sample": "sample(seed, size, count)",
    "attend": "attend(batch)",
    "correct": "correct(attended, weights)",
    "correct_each": "correct_each(attended, weights)",
}


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
                f"head {reference}: {member} is {method!r}; give a method {_CALLS[member]}"
            )


def call(head: Any, member: str, *arguments: Any) -> Any:
    """Calls a member of a head; raises CalibrateError with its name if it fails."""
    method = getattr(head, member, None)
    if method is None:
        raise CalibrateError(
            f"head {head.name!r} has no {_CALLS[member]}; without it a head can be calibrated, "
            "but not scored"
        )
    try:
        return method(*arguments)
    except CalibrateError:
        raise
    except Exception as failure:
        raise CalibrateError(
            f"head {head.name!r}: {_CALLS[member]} failed with {type(failure).__name__}: "
            f"{failure}; --debug shows where"
        ) from failure


def check_batch(head: Any, batch: Any, size: int, count: int) -> None:
    """Raises CalibrateError unless a batch has `count` rows and valid targets."""
    import jax

    leaves = jax.tree.leaves(batch)
    if not hasattr(batch, "target"):
        raise CalibrateError(
            f"head {head.name!r}: sample gave a {type(batch).__name__} without a target; give a "
            "pytree, such as a NamedTuple of arrays (count, ...), with .target"
        )
    if any(np.shape(leaf)[:1] != (count,) for leaf in leaves):
        raise CalibrateError(
            f"head {head.name!r}: sample gave a {type(batch).__name__} whose leaves are not "
            f"{count} rows each; give a pytree, such as a NamedTuple of arrays (count, ...)"
        )
    check_target(batch.target, size, count, f"head {head.name!r}: sample gave a target of")


def check_logits(head: Any, attended: Any, size: int, count: int) -> None:
    """Raises CalibrateError unless `attend` gave float logits, one row per set."""
    logits = getattr(attended, "logits", None)
    if logits is None or np.shape(logits) != (count, size):
        result = "no .logits" if logits is None else f"logits of shape {np.shape(logits)}"
        raise CalibrateError(
            f"head {head.name!r}: attend gave {result}; give .logits of shape {(count, size)}"
        )
    if not np.issubdtype(np.dtype(logits.dtype), np.floating):
        raise CalibrateError(
            f"head {head.name!r}: attend gave logits of {logits.dtype}; give floats, the scores "
            "before softmax"
        )


def refuse_probabilities(logits: np.ndarray, subject: str) -> None:
    """Raises CalibrateError if almost all rows are >= 0 and sum to 1: softmax was applied already.

    Rows with NaN, and rows of zeros alone, as padding has, do not count. `subject` begins the
    message.
    """
    low = logits.min(axis=1, initial=np.inf)
    maybe, n_judged = low >= 0, int(np.sum(~np.isnan(low)))
    if n_judged and maybe.sum() >= ALMOST_ALL * n_judged and _sum_to_one(logits[maybe]):
        raise CalibrateError(
            f"{subject} rows that are >= 0 and sum to 1, as probabilities do; give the scores "
            "before softmax, or the logarithms of the probabilities"
        )


def _sum_to_one(logits: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # a sum beyond float32 is not 1
        total = logits.sum(axis=1)
    total = total[total != 0]
    return len(total) > 0 and bool(np.mean(np.abs(total - 1) <= NEAR_ONE) >= ALMOST_ALL)


def check_target(target: Any, size: int, count: int, subject: str) -> None:
    """Raises CalibrateError unless targets are positions in [0, size), or masks of positions.

    `subject` begins the message.
    """
    target = np.asarray(target)
    if target.dtype == bool and target.shape == (count, size):
        return  # rows that mark no item are counted as bad
    if target.shape != (count,) or target.dtype.kind not in "iu":  # NumPy's integers have times
        raise CalibrateError(
            f"{subject} {target.dtype}{target.shape}; "
            f"give integers ({count},), or bool {(count, size)}"
        )
    outside = target[(target < 0) | (target >= size)]
    if outside.size:
        raise CalibrateError(
            f"{subject} {outside[0]}, which is not a position in [0, {size}); "
            "give the index of the item that should win"
        )
