"""The candidate rules of a fit through a model: kinds and parameter sharing."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.core.rule import ENTROPY_AND_SIZE, LOG_SIZE
from calibrate.errors import CalibrateError
from calibrate.evidence.non_inferiority import MAX_KL, NLL_TOLERANCE_PER_TOKEN
from calibrate.evidence.prior import MIN_GAIN, Gain, simplest_unbeaten
from calibrate.export.plan import GLOBAL, PER_HEAD
from calibrate.export.proof import Exportable
from calibrate.model.head_rule_optimizer import MAX_STEPS, HeadRuleOptimizer, Scorer, Solution
from calibrate.model.objective import Objective
from calibrate.model.parameters import COMMITMENT, CONSTANT, SHARED_SLOPE, Form, typical
from calibrate.model.questions import answers_of
from calibrate.model.splits import CALIBRATION, VALIDATION, BatchSampler, split

MAX_VALIDATION = 32  # examples of a template and length, unless it has a margin
MIN_IMPROVEMENT_MODEL = 0.01  # nats, of one form over a simpler one
_SHARED = (CONSTANT, LOG_SIZE)
_EACH = (CONSTANT, LOG_SIZE, COMMITMENT, ENTROPY_AND_SIZE)

Began = Callable[[str, list[list[int]]], None]  # what, and the examples of each pass at most


@dataclass(frozen=True)
class ModelOptions:
    """Options of a fit through a model."""

    kind: str | None = None  # of the rules; None for the best on the validation split
    trained_up_to: int | None = None  # tokens: lengths at which answers may lose little
    max_kl: float = MAX_KL  # nats per token of retention text
    tolerance: float = NLL_TOLERANCE_PER_TOKEN  # nats of NLL that answers of these may lose
    interpolation: float | None = None  # weight of the rules; None: the largest within the bounds
    most_steps: int = MAX_STEPS  # of each form
    seed: int = 0  # of the order of the examples
    engines: Exportable | None = None  # publish a rule that they run; None: any

    def __post_init__(self) -> None:
        engines, kind = self.engines, self.kind
        if kind not in (None, *_EACH):
            raise CalibrateError(f"kind is {kind!r}; give one of {', '.join(_EACH)}")
        for name, value, low, high in (
            ("max_kl", self.max_kl, 0, math.inf), ("tolerance", self.tolerance, 0, math.inf),
            ("interpolation", self.interpolation, 0.01, 1),
            ("steps", self.most_steps, 1, 1_000_000), ("seed", self.seed, 0, math.inf),
        ):  # fmt: skip
            if value is not None and not low <= value <= high:
                raise CalibrateError(f"{name} is {value}; give a number from {low:g} to {high:g}")
        by_entropy = kind in (COMMITMENT, ENTROPY_AND_SIZE)
        if engines and (by_entropy or (kind == LOG_SIZE and engines.no_size)):
            why = f" ({engines.no_size})" if engines.no_size else ""
            raise CalibrateError(
                f"engines run no rules of kind {kind} of this model{why}; for export, give "
                f"--kind {CONSTANT}, or no --kind"
            )


class ModelProblem:
    """The forms that are fitted to a model's heads, and the best numbers of each.

    Attributes:
      objective: of all forms.
      solved: so far, the simplest first.
    """

    def __init__(self, passes: Scorer, objective: Objective, options: ModelOptions, began: Began):
        self.solved: list[Solution] = []
        self.objective, self._options, self._began = objective, options, began
        self._heads, examples = passes.heads, objective.examples
        self._typical = typical(np.array([len(example.tokens) for example in examples.examples]))
        calibration = np.array(split(examples, CALIBRATION))
        sampler = BatchSampler(examples, calibration, options.seed)
        validation = _validation(objective)
        self._optimizer = HeadRuleOptimizer(
            passes, objective, sampler, validation, options.most_steps, options.interpolation
        )

    def forms(self) -> list[Form]:
        """The simplest first: for export, what engines run, and a line where that can begin."""
        kind, engines = self._options.kind, self._options.engines
        kinds = _EACH if kind is None else _EACH[: _EACH.index(kind) + 1]
        if engines is None:
            return self._forms([kind for kind in _SHARED if kind in kinds], kinds, PER_HEAD)
        if engines.no_size or LOG_SIZE not in kinds:
            return self._forms((CONSTANT,), (CONSTANT,), engines.factors)
        return self._forms((*_SHARED, SHARED_SLOPE), (CONSTANT, SHARED_SLOPE), engines.factors)

    def rounds(self) -> list[list[Form]]:
        """The forms in the order in which they are tried; a round shares passes of short text."""
        forms = self.forms()
        if self._options.kind or self._options.trained_up_to:
            return [forms]
        # The fit may stop early, after constants.
        n_first = 1 + max(i for i, form in enumerate(forms) if form.kind == CONSTANT)
        return [x for x in (forms[:n_first], forms[n_first:]) if x]

    def solve(self, forms: Sequence[Form]) -> list[Solution]:
        """The best numbers of each form, beginning at those of a simpler one that was solved."""
        together = [form for form in forms if self._optimizer.uses_natural_gradient(form)]
        solutions = list[Solution]()
        if together:
            self._begin(together)
            solutions = self._optimizer.solve_by_natural_gradient(together)
            self.solved += solutions
        solutions += [self._search(form) for form in forms if form not in together]
        self.solved.sort(key=lambda solution: self.forms().index(solution.form))
        return solutions

    def _begin(self, forms: Sequence[Form], again: str = "") -> None:
        every, (*others, last) = self.forms(), forms
        number = f"{'up to ' if others else ''}{every.index(last) + 1} of {len(every)}"
        self._began(f"kind {number} ({last.label}){again}", self._optimizer.work(forms))

    def _search(self, form: Form) -> Solution:
        self._begin([form])
        solution = self._optimizer.run(self._start(form))
        if form.kind in _SHARED and form.sharing != GLOBAL:
            alike = self._alike(form)
            lead = alike.value.over(solution.value)
            if lead.mean > max(lead.error, 0.0):  # unknown errors are NaN: no
                self._begin([form], ", again")
                # It begins at interpolation weight 1: the value there differs.
                solution = self._optimizer.run(alike._replace(value=self._optimizer.full(alike)))
        self.solved.append(solution)
        return solution

    def should_stop_early(self) -> bool:
        """True if constants gained nothing, so that no other form is tried.

        A constant cannot keep the trained lengths and gain at others: a log-size rule can.
        """
        last, options = self.solved[-1].form, self._options
        if last.kind != CONSTANT or last.sharing == GLOBAL or options.kind or options.trained_up_to:
            return False
        return not any(_gain(s, None).is_at_least(MIN_GAIN) for s in self.solved)

    def limiting_constraint(self) -> str:
        """The constraint without which a rule would gain, in words; "" if there is none."""
        if self._options.interpolation:
            return ""
        fulls = ((self._optimizer.full(solution), solution) for solution in self.solved)
        full, best = max(fulls, key=lambda pair: pair[0].gain)
        if best.strength == 1 or full.gain < MIN_GAIN:
            return ""
        full = self._optimizer.with_losses(best, full)
        return "" if full.is_allowed else self.objective.limiting_constraint(full)

    def choose(self) -> Solution | None:
        """The simplest solution that no other beats significantly, or the last of a given kind.

        None if none beats the baseline.
        """
        kind, exports = self._options.kind, self._options.engines is not None
        solved = [s for s in self.solved if not (exports and s.form.kind == LOG_SIZE)]
        if kind is None:
            return simplest_unbeaten(solved, _gain, lambda _: MIN_IMPROVEMENT_MODEL)
        kind = SHARED_SLOPE if exports and kind == LOG_SIZE else kind
        return [s for s in solved if s.form.kind == kind][-1]

    def _forms(self, alike: Sequence[str], each: Sequence[str], sharing: str) -> list[Form]:
        pairs = [(kind, GLOBAL) for kind in alike]
        pairs += [(kind, sharing) for kind in each if sharing != GLOBAL]
        return [Form(kind, shared_by, *self._typical) for kind, shared_by in pairs]

    def _alike(self, form: Form) -> Solution:
        """The rule of the same kind that all heads share, as numbers of each head or layer."""
        shared = replace(form, sharing=GLOBAL)
        known = next(s for s in self.solved if s.form == shared)
        return known._replace(form=form, numbers=form.zeros(self._heads) + known.numbers)

    def _start(self, form: Form) -> Solution:
        """The last solution that this form contains; the best of those that ONE_RATIO contains.

        Its value is known: it is the same rule.
        """
        starts = (
            Solution(form, numbers, self._optimizer.full(solution))
            for solution in reversed(self.solved)
            if (numbers := form.embed(solution.form, solution.numbers, self._heads)) is not None
        )
        first = next(starts, None) or self._optimizer.plain(form)
        if form.kind != SHARED_SLOPE:
            return first
        return max([first, *starts], key=lambda start: start.value.gain)


def _validation(objective: Objective) -> list[int]:
    """The examples of each check: all of cells with a margin, and some of the others."""
    protected = {cell for cells in objective.protected for cell in cells}
    indices, count = list[int](), Counter[int]()
    for answers in answers_of(objective.examples, split(objective.examples, VALIDATION)):
        cell = int(objective.cell[answers[0]])
        if cell in protected or count[cell] < MAX_VALIDATION:
            indices += answers
            count[cell] += 1
    return indices


def _gain(solution: Solution, other: Solution | None) -> Gain:
    """The gain over another solution, which has to be significant.

    Over the baseline, None, one standard error is enough: the test split decides on that gain.
    """
    gain = solution.value.over(other and other.value)
    low, high = gain.interval
    return Gain(gain.mean, low if other else gain.mean - gain.error, high, gain.p)
