"""Fit: a fitted rule in memory, immutable, and hashable by the beta that it gives."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from calibrate.core.rule import N_COEFFICIENTS, N_DOMAIN, POLYNOMIAL, Rule, constant_text, formula
from calibrate.errors import CoefficientsError
from calibrate.storage.json_shapes import FLOAT32_MAX
from calibrate.store.check_pairs import verify_check_pairs
from calibrate.store.coefficient_document import id_of, read_document, save_document, text_of
from calibrate.store.coefficient_schema import RULE_FIELDS
from calibrate.store.entry import MAX_INDEX, Entry, check_no_overlap, checked_entries
from calibrate.store.fit_table import FitTable

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, repr=False)
class Fit:
    """A fitted rule, which `adaptive_softmax` applies, with its evidence and its origin.

        fit = calibrate.load("max-retrieval")
        print(fit)
        print(fit.table)

    Two fits are equal, and share a trace in JAX, if their rules and entries are equal: name,
    evidence and origin are not compared. fits/file-format.md explains the fields.
    """

    rule: Rule
    entries: tuple[Entry, ...]
    name: str = field(default="unnamed", compare=False)
    version: int = field(default=1, compare=False)
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)
    path: Path | None = field(default=None, compare=False)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)  # fields "x-..."
    # With its pin, if it was loaded from one: `path` is the copy in the cache, or None.
    address: str | None = field(default=None, compare=False)
    # Derived: beta is 1 everywhere; beta is one number for each head, whatever the kind of rule, so
    # that a runtime needs neither H nor n.
    is_identity: bool = field(init=False, compare=False)
    ignores_inputs: bool = field(init=False, compare=False)
    # Coefficients, domain, 1 and guards, (numbers,); if heads differ, of each head, and 0 for heads
    # without an entry, (numbers, heads). None for a fit with entries per layer. An array, since
    # compilers take arrays as inputs of the program and floats as its constants.
    numbers: "np.ndarray | None" = field(init=False, compare=False)

    def __post_init__(self) -> None:
        given = self.rule
        guards = (float(given.min_entropy), float(given.min_beta), float(given.max_beta))
        rule = Rule(*guards, given.outside, given.kind)
        object.__setattr__(self, "rule", rule)
        self._check_kind()
        if not 0 <= rule.min_entropy <= FLOAT32_MAX:
            raise CoefficientsError(f"rule.min_entropy is {rule.min_entropy!r}; give nats >= 0")
        if not 0 < rule.min_beta <= rule.max_beta <= FLOAT32_MAX:
            raise CoefficientsError(
                f"rule.min_beta is {rule.min_beta!r} and rule.max_beta {rule.max_beta!r}; "
                "give 0 < min_beta <= max_beta <= 3.4e38"
            )
        check_no_overlap(self.entries)
        object.__setattr__(self, "is_identity", rule.min_beta == rule.max_beta == 1)
        constants = all(entry.constant_beta(rule) is not None for entry in self.entries)
        object.__setattr__(self, "ignores_inputs", self.is_identity or constants)
        self._keep_numbers(self.entries)
        register_with_jax()

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
        outsides = ("clamp", "identity") if kind == POLYNOMIAL else ("clamp",)
        if self.rule.outside not in outsides:
            raise CoefficientsError(
                f"rule.outside is {self.rule.outside!r}; use {' or '.join(map(repr, outsides))}"
            )
        if not self.rule.by_entropy and self.rule.min_entropy != 0:
            raise CoefficientsError(
                f"rule.min_entropy is {self.rule.min_entropy!r}; a rule of kind {kind!r} has none"
            )

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
        return self._of_head("r_squared_log_beta")

    @property
    def effective_degrees(self) -> float | None:
        """The effective degrees of freedom of a fit of one head, if known."""
        return self._of_head("degrees_of_freedom")

    def _of_head(self, name: str) -> float | None:
        heads = self.evidence.get("heads", ())
        return heads[0].get(name) if len(heads) == 1 else None

    @property
    def table(self) -> FitTable:
        """The evidence on held-out inputs: NLL by n, and of each kind of rule."""
        return FitTable.of(self.evidence)

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
        if gains := self.table.gains:
            over = "one constant for all heads" if self.of_whole_model else "the baseline"
            lines += [f"gain over {over}, in nats: {gains}"]
        return "\n".join(filter(None, [*lines, self.verdict]))

    def save(self, path: Path | str, overwrite: bool = False) -> Path:
        """Writes the coefficient file, which `calibrate.load(path)` reads; returns the path.

        A file with this rule, fitted to the same inputs, stays as it is.

        Args:
          path: a .json file in a folder that exists.
          overwrite: whether another file is replaced.
        Raises:
          CoefficientsError: the path is not such a file, there is another file, the fit cannot be
            read back (its name, say), or the disk is full.
        """
        document = self.document()
        data = text_of(document, self.extra).encode()
        Fit.from_document(read_document(data))
        return save_document(data, id_of(document), Path(path), overwrite)

    def document(self) -> dict[str, Any]:
        """The content of its coefficient file, but for format, schema version, id and `extra`."""
        kind = RULE_FIELDS[self.rule.kind]
        guards = {name: getattr(self.rule, name) for name in kind.guards}
        return {
            "name": self.name,
            "version": self.version,
            "rule": {"kind": self.rule.kind, **kind.words} | guards,
            "entries": [entry.document() for entry in self.entries],
            "evidence": self.evidence,
            "source": self.source,
            "provenance": self.provenance,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], path: Path | None = None) -> "Fit":
        """The fit of a document whose shape was checked; the file lies at `path`.

        Raises:
          CoefficientsError: numbers out of range, or coefficients that miss their check pairs.
        """
        kind = document["rule"]["kind"]
        guards = {name: document["rule"][name] for name in RULE_FIELDS[kind].guards}
        fields = ("name", "version", "evidence", "source", "provenance")
        return cls(
            Rule(**{"min_entropy": 0.0, **guards}, kind=kind),
            tuple([_read_entry(entry, i, kind) for i, entry in enumerate(document["entries"])]),
            path=path,
            extra={name: document[name] for name in document if name.startswith("x-")},
            **{name: document[name] for name in fields},
        )

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


def _read_entry(value: Mapping[str, Any], i: int, kind: str) -> Entry:
    """The entry at position i of a document."""
    coefficients, domain = tuple(value["coefficients"]), tuple(value["domain"])
    check = tuple(map(tuple, value["check"]))
    try:
        entry = Entry(coefficients, domain, value["layer"], value["head"], check)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"entries[{i}].{refusal}") from None
    verify_check_pairs(entry.coefficients, entry.domain, check, kind, ("entries", i))
    return entry


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


_IDENTITY: dict[str, Any] = {
    "rule": Rule.constant(1.0, 1.0),
    "entries": (Entry((1.0,)),),
    "evidence": {},
}


def identity() -> Fit:
    """The fit of the baseline: beta is 1."""
    return Fit(**_IDENTITY, name="identity")


register_with_jax()
