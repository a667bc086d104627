"""Entries of a fit: the coefficients and domain of one head, or of all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calibrate.core.rule import (
    DEGREE,
    N_COEFFICIENTS,
    N_DOMAIN,
    TERMS,
    RuleForm,
    beta_of,
)
from calibrate.errors import CoefficientsError
from calibrate.storage.strict_json import FLOAT32_MAX
from calibrate.store.coefficient_fields import MAX_ENTROPY

if TYPE_CHECKING:
    import numpy as np

CheckPairs = tuple[tuple[float, ...], ...]  # (p,), (x, p(x)) or (H, log n, p(H, log n))


@dataclass(frozen=True)
class Entry:
    """The rule of one head, or of all where `layer` and `head` are None.

    Attributes:
      coefficients: of the terms in `core/rule.py`; as many as the kind of rule has.
      domain: [lo, hi] of the fitted entropies, in nats; or of log n; of both; or empty.
      check: the check pairs of the file that it was read from; empty: `make_check_pairs`.
    Raises:
      CoefficientsError: numbers that are not finite, or a domain that is empty or out of range.
    """

    coefficients: tuple[float, ...]
    domain: tuple[float, ...] = ()
    layer: int | None = None
    head: int | None = None
    check: CheckPairs = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        try:  # integers and NumPy's numbers become floats, as in a file
            object.__setattr__(self, "coefficients", tuple(map(float, self.coefficients)))
            object.__setattr__(self, "domain", tuple(map(float, self.domain)))
        except (TypeError, ValueError, OverflowError) as failure:
            raise CoefficientsError(
                f"coefficients or domain are not numbers ({failure}); give finite numbers"
            ) from failure
        if not all(abs(number) <= FLOAT32_MAX for number in self.coefficients):
            raise CoefficientsError(
                f"coefficients are {self.coefficients!r}; give finite numbers of at most 3.4e38"
            )
        ranges = zip(self.domain[::2], self.domain[1::2], strict=False)
        if not all(0 <= lo < hi <= MAX_ENTROPY for lo, hi in ranges):
            raise CoefficientsError(
                f"domain is {list(self.domain)!r}; give lo and hi, 0 <= lo < hi <= "
                f"{MAX_ENTROPY:g}, in nats of entropy, in log n, or of both"
            )

    def beta_at(self, H: Any, log_n: Any, rule: RuleForm) -> "np.ndarray":
        """beta of rows with these entropies and log n, arrays of NumPy.

        Arguments on which a rule of this kind does not depend may be None.
        """
        import numpy as np  # deferred, so that the command line's help does not load NumPy

        beta = np.asarray(beta_of(H, log_n, self.coefficients, self.domain, rule, np))
        like = log_n if H is None else H
        return beta if like is None or beta.ndim else np.full(np.shape(like), beta)

    def constant_beta(self, rule: RuleForm) -> float | None:
        """beta, if it is the same for every row; else None."""
        terms = list(self.coefficients)
        beta = terms.pop(TERMS[rule.kind].index("1"))
        beta = min(max(beta, rule.min_beta), rule.max_beta)
        # A threshold, or `outside`, sets beta to 1 at some entropies.
        is_switched_off = rule.outside != "clamp" or rule.min_entropy > 0
        return None if any(terms) or (is_switched_off and beta != 1) else beta


def check_entries(entries: Sequence[Entry], kind: str) -> None:
    """Raises CoefficientsError unless these are entries of one kind of rule, one for each head."""
    if not entries:
        raise CoefficientsError("entries are empty; give one at least")
    for i, entry in enumerate(entries):
        coefficients = f"entries[{i}].coefficients are {entry.coefficients!r}"
        if len(entry.coefficients) != N_COEFFICIENTS[kind]:
            raise CoefficientsError(
                f"{coefficients}; give the {N_COEFFICIENTS[kind]} of a rule of kind {kind!r}"
            )
        if len(entry.domain) != N_DOMAIN[kind]:
            raise CoefficientsError(
                f"entries[{i}].domain is {list(entry.domain)!r}; give the {N_DOMAIN[kind]} "
                f"numbers of a rule of kind {kind!r}"
            )
        # Bounds every step of the evaluation, so that none overflows in float32.
        end = max([1.0, *entry.domain[1::2]])
        largest = sum(map(abs, entry.coefficients)) * end**DEGREE
        if not largest <= FLOAT32_MAX:
            raise CoefficientsError(
                f"{coefficients}; their rule is beyond float32 on the domain "
                f"{list(entry.domain)!r}; give smaller ones"
            )
    _check_overlap([(entry.layer, entry.head) for entry in entries])


def _check_overlap(heads: Sequence[tuple[int | None, int | None]]) -> None:
    """Raises CoefficientsError if a head has two entries; None stands for all layers, or heads."""
    of_head, of_layer = Counter(heads), Counter(layer for layer, _ in heads)
    for i, (layer, head) in enumerate(heads):
        overlaps_layers = layer is None and len(of_layer) > 1
        overlaps_heads = head is None and of_layer[layer] > 1
        if overlaps_layers or overlaps_heads or of_head[layer, head] > 1:
            raise CoefficientsError(
                f"entries[{i}] is for layer {layer}, head {head} (None: all), which another entry "
                "covers too; keep one of them"
            )
