"""Candidates of a fit through a model, kinds of rule x parameter sharing, and selection of one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import LOG_SIZE
from calibrate.core.rule_kinds import CONSTANT, ENTROPY, KINDS
from calibrate.datasets.examples import ExampleSet
from calibrate.defaults import MAX_KL, MAX_STEPS, NLL_TOLERANCE_PER_TOKEN
from calibrate.errors import CalibrateError
from calibrate.evidence.publish_threshold import MIN_GAIN, MIN_IMPROVEMENT_MODEL
from calibrate.evidence.selection_criterion import Gain, simplest_unbeaten
from calibrate.export.plan import Exportable
from calibrate.model.basis import (
    MAX_BETA,
    MIN_BETA,
    SHARED_SLOPE,
    TRUST_REGION,
    Basis,
    typical_sizes,
)
from calibrate.model.calibration_and_validation import ModelSolution
from calibrate.model.parameters import RuleFamily

_BASELINES = (CONSTANT, LOG_SIZE)  # of all heads together, beside which others are evaluated


@dataclass(frozen=True)
class ModelOptions:
    """Options of a fit through a model."""

    kind: str | None = None  # of the rules; None for the best on the validation split
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
        if self.kind not in (None, *KINDS):
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


def _require_exportable(kind: str | None, engines: Exportable) -> None:
    by_entropy = kind is not None and ENTROPY in KINDS[kind].needs
    if by_entropy or (kind == LOG_SIZE and engines.no_size):
        why = f" ({engines.no_size})" if engines.no_size else ""
        raise CalibrateError(
            f"engines run no rules of kind {kind} of this model{why}; for export, give "
            f'kind="{CONSTANT}", or leave the kind out',
            parameter="kind",
        )


def candidate_families(options: ModelOptions, examples: ExampleSet) -> list[RuleFamily]:
    """The candidates, the simplest first.

    Of a given kind without text, the candidates are what the search for it begins at, too. For
    export, they are what engines run, and what these can begin at. With few heads per layer, rules
    that all heads share are baselines alone.
    """
    engines, sharing = options.engines, options.sharing
    has_text = any(cell.text for cell in examples.cells)
    n_lengths = len({cell.length for cell in examples.cells if not cell.text})
    kinds = _kinds_for(n_lengths, has_text)
    if options.kind is not None:
        kinds = [*KINDS][: [*KINDS].index(options.kind) + 1]
    own = [options.kind] if options.kind and has_text else kinds
    shared = [x for x in kinds if x in _BASELINES or (sharing is Sharing.GLOBAL and x in own)]
    if engines is not None:
        shared, own = [CONSTANT], [CONSTANT]
        sharing = min(options.sharing, engines.factors, key=list(Sharing).index)
        if LOG_SIZE in kinds and not engines.no_size and not options.heads_per_layer:
            shared, own = [*_BASELINES, SHARED_SLOPE], [CONSTANT, SHARED_SLOPE]
    pairs = [(kind, Sharing.GLOBAL) for kind in shared]
    pairs += [(kind, sharing) for kind in own if sharing is not Sharing.GLOBAL]
    sizes = typical_sizes(np.array([len(example.tokens) for example in examples.examples]))
    return [
        RuleFamily(Basis(kind, *sizes, _bounds(kind, has_text)), shared_by)
        for kind, shared_by in pairs
    ]


def _kinds_for(n_lengths: int, has_text: bool) -> list[str]:
    """The kinds that are tried for answers of so many lengths.

    Rules in log n need as many as determine them: at one length they are constants for the answers,
    and spare the text of shorter contexts. Entropies grow with the context, so rules of the entropy
    need several to be bounded by the KL of longer text: polynomials of a language model's heads,
    fitted at 250 tokens, had a KL of 0.04 at 900, and constants 0.016.
    """
    kinds = [kind for kind in KINDS if KINDS[kind].min_sizes <= n_lengths]
    if has_text and n_lengths == 1:
        return [kind for kind in kinds if ENTROPY not in KINDS[kind].needs]
    return kinds


def _bounds(kind: str, has_text: bool) -> tuple[float, float]:
    """Bounds of beta: narrow for a step from the baseline, which text makes, by entropy."""
    by_entropy = kind in KINDS and ENTROPY in KINDS[kind].needs
    return TRUST_REGION if has_text and by_entropy else (MIN_BETA, MAX_BETA)


def solving_rounds(families: list[RuleFamily], options: ModelOptions) -> list[list[RuleFamily]]:
    """The candidates in the order in which they are solved; a round shares passes of text.

    The fit may stop early after the first round, of constants and what is simpler.
    """
    if options.kind or options.trained_up_to:
        return [families]
    n_first = 1 + max(i for i, family in enumerate(families) if family.kind == CONSTANT)
    return [x for x in (families[:n_first], families[n_first:]) if x]


def should_stop_early(solutions: Sequence[ModelSolution], options: ModelOptions) -> bool:
    """True if constants gained nothing, so that no other family is tried.

    A constant cannot keep the trained lengths and gain at others: a log-size rule can.
    """
    last = solutions[-1].family
    if last.kind != CONSTANT or last.is_global or options.kind or options.trained_up_to:
        return False
    return not any(_gain(x, None).is_at_least(MIN_GAIN) for x in solutions)


def select_solution(
    solutions: Sequence[ModelSolution], options: ModelOptions
) -> ModelSolution | None:
    """The simplest solution that no other beats significantly, or the last of a given kind.

    None if none beats the baseline.
    """
    kind, exports = options.kind, options.engines is not None
    if options.heads_per_layer:
        solutions = [x for x in solutions if not x.family.is_global]
    if exports:  # engines run a line in log n as a shared slope alone
        solutions = [x for x in solutions if x.family.kind != LOG_SIZE]
        kind = SHARED_SLOPE if kind == LOG_SIZE else kind
    if kind is None:
        return simplest_unbeaten(solutions, _gain, lambda _: MIN_IMPROVEMENT_MODEL)
    return [x for x in solutions if x.family.kind == kind][-1]


def _gain(solution: ModelSolution, other: ModelSolution | None) -> Gain:
    """The gain over another solution, which has to be significant.

    Over the baseline, None, one standard error is enough: the test split decides on that gain.
    """
    gain = solution.value.over(other and other.value)
    low, high = gain.interval
    return Gain(gain.mean, low if other else gain.mean - gain.error, high, gain.p)
