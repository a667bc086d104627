"""Coefficients: one fit in memory, immutable and hashable by the beta that it gives."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from calibrate.core.rule import N_COEFFICIENTS, N_DOMAIN, Rule
from calibrate.errors import CoefficientsError
from calibrate.store.coefficient_document import save_document
from calibrate.store.coefficient_schema import RULE_FIELDS, SCHEMA_VERSION
from calibrate.store.entry import (
    MAX_ENTROPY,
    MAX_INDEX,
    Entry,
    check_no_overlap,
    checked_entries,
)

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Coefficients:
    """One fit: what `adaptive_softmax` applies, and where it came from.

    Two are equal, and share a trace in JAX, when their rule and entries are: name and provenance
    take no part in comparisons.
    """

    rule: Rule
    entries: tuple[Entry, ...]
    name: str = field(default="unnamed", compare=False)
    version: int = field(default=1, compare=False)
    quality: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    path: Path | None = field(default=None, compare=False)
    # Fields of the file that this version does not know, and the minor version that may have them.
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    schema_version: str = field(default=SCHEMA_VERSION, compare=False, repr=False)
    # With its pin, if it was loaded from one: `path` is the copy in the cache, or None.
    address: str | None = field(default=None, compare=False)
    # Made with the fit. True if beta is always 1, and if it is a number of each head, whatever the
    # kind of rule: the runtime needs neither H nor n.
    is_identity: bool = field(init=False, compare=False, repr=False)
    ignores_inputs: bool = field(init=False, compare=False, repr=False)
    # Coefficients, domain, 1 and guards, (numbers,), or if heads differ, of each, and 0 where it is
    # not named, (numbers, heads). None for a fit with entries per layer. An array, as a compiler
    # may take arrays for inputs of its program, and floats for constants.
    numbers: "np.ndarray | None" = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        given = self.rule
        guards = (float(given.min_entropy), float(given.min_beta), float(given.max_beta))
        rule = Rule(*guards, given.outside, given.kind)
        object.__setattr__(self, "rule", rule)
        self._check_kind()
        if not 0 <= rule.min_entropy < math.inf:
            raise CoefficientsError(f"rule.min_entropy is {rule.min_entropy!r}; give nats >= 0")
        if not 0 < rule.min_beta <= rule.max_beta < math.inf:
            raise CoefficientsError(
                f"rule.min_beta is {rule.min_beta!r} and rule.max_beta {rule.max_beta!r}; "
                "give 0 < min_beta <= max_beta"
            )
        check_no_overlap(self.entries)
        object.__setattr__(self, "is_identity", rule.min_beta == rule.max_beta == 1)
        constants = all(entry.constant_beta(rule) is not None for entry in self.entries)
        object.__setattr__(self, "ignores_inputs", self.is_identity or constants)
        self._keep_numbers(self.entries)
        register_with_jax(type(self))

    def _keep_numbers(self, whole: tuple[Entry, ...]) -> None:
        """Makes `numbers`, for as many heads as the entries of the whole fit name."""
        import numpy as np  # deferred, so that the command line's help does not load NumPy

        n_heads = 1 + max(-1 if entry.head is None else entry.head for entry in whole)
        if n_heads > 1 + MAX_INDEX:
            raise CoefficientsError(f"head is {n_heads - 1}; give {MAX_INDEX} at most")
        numbers = None
        if self.entries[0].layer is None:
            guards = self.rule[:3]
            columns = [(*e.coefficients, *e.domain, 1.0, *guards) for e in self.entries]
            numbers = np.array(columns[0])
            if self.entries[0].head is not None:
                numbers = np.zeros((len(numbers), n_heads))
                for entry, column in zip(self.entries, columns, strict=True):
                    numbers[:, entry.head] = column
        object.__setattr__(self, "numbers", numbers)

    def _check_kind(self) -> None:
        """Checks the entries, and the guards, against the kind of rule."""
        kind = self.rule.kind
        if kind not in N_COEFFICIENTS:
            words = " or ".join(map(repr, N_COEFFICIENTS))
            raise CoefficientsError(f"rule.kind is {kind!r}; use {words}")
        object.__setattr__(self, "entries", checked_entries(self.entries, kind))
        outsides = ("clamp",) if self.rule.by_size else ("clamp", "identity")
        if self.rule.outside not in outsides:
            raise CoefficientsError(
                f"rule.outside is {self.rule.outside!r}; use {' or '.join(map(repr, outsides))}"
            )
        if not self.rule.by_entropy and self.rule.min_entropy != 0:
            raise CoefficientsError("a log-size rule has no min_entropy; use Rule.log_size()")

    @property
    def reference(self) -> str:
        """The pinned reference, NAME@VERSION."""
        return f"{self.name}@{self.version}"

    @property
    def place(self) -> str:
        """The address or path that it was loaded from."""
        return self.address or str(self.path)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the head that it was fitted to; None if it names none."""
        return self.source.get("fingerprint")

    @property
    def r_squared(self) -> float | None:
        """R^2 of log beta, which is that of log theta, on the rows of the fit, if it is known."""
        r_squared = self.quality.get("residuals", {}).get("log_beta_r_squared")
        return None if r_squared is None else float(r_squared)

    def save(self, path: Path | str, overwrite: bool = False) -> Path:
        """Writes the coefficient file, which `calibrate.load(path)` reads; returns the path.

        A file that has this very rule, made of the same rows, stays as it is.

        Args:
          path: a .json file in a folder that exists.
          overwrite: whether a file of something else is replaced.
        Raises:
          CoefficientsError: not such a path, another file is there, or the disk is full.
        """
        return save_document(self.document(), self.extra, Path(path), overwrite)

    def document(self) -> dict[str, Any]:
        """The content of its coefficient file, but for `extra`, and for the format and the id."""
        kind = RULE_FIELDS[self.rule.kind]
        guards = {name: getattr(self.rule, name) for name in kind.guards}
        return {
            "schema_version": self.schema_version,
            "name": self.name,
            "version": self.version,
            "rule": {"kind": self.rule.kind, **kind.words} | guards,
            "entries": [entry.document() for entry in self.entries],
            "quality": self.quality,
            "source": self.source,
            "provenance": self.provenance,
        }

    @property
    def of_whole_model(self) -> bool:
        """True if it was fitted end to end, to the answers of a model."""
        return bool(self.source.get("options", {}).get("through") == "model")

    @property
    def needs_entropy(self) -> bool:
        """Whether the runtime needs the entropy of each row."""
        return self.rule.by_entropy and not self.ignores_inputs

    @property
    def needs_size(self) -> bool:
        """Whether the runtime needs the number of unmasked items of each row."""
        return self.rule.by_size and not self.ignores_inputs

    @property
    def has_heads(self) -> bool:
        """True if heads of one layer differ."""
        if self.numbers is not None:
            return self.numbers.ndim > 1
        return self.entries[0].head is not None or len(self.entries) > 1

    @property
    def only(self) -> Entry:
        """The entry of a fit that has one for all heads.

        Raises:
          CoefficientsError: the fit distinguishes layers or heads.
        """
        self.refuse_layers()
        if self.has_heads:
            raise CoefficientsError(
                f"{self.reference} has an entry per head; give a fit with one entry for all heads"
            )
        return self.entries[0]

    def layer(self, index: int) -> "Coefficients":
        """The fit of one layer; where it names none of its heads, beta is 1 throughout."""
        chosen = tuple(
            replace(entry, layer=None) for entry in self.entries if entry.layer in (None, index)
        )
        if not chosen:
            return replace(self, **_IDENTITY)
        fit = replace(self, entries=chosen)
        fit._keep_numbers(self.entries)  # of one shape, so that layers share a compiled graph
        return fit

    def entry_of(self, layer: int | None, head: int | None) -> Entry | None:
        """The entry that covers a head; None where the fit does not name it, and beta is 1."""
        for entry in self.entries:
            if entry.layer in (None, layer) and entry.head in (None, head):
                return entry
        return None

    def by_head(self, n_heads: int) -> tuple[tuple[float, ...], ...]:
        """Per-head numbers: coefficients, domain, calibrated (1 or 0), each for every head.

        Raises:
          CoefficientsError: the fit names a head that does not exist, or distinguishes layers.
        """
        self.refuse_layers()
        kind = self.rule.kind
        # Nothing but the last number is read of heads that are not named; the others are safe.
        unnamed = [0.0] * N_COEFFICIENTS[kind] + [0.0, 1.0] * (N_DOMAIN[kind] // 2) + [0.0]
        rows: list[tuple[float, ...]] = [tuple(unnamed)] * n_heads
        for entry in self.entries:
            if entry.head is not None and entry.head >= n_heads:
                raise CoefficientsError(
                    f"{self.reference} has an entry for head {entry.head}, and there are "
                    f"{n_heads} heads; load the fit of this model"
                )
            for head in range(n_heads) if entry.head is None else (entry.head,):
                rows[head] = (*entry.coefficients, *entry.domain, 1.0)
        return tuple(zip(*rows, strict=True))

    def refuse_layers(self) -> None:
        """Raises CoefficientsError if the fit has entries per layer."""
        for entry in self.entries:
            if entry.layer is not None:
                raise CoefficientsError(
                    f"{self.reference} has entries per layer; choose one: coefficients.layer(i)"
                )


_registered: set[type] = set()
_registering = Lock()


def register_with_jax(node: type[Coefficients]) -> None:
    """Registers a class of fits as a static node of JAX's pytrees, once JAX is loaded."""
    if sys.modules.get("jax") is None:
        return
    from jax.tree_util import register_static  # also waits for a thread that is loading JAX

    with _registering:
        if node not in _registered:
            register_static(node)
            _registered.add(node)


_IDENTITY: dict[str, Any] = {
    "rule": Rule(max_beta=1.0),
    "entries": (Entry((0.0, 0.0, 0.0, 0.0, 1.0), (0.0, MAX_ENTROPY)),),
    "quality": {},
}


def identity() -> Coefficients:
    """Coefficients that leave softmax as it is: beta is 1 at every entropy."""
    return Coefficients(**_IDENTITY, name="identity")


def check_fit(coefficients: Coefficients) -> Coefficients:
    """Raises CoefficientsError for a name or None, before JAX or PyTorch fail on it."""
    if not isinstance(coefficients, Coefficients):
        raise CoefficientsError(
            f"coefficients is {coefficients!r}; give a fit, such as calibrate.load('max-retrieval')"
        )
    return coefficients


def check_given(coefficients: Coefficients, H: Any, n: Any) -> None:
    """Raises CoefficientsError if what beta is a function of is None."""
    rule = coefficients.rule
    for name, uses, value in (
        ("H, the entropy of the items", rule.by_entropy, H),
        ("n=, the number of unmasked items", rule.by_size, n),
    ):
        if uses and value is None:
            raise CoefficientsError(f"{coefficients.reference} is of kind {rule.kind}; give {name}")


register_with_jax(Coefficients)
