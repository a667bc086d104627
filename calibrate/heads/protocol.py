"""What a head from outside owes the pipeline: each member checked, and named where it is broken."""

import re
from typing import Any

import numpy as np

from calibrate.errors import CalibrateError

FINITE_MASK = -1e38  # the least number of float32, or of bfloat16, is below it; no score is
_FINGERPRINT = re.compile(r"sha256:[0-9a-zA-Z._-]+")
_CALLS = {
    "sample": "sample(seed, size, count)",
    "attend": "attend(batch)",
    "correct": "correct(attended, weights)",
    "correct_each": "correct_each(attended, weights)",
}


def check_head(head: Any, reference: str) -> None:
    """Raises a CalibrateError that names the member which is absent, or no head's.

    What `sample`, `attend` and `correct` give is checked when they are called.
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
        found = getattr(head, member, None)
        if not callable(found) and (member != "correct" or found is not None):
            raise CalibrateError(
                f"head {reference}: {member} is {found!r}; give a method {_CALLS[member]}"
            )


def call(head: Any, member: str, *arguments: Any) -> Any:
    """What a member of a head gives; if it fails, an error that says which did."""
    method = getattr(head, member, None)
    if method is None:
        raise CalibrateError(
            f"head {head.name!r} has no {_CALLS[member]}; without it a head can be calibrated, "
            "and not scored"
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
    """A head that breaks the protocol would otherwise be calibrated to nonsense."""
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
    """What `attend` gave has logits, a row per set, and they are no probabilities."""
    logits = getattr(attended, "logits", None)
    if logits is None or np.shape(logits) != (count, size):
        found = "no .logits" if logits is None else f"logits of shape {np.shape(logits)}"
        raise CalibrateError(
            f"head {head.name!r}: attend gave {found}, expected {(count, size)}; give (count, size)"
        )
    if not np.issubdtype(np.dtype(logits.dtype), np.floating):
        raise CalibrateError(
            f"head {head.name!r}: attend gave logits of {logits.dtype}; give floats, the scores "
            "before softmax"
        )


def as_masks(logits: np.ndarray) -> np.ndarray:
    """Float32 logits, -inf where they are near the least number: libraries write masks as that."""
    masked = logits < FINITE_MASK
    return np.where(masked, np.float32(-np.inf), logits) if masked.any() else logits


def refuse_probabilities(logits: np.ndarray, said: str) -> None:
    """Rows that are all >= 0 and sum to 1 went through softmax already."""
    if logits.size and (logits >= 0).all() and _sum_to_one(logits):
        raise CalibrateError(
            f"{said} rows that are >= 0 and sum to 1, as probabilities do; give the scores before "
            "softmax, or the logarithms of these"
        )


def _sum_to_one(logits: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # a sum beyond float32 is not 1
        return np.allclose(logits.sum(axis=1), 1, atol=1e-3)


def check_target(target: Any, size: int, count: int, said: str) -> None:
    """Positions within [0, size), or a mask of several."""
    target = np.asarray(target)
    if target.dtype == bool and target.shape == (count, size):
        return  # rows that mark no item are counted as bad
    if target.shape != (count,) or target.dtype.kind not in "iu":  # NumPy's integers have times
        raise CalibrateError(
            f"{said} {target.dtype}{target.shape}; "
            f"give integers ({count},), or bool {(count, size)}"
        )
    outside = target[(target < 0) | (target >= size)]
    if outside.size:
        raise CalibrateError(
            f"{said} {outside[0]}, which is not a position in [0, {size}); "
            "give the index of the item that should win"
        )
