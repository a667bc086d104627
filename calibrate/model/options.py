"""Options of a fit through a model, and the families of rules to solve for them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.core.rule import CONSTANT, KINDS, LOG_SIZE, TERMS, VARIABLES, Sharing
from calibrate.defaults import MAX_KL, MAX_STEPS, NLL_TOLERANCE_PER_TOKEN
from calibrate.errors import CalibrateError
from calibrate.model.parameters import (
    MAX_BETA,
    MIN_BETA,
    TRUST_REGION,
    RuleFamily,
    typical_sizes,
)
from calibrate.prompts.examples import ExampleSet


@dataclass(frozen=True)
class ModelOptions:
    """Options of a fit through a model.

    Raises:
      CalibrateError: an option is out of range, or two cannot be combined.
    """

    kind: str = CONSTANT  # one of KINDS
    trained_up_to: int | None = None  # length in tokens up to which answers may lose little
    max_kl: float = MAX_KL  # of retention text, nats per token
    tolerance: float = NLL_TOLERANCE_PER_TOKEN  # loss of NLL up to `trained_up_to`, nats per token
    max_steps: int = MAX_STEPS  # of the optimiser, for each family
    seed: int = 0  # of the order of the examples
    engines: Sharing | None = None  # of the constants that engines run; None: any rule
    sharing: Sharing = Sharing.PER_HEAD  # the heads that share a rule
    heads_per_layer: int | None = None  # that may have another beta than 1, at most; None: all

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CalibrateError(f"kind is {self.kind!r}; give one of {', '.join(KINDS)}")
        _require_within("max_kl", self.max_kl, 0, math.inf)
        _require_within("tolerance", self.tolerance, 0, math.inf)
        _require_within("steps", self.max_steps, 1, 1_000_000)
        _require_within("seed", self.seed, 0, math.inf)
        _require_within("heads_per_layer", self.heads_per_layer, 1, math.inf)
        if self.engines and self.kind != CONSTANT:
            raise CalibrateError(
                f'for export, only constants are fitted; give kind="{CONSTANT}"', parameter="kind"
            )
        is_shared = self.sharing is not Sharing.PER_HEAD or self.engines not in (
            None,
            Sharing.PER_HEAD,
        )
        if self.heads_per_layer and is_shared:
            raise CalibrateError(
                "heads of a layer share their rules or constants; leave heads_per_layer= out",
                parameter="heads_per_layer",
            )

    def record(self, weight: float) -> dict[str, Any]:
        """The options as a coefficient file records them, without those that have no effect.

        The tolerance has none without trained lengths.

        Args:
          weight: the interpolation weight of the fit.
        """
        recorded = {
            "through": "model",
            "kind": self.kind,
            "trained_up_to": self.trained_up_to,
            "max_kl": self.max_kl,
            "tolerance": self.tolerance if self.trained_up_to else None,
            "steps": self.max_steps,
            "interpolation": weight,
            "for_export": True if self.engines else None,
            "sharing": self.sharing.name.lower(),
            "heads_per_layer": self.heads_per_layer,
            "seed": self.seed,
        }
        return {key: option for key, option in recorded.items() if option is not None}


def _require_within(name: str, number: float | None, low: float, high: float) -> None:
    if number is not None and not low <= number <= high:
        raise CalibrateError(f"{name} is {number}; give a number from {low:g} to {high:g}")


def choose_families(options: ModelOptions, examples: ExampleSet) -> list[RuleFamily]:
    """The families to solve: first one constant for all heads, last the one that is asked for.

    A search for rules starts from the families between. With retention text, rules are a step from
    the baseline and need none.
    """
    sharing, has_text = options.sharing, any(cell.text for cell in examples.cells)
    if options.engines is not None:
        sharing = min(sharing, options.engines, key=list(Sharing).index)
    if has_text:
        pairs = [(options.kind, sharing)]
    else:
        pairs = [(LOG_SIZE, Sharing.GLOBAL)] if options.kind == LOG_SIZE else []
        pairs += [(kind, sharing) for kind in _nested_kinds(options.kind)]
    sizes = typical_sizes(np.array([len(example.tokens) for example in examples.examples]))
    return [
        RuleFamily(kind, shared_by, *sizes, _beta_bounds(kind, has_text))
        for kind, shared_by in dict.fromkeys([(CONSTANT, Sharing.GLOBAL), *pairs])
    ]


def _nested_kinds(kind: str) -> list[str]:
    """A kind, after simpler kinds, each of which is the richest that the next one contains."""
    terms = set(TERMS[kind])
    simpler = [x for x in KINDS[: KINDS.index(kind)] if set(TERMS[x]) < terms]
    return [*(_nested_kinds(simpler[-1]) if simpler else []), kind]


def _beta_bounds(kind: str, has_text: bool) -> tuple[float, float]:
    """Bounds of beta, which are narrow for a step from the baseline by entropy."""
    by_entropy = "H" in VARIABLES[kind]
    return TRUST_REGION if has_text and by_entropy else (MIN_BETA, MAX_BETA)
