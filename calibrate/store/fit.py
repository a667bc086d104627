"""Fit: a fitted rule in memory, immutable, and hashable by the beta that it gives."""

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from calibrate.core.rule import (
    N_COEFFICIENTS,
    N_DOMAIN,
    POLYNOMIAL,
    TERMS,
    RuleForm,
    constant_text,
    formula,
)
from calibrate.errors import CoefficientsError
from calibrate.storage.strict_json import FLOAT32_MAX
from calibrate.store.coefficient_fields import rule_fields
from calibrate.store.coefficient_file import document_id, document_text, save_document
from calibrate.store.entries import Entry, check_entries
from calibrate.store.fit_table import evidence_table, kind_gains

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, repr=False)
class Fit:
    """A fitted rule, which `adaptive_softmax` applies, with its evidence and its origin.

    Two fits are equal, and share a trace in JAX, if their rules and entries are equal: name,
    evidence and origin are not compared. The JSON Schema explains the fields.

    >>> import calibrate
    >>> fit = calibrate.load("paper@1")
    >>> fit.coefficients
    (-0.037, 0.481, -2.3, 4.917, -1.791)
    >>> fit.rule.min_beta, fit.rule.max_beta
    (1.0, 64.0)

    Attributes:
      rule: the kind of rule and its guards.
      entries: the coefficients of each head, or of all heads.
      extra: the user's own fields of the file, whose names begin with "x-".
      path: the file that it was loaded from; of an address, the copy in the cache, or None.
      address: with its pin, if it was loaded from one.
      is_identity: True if both bounds of beta are 1, as of `identity()`; then beta is 1 everywhere.
      ignores_inputs: True if beta is one number for each head, whatever the kind of rule, so that a
        runtime needs neither H nor n.
      needs_entropy, needs_size: True if the runtime needs the entropy of each row, or the number of
        its unmasked items.
      has_heads: True if an entry names a head, or there are several entries (also per layer).
      numbers: coefficients, domain, 1 and guards: (numbers,); if heads differ, (numbers, heads),
        with 0 for heads without an entry. None for a fit with entries per layer. An array, since
        compilers take arrays as inputs of a program and floats as its constants.
      cache: what a runtime makes of the numbers, such as tensors; not copied.
    Raises:
      CoefficientsError: guards out of range, entries that are not of the kind of rule, or two
        entries for one head.
    """

    rule: RuleForm
    entries: tuple[Entry, ...]
    name: str = field(default="unnamed", compare=False)
    version: int = field(default=1, compare=False)
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)
    path: Path | None = field(default=None, compare=False)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    address: str | None = field(default=None, compare=False)
    is_identity: bool = field(init=False, compare=False)
    ignores_inputs: bool = field(init=False, compare=False)
    needs_entropy: bool = field(init=False, compare=False)
    needs_size: bool = field(init=False, compare=False)
    has_heads: bool = field(init=False, compare=False)
    numbers: "np.ndarray | None" = field(init=False, compare=False)
    cache: dict[Hashable, Any] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        given = self.rule
        guards = (float(given.min_entropy), float(given.min_beta), float(given.max_beta))
        rule = RuleForm(*guards, given.outside, given.kind)
        _check_rule(rule)
        check_entries(self.entries, rule.kind)
        constants = [entry.constant_beta(rule) for entry in self.entries]
        entries, varies = tuple(self.entries), None in constants
        known = {  # fields, since a runtime reads them in every call
            "rule": rule,
            "entries": entries,
            "is_identity": rule.min_beta == rule.max_beta == 1,
            "ignores_inputs": not varies,
            "needs_entropy": varies and rule.by_entropy,
            "needs_size": varies and rule.by_size,
            "has_heads": entries[0].head is not None or len(entries) > 1,
            "cache": {},
        }
        for name, value in known.items():
            object.__setattr__(self, name, value)
        self._keep_numbers(self.entries)
        register_with_jax()

    def __getstate__(self) -> dict[str, Any]:
        """The fields for a copy or another process."""
        return self.__dict__ | {"cache": {}}

    def _keep_numbers(self, whole: tuple[Entry, ...]) -> None:
        """Makes `numbers`, for as many heads as the entries of the whole fit name."""
        import numpy as np  # deferred, so that the command line's help does not load NumPy

        n_heads = 1 + max(-1 if entry.head is None else entry.head for entry in whole)
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
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients of a fit with one entry for all heads, in the order of its kind."""
        return self.only.coefficients

    @property
    def verdict(self) -> str:
        """The verdict on held-out inputs; "" if there is none."""
        return str(self.evidence.get("verdict", ""))

    @property
    def r_squared(self) -> float | None:
        """R^2 of log beta on the inputs with a finite optimum, of a fit of one head, if known."""
        return self._of_one_head("r_squared_log_beta")

    @property
    def effective_degrees(self) -> float | None:
        """The effective degrees of freedom of a fit of one head, if known."""
        return self._of_one_head("degrees_of_freedom")

    def _of_one_head(self, name: str) -> float | None:
        heads = self.evidence.get("heads", ())
        return heads[0].get(name) if len(heads) == 1 else None

    @property
    def table(self) -> str:
        """The evidence on held-out inputs as text: NLL by n, and of each kind of rule."""
        return evidence_table(self.evidence)

    @property
    def of_whole_model(self) -> bool:
        """True if it was fitted end to end, to the answers of a model."""
        return bool(self.source.get("options", {}).get("through") == "model")

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

    def refuse_layers(self) -> None:
        """Raises CoefficientsError if the fit has entries per layer."""
        for entry in self.entries:
            if entry.layer is not None:
                raise CoefficientsError(
                    f"{self.reference} has entries per layer; choose one: coefficients.layer(i)"
                )

    def layer(self, index: int) -> "Fit":
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
        """The entry that covers a head; None if the fit does not name it, so that beta is 1."""
        for entry in self.entries:
            if entry.layer in (None, layer) and entry.head in (None, head):
                return entry
        return None

    def by_head(self, n_heads: int) -> tuple[tuple[float, ...], ...]:
        """Per-head numbers: coefficients, domain, calibrated (1 or 0), each for every head.

        Unlike `numbers`, without guards, and for the heads of an array, not only those with an
        entry.

        Raises:
          CoefficientsError: the fit names a head that does not exist, or distinguishes layers.
        """
        self.refuse_layers()
        kind = self.rule.kind
        # Of heads that are not named only the last number is read; the others are safe to evaluate.
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

    def __repr__(self) -> str:
        """The reference, rule, gains and verdict, in at most ten lines."""
        rule, entry = self.rule, self.entries[0]
        beta = f"beta = {formula(rule.kind, entry.coefficients)}"
        if self.has_heads or entry.layer is not None:
            beta = f"{len(self.entries):,} entries for heads or layers"
        elif (constant := entry.constant_beta(rule)) is not None:
            beta = f"beta = {constant_text(constant)}"
        bounds = f"{rule.min_beta:g} <= beta <= {rule.max_beta:g}"
        if rule.min_entropy:
            bounds += f"; beta = 1 up to H = {rule.min_entropy:g} nats"
        lines = [f"{self.reference}: {rule.kind}", beta, bounds]
        degrees, r_squared = self.effective_degrees, self.r_squared
        if degrees is not None:
            lines += [f"effective degrees of freedom {degrees:.3g}"]
        if r_squared is not None:
            lines += [f"R^2 of log beta {r_squared:.3g}"]
        if gains := kind_gains(self.evidence):
            over = "one constant for all heads" if self.of_whole_model else "the baseline"
            lines += [f"gain over {over}, in nats: {gains}"]
        return "\n".join(filter(None, [*lines, self.verdict]))

    def save(self, path: Path | str, overwrite: bool = False) -> Path:
        """Writes the coefficient file, which `calibrate.load(path)` reads.

        A file with this rule, fitted to the same inputs, stays as it is.

        Args:
          path: a .json file in a folder that exists.
          overwrite: True replaces another file.
        Returns:
          The absolute path.
        Raises:
          CoefficientsError: the path is not such a file, there is another file, the fit could not
            be read again (its name, say), or the disk is full.

        >>> import calibrate, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = calibrate.load("paper@1").save(f"{folder}/mine.json")
        ...     calibrate.load(path) == calibrate.load("paper@1")
        True
        """
        return save_document(self.document(), Path(path), overwrite)

    def document(self) -> dict[str, Any]:
        """The content of its coefficient file, but for format, schema version and id."""
        return {
            "name": self.name,
            "version": self.version,
            "rule": rule_fields(self.rule),
            "entries": self.entries,
            "evidence": self.evidence,
            "source": self.source,
            "provenance": self.provenance,
            **self.extra,
        }


def _check_rule(rule: RuleForm) -> None:
    """Raises CoefficientsError for an unknown kind, or guards that its kind cannot have."""
    outsides = ("clamp", "identity") if rule.kind == POLYNOMIAL else ("clamp",)
    most_entropy = FLOAT32_MAX if rule.kind in TERMS and rule.by_entropy else 0.0
    if (
        rule.kind not in TERMS
        or rule.outside not in outsides
        or not 0 <= rule.min_entropy <= most_entropy
        or not 0 < rule.min_beta <= rule.max_beta <= FLOAT32_MAX
    ):
        raise CoefficientsError(
            f"rule is {rule}; give a kind of {', '.join(TERMS)}, one outside of "
            f"{', '.join(outsides)}, 0 <= min_entropy <= {most_entropy:g}, and "
            "0 < min_beta <= max_beta <= 3.4e38"
        )


_IDENTITY: dict[str, Any] = {
    "rule": RuleForm.constant(1.0, 1.0),
    "entries": (Entry((1.0,)),),
    "evidence": {},
}


def identity() -> Fit:
    """The fit of the baseline, whose beta is 1.

    >>> import calibrate
    >>> calibrate.identity().is_identity
    True
    """
    return Fit(**_IDENTITY, name="identity")


def dumps(fit: Fit) -> str:
    """The text of the coefficient file; CoefficientsError if a value is not one of JSON."""
    return document_text(fit.document())


def digest(fit: Fit) -> str:
    """The fit's `id`: sha256 of the canonical JSON of rule, entries and source."""
    return document_id(fit.document())


_registered: list[type] = []
_registering = Lock()


def register_with_jax() -> None:
    """Registers fits as static nodes of JAX's pytrees, once JAX is loaded."""
    if _registered or sys.modules.get("jax") is None:
        return
    from jax.tree_util import register_static  # also waits for a thread that is loading JAX

    with _registering:
        if not _registered:
            register_static(Fit)
            _registered.append(Fit)


register_with_jax()
