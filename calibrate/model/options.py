"""Options of a fit through a model, and the families of rules that it solves for them."""

import math
from dataclasses import dataclass

import numpy as np

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import CONSTANT, KINDS, LOG_SIZE, TERMS, VARIABLES
from calibrate.datasets.examples import ExampleSet
from calibrate.defaults import MAX_KL, MAX_STEPS, NLL_TOLERANCE_PER_TOKEN
from calibrate.errors import CalibrateError
from calibrate.export.plan import Exportable
from calibrate.model.parameters import (
    MAX_BETA,
    MIN_BETA,
    SHARED_SLOPE,
    TRUST_REGION,
    Basis,
    RuleFamily,
    typical_sizes,
)


@dataclass(frozen=True)
class ModelOptions:
    """Options of a fit through a model."""

    kind: str = CONSTANT  # of the rules: one of KINDS
    trained_up_to: int | None = None  # tokens: lengths at which answers may lose little
    max_kl: float = MAX_KL  # nats per token of retention text
    tolerance: float = NLL_TOLERANCE_PER_TOKEN  # nats of NLL that answers of these may lose
    interpolation: float | None = None  # weight of the rules; None: the largest within the bounds
    max_steps: int = MAX_STEPS  # of each family
    seed: int = 0  # of the order of the examples
    engines: Exportable | None = None  # publish a rule that they run; None: any
    sharing: Sharing = Sharing.PER_HEAD  # the heads that have one rule, at least
    heads_per_layer: int | None = None  # that may have another beta than 1; None: all

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CalibrateError(f"kind is {self.kind!r}; give one of {', '.join(KINDS)}")
        _require_within("max_kl", self.max_kl, 0, math.inf)
        _require_within("tolerance", self.tolerance, 0, math.inf)
        _require_within("interpolation", self.interpolation, 0.01, 1)
        _require_within("steps", self.max_steps, 1, 1_000_000)
        _require_within("seed", self.seed, 0, math.inf)
        _require_within("heads_per_layer", self.heads_per_layer, 1, math.inf)
        if self.engines:
            _require_exportable(self.kind, self.engines)
        if self.heads_per_layer:
            self._require_sparse()

    def _require_sparse(self) -> None:
        """Raises CalibrateError if heads of a layer have one rule."""
        why = None
        if self.sharing is not Sharing.PER_HEAD:
            why = "heads share their rules"
        elif self.engines and self.engines.factors is not Sharing.PER_HEAD:
            why = "heads of this model share their constants in engines"
        elif self.engines and self.kind == LOG_SIZE:
            why = "engines have one slope by log n for all heads"
        if why:
            raise CalibrateError(f"{why}; leave heads_per_layer= out", parameter="heads_per_layer")


def _require_within(name: str, number: float | None, low: float, high: float) -> None:
    if number is not None and not low <= number <= high:
        raise CalibrateError(f"{name} is {number}; give a number from {low:g} to {high:g}")


def _require_exportable(kind: str, engines: Exportable) -> None:
    if "H" in VARIABLES[kind] or (kind == LOG_SIZE and engines.no_size):
        why = f" ({engines.no_size})" if engines.no_size else ""
        raise CalibrateError(
            f"engines run no rules of kind {kind} of this model{why}; for export, give "
            f'kind="{CONSTANT}"',
            parameter="kind",
        )


def families_of(options: ModelOptions, examples: ExampleSet) -> list[RuleFamily]:
    """The families to solve: one constant for all heads first, the one that is asked for last.

    Those between are what the search for it begins at. With retention text, rules are a step from
    the baseline, and need none. Engines run a line in log n as a shared slope, which is searched
    for in any case.
    """
    sharing, has_text = options.sharing, any(cell.text for cell in examples.cells)
    if options.engines is not None:
        sharing = min(sharing, options.engines.factors, key=list(Sharing).index)
    if options.engines is not None and options.kind == LOG_SIZE:
        pairs = [(LOG_SIZE, Sharing.GLOBAL), (SHARED_SLOPE, Sharing.GLOBAL)]
        pairs += [(CONSTANT, sharing), (SHARED_SLOPE, sharing)]
    elif has_text:
        pairs = [(options.kind, sharing)]
    else:
        pairs = [(LOG_SIZE, Sharing.GLOBAL)] if options.kind == LOG_SIZE else []
        pairs += [(kind, sharing) for kind in _searched_kinds(options.kind)]
    sizes = typical_sizes(np.array([len(example.tokens) for example in examples.examples]))
    return [
        RuleFamily(Basis(kind, *sizes, _bounds(kind, has_text)), shared_by)
        for kind, shared_by in dict.fromkeys([(CONSTANT, Sharing.GLOBAL), *pairs])
    ]


def _searched_kinds(kind: str) -> list[str]:
    """A kind, after those that a search for it begins at: each is the richest that it contains."""
    terms = set(TERMS[kind])
    simpler = [x for x in KINDS[: KINDS.index(kind)] if set(TERMS[x]) < terms]
    return [*(_searched_kinds(simpler[-1]) if simpler else []), kind]


def _bounds(kind: str, has_text: bool) -> tuple[float, float]:
    """Bounds of beta: narrow for a step from the baseline, which text makes, by entropy."""
    by_entropy = "H" in VARIABLES.get(kind, ())
    return TRUST_REGION if has_text and by_entropy else (MIN_BETA, MAX_BETA)
