"""Coefficients: one fit in memory, immutable and hashable by the beta that it gives."""

import importlib.abc
import importlib.util
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.maths.rule import Rule

N_COEFFICIENTS = 5


@dataclass(frozen=True)
class Entry:
    """The polynomial of one head, or of all where `layer` and `head` are None."""

    coefficients: tuple[float, ...]  # highest power first
    domain: tuple[float, float]  # [lo, hi]: the entropies that it was fitted on, nats
    layer: int | None = None
    head: int | None = None

    def __post_init__(self):
        finite = all(map(math.isfinite, self.coefficients))
        if len(self.coefficients) != N_COEFFICIENTS or not finite:
            raise CoefficientsError(
                f"coefficients are {self.coefficients!r}; give {N_COEFFICIENTS} finite numbers, "
                "highest power first"
            )
        lo, hi = self.domain
        if not 0 <= lo < hi < math.inf:
            raise CoefficientsError(f"domain is {self.domain!r}; give 0 <= lo < hi, in nats")


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

    def __post_init__(self):
        rule = self.rule
        if rule.outside not in ("clamp", "identity"):
            raise CoefficientsError(f"outside is {rule.outside!r}; use 'clamp' or 'identity'")
        if not 0 <= rule.min_entropy < math.inf:
            raise CoefficientsError(f"min_entropy is {rule.min_entropy!r}; give nats >= 0")
        if not 0 < rule.min_beta <= rule.max_beta < math.inf:
            raise CoefficientsError(
                f"min_beta is {rule.min_beta!r} and max_beta {rule.max_beta!r}; "
                "give 0 < min_beta <= max_beta"
            )
        if not self.entries:
            raise CoefficientsError("entries are empty; give one at least")

    @property
    def reference(self) -> str:
        """The pinned reference, NAME@VERSION."""
        return f"{self.name}@{self.version}"

    @property
    def only(self) -> Entry:
        """The entry of a fit for all heads alike.

        Raises:
          CoefficientsError: the fit distinguishes layers or heads.
        """
        entry = self.entries[0]
        if len(self.entries) != 1 or entry.layer is not None or entry.head is not None:
            raise CoefficientsError(
                f"{self.reference} has entries per layer or head, which this version cannot "
                "apply; use a fit for all heads"
            )
        return entry


def identity() -> Coefficients:
    """Coefficients that leave softmax as it is: beta is 1 at every entropy."""
    entry = Entry((0.0, 0.0, 0.0, 0.0, 1.0), (0.0, 64.0))
    return Coefficients(Rule(max_beta=1.0), (entry,), name="identity")


class _RegisterOnceJaxIsLoaded(importlib.abc.MetaPathFinder):
    """Waits for `import jax`, and makes Coefficients a static node of its pytrees.

    A fit may be loaded before JAX is, and passed to a jitted function straight after.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                module.tree_util.register_static(Coefficients)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


if "jax" in sys.modules:
    sys.modules["jax"].tree_util.register_static(Coefficients)
else:
    sys.meta_path.insert(0, _RegisterOnceJaxIsLoaded())
