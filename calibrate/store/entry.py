"""Entries of a fit: the rule of one head, or of all, in numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from calibrate.core.rule import N_COEFFICIENTS, N_DOMAIN, TERMS, Rule, bare_value, beta_of
from calibrate.errors import CoefficientsError
from calibrate.storage.json_shapes import FLOAT32_MAX
from calibrate.store.check_pairs import make_check_pairs

if TYPE_CHECKING:
    import numpy as np

MAX_ENTROPY = 64.0  # nats, and log n: e^64 items are more than any memory holds
MAX_INDEX = 32_767  # of a layer or head: collections hold them as int16


@dataclass(frozen=True)
class Entry:
    """The rule of one head, or of all where `layer` and `head` are None."""

    coefficients: tuple[float, ...]  # in the order of `core/rule.py`; as many as the kind has
    # [lo, hi] of the entropies, in nats, or of log n, that it was fitted on; of both; or neither.
    domain: tuple[float, ...] = ()
    layer: int | None = None
    head: int | None = None
    # The rule at points of the domain, see `check_pairs.py`. `Fit`, which knows the kind of rule,
    # makes them if they are not given.
    check: tuple[tuple[float, ...], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        try:  # integers and NumPy's numbers become floats, as in a file
            object.__setattr__(self, "coefficients", tuple(map(float, self.coefficients)))
            object.__setattr__(self, "domain", tuple(map(float, self.domain)))
        except (TypeError, ValueError, OverflowError) as failure:
            raise CoefficientsError(
                f"coefficients or domain are not numbers ({failure}); give finite numbers"
            ) from failure
        coefficients, domain = self.coefficients, self.domain
        if not all(abs(x) <= FLOAT32_MAX for x in coefficients):
            raise CoefficientsError(
                f"coefficients are {coefficients!r}; give finite numbers of at most 3.4e38"
            )
        in_order = all(
            0 <= lo < hi <= MAX_ENTROPY for lo, hi in zip(domain[::2], domain[1::2], strict=False)
        )
        if not in_order:
            raise CoefficientsError(
                f"domain is {list(domain)!r}; give lo and hi, 0 <= lo < hi <= {MAX_ENTROPY:g}, in "
                "nats of entropy, in log n, or of both"
            )

    def beta_at(self, H: Any, log_n: Any, rule: Rule) -> "np.ndarray":
        """beta of rows with these entropies and log n, arrays of NumPy, by a rule of its kind.

        Those on which beta does not depend may be None.
        """
        import numpy as np  # deferred, so that the command line's help does not load NumPy

        beta = np.asarray(beta_of(H, log_n, self.coefficients, self.domain, rule, np))
        like = log_n if H is None else H
        return beta if like is None or beta.ndim else np.full(np.shape(like), beta)

    def constant_beta(self, rule: Rule) -> float | None:
        """beta, if it is the same for every row by a rule of its kind; else None."""
        terms = list(self.coefficients)
        beta = terms.pop(TERMS[rule.kind].index("1"))
        beta = min(max(beta, rule.min_beta), rule.max_beta)
        is_switched_off = rule.outside != "clamp" or rule.min_entropy > 0  # to 1, at some H
        return None if any(terms) or (is_switched_off and beta != 1) else beta

    def document(self) -> dict[str, Any]:
        """The entry as a coefficient file has it."""
        return {
            "layer": self.layer,
            "head": self.head,
            "coefficients": list(self.coefficients),
            "domain": list(self.domain),
            "check": list(map(list, self.check)),
        }


def checked_entries(entries: Sequence[Entry], kind: str) -> tuple[Entry, ...]:
    """Entries with their check pairs; CoefficientsError if one is not of this kind of rule."""
    return tuple([_checked(i, entry, kind) for i, entry in enumerate(entries)])


def _checked(i: int, entry: Entry, kind: str) -> Entry:
    """An entry with its check pairs; CoefficientsError if it is not of the kind of rule."""
    n, n_domain = N_COEFFICIENTS[kind], N_DOMAIN[kind]
    if len(entry.coefficients) != n:
        raise CoefficientsError(
            f"entries[{i}].coefficients are {entry.coefficients!r}; give the {n} of a rule of "
            f"kind {kind!r}"
        )
    if len(entry.domain) != n_domain:
        raise CoefficientsError(
            f"entries[{i}].domain is {list(entry.domain)!r}; give the {n_domain} numbers of a "
            f"rule of kind {kind!r}"
        )
    # The sum of the terms' magnitudes: no step of the evaluation in float32 is beyond it.
    ends = tuple(max(1.0, hi) for hi in entry.domain[1::2])
    if not bare_value(ends, list(map(abs, entry.coefficients)), kind) <= FLOAT32_MAX:
        raise CoefficientsError(
            f"entries[{i}].coefficients are {entry.coefficients!r}; their rule is beyond float32 "
            f"on the domain {list(entry.domain)!r}; give smaller ones"
        )
    if entry.check:
        return entry
    try:
        check = make_check_pairs(entry.coefficients, entry.domain, kind)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"entries[{i}].{refusal}") from None
    return replace(entry, check=check)


def check_no_overlap(entries: Sequence[Entry]) -> None:
    """Raises CoefficientsError if a head has two rules; None stands for every layer, or head."""
    if not entries:
        raise CoefficientsError("entries are empty; give one at least")
    pairs = [(entry.layer, entry.head) for entry in entries]
    of_pair, of_layer = Counter(pairs), Counter(layer for layer, _ in pairs)
    for i, (layer, head) in enumerate(pairs):
        all_layers = layer is None and len(of_layer) > 1
        all_heads = head is None and of_layer[layer] > 1
        if all_layers or all_heads or of_pair[layer, head] > 1:
            raise CoefficientsError(
                f"entries[{i}] is for layer {layer}, head {head} (None: all), which another entry "
                "covers too; keep one of them"
            )
