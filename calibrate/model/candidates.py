"""The rules that a fit through a model chooses among: kinds, for each head or all heads alike."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.export.plan import ALIKE, HEAD
from calibrate.export.proof import Exportable
from calibrate.files.coefficients import Coefficients
from calibrate.files.examples import ExampleCollection
from calibrate.maths.rule import ENTROPY_AND_SIZE, LOG_SIZE
from calibrate.model.comparison import plain_alone
from calibrate.model.descent import MOST_STEPS, Course, Descent, Point
from calibrate.model.judging import NotWorthItError
from calibrate.model.memo import Memo, processor
from calibrate.model.objective import ALLOWED_LOSS, Objective
from calibrate.model.parts import CHOOSING, FITTING, parts_of
from calibrate.model.passes import Passes, Report
from calibrate.model.rule_parameters import CONSTANT, ONE_RATIO, Form, Head, typical
from calibrate.model.steps import Plan
from calibrate.transformers.betas import HeadBetas

MOST_CHOOSING = 32  # examples of a template and length that is not held: each check looks at all
LEAST_LEAD = 0.01  # nats, of one candidate over a simpler one
TOOLS = ("torch", "transformers")
_SHARED = (CONSTANT, LOG_SIZE)
_EACH = (CONSTANT, LOG_SIZE, ENTROPY_AND_SIZE)


@dataclass(frozen=True)
class ModelOptions:
    """Of a fit through a model.

    Attributes:
      kind: of the rules; None for the best on the examples that choose.
      trained_up_to: length in tokens up to which answers may not get worse; None for none.
      allowed: nats a token that plain text, and answers up to that length, may lose.
      most_steps: of each candidate.
      seed: of the order of the examples.
      engines: publish a rule that they run; the others are fitted to say what that costs. None:
        publish any.
    """

    kind: str | None = None
    trained_up_to: int | None = None
    allowed: float = ALLOWED_LOSS
    most_steps: int = MOST_STEPS
    seed: int = 0
    engines: Exportable | None = None

    def __post_init__(self) -> None:
        if self.engines is None:
            return
        if self.kind == ENTROPY_AND_SIZE:
            raise CalibrateError(
                f"no engine runs rules of kind {self.kind}; for export, give --kind {CONSTANT} or "
                f"{LOG_SIZE}, or no --kind"
            )
        if self.kind == LOG_SIZE and self.engines.no_size:
            raise CalibrateError(
                f"engines run no rule by log n of this model: {self.engines.no_size}; for export, "
                f"give --kind {CONSTANT}"
            )


class Candidate(NamedTuple):
    """The best point of one form."""

    form: Form
    point: Point

    def heads_changed(self, heads: list[Head]) -> list[Head]:
        """The heads of a model whose beta is not 1, or not what all have in common."""
        numbers = self.point.numbers
        if self.form.of == ALIKE:
            return heads if numbers.any() else []
        return self.form.heads_changed(numbers, heads)

    def fit(self, heads: list[Head]) -> Coefficients | None:
        """The rules of the heads of a model; None where beta is 1 on all."""
        return self.form.fit(self.point.numbers, heads)


class Chosen(NamedTuple):
    """Of the candidates."""

    published: Candidate
    free: Candidate  # what is published if it need not export
    exporting: list[Form]  # what engines run of the model; none if it need not export


Began = Callable[[str, list[list[int]]], None]  # what, and the examples of each pass at most
Ended = Callable[[Candidate], None]


def part(collection: ExampleCollection, which: int) -> list[int]:
    """The examples of a part."""
    found: list[int] = np.flatnonzero(parts_of(collection.set.examples) == which).tolist()
    return found


def forms(collection: ExampleCollection, options: ModelOptions) -> list[Form]:
    """What is tried: the simplest first, and then what only an export needs."""
    free = _forms(collection, _SHARED, _kinds(options), HEAD)
    return list(dict.fromkeys([*free, *exporting(collection, options)]))


def exporting(collection: ExampleCollection, options: ModelOptions) -> list[Form]:
    """What engines run of the model, the simplest first; none if it need not export."""
    if options.engines is None:
        return []
    by_size = () if options.engines.no_size else (ONE_RATIO,)
    each = (CONSTANT, *by_size) if LOG_SIZE in _kinds(options) else (CONSTANT,)
    return _forms(collection, (CONSTANT, *by_size), each, options.engines.factors)


def _kinds(options: ModelOptions) -> tuple[str, ...]:
    return _EACH if options.kind is None else _EACH[: _EACH.index(options.kind) + 1]


def _forms(
    collection: ExampleCollection, alike: Sequence[str], each: Sequence[str], of: str
) -> list[Form]:
    scale = typical(np.array([len(example.tokens) for example in collection.set.examples]))
    pairs = [*((kind, ALIKE) for kind in alike), *((kind, of) for kind in each if of != ALIKE)]
    return [Form(kind, of, *scale) for kind, of in pairs]


def course(collection: ExampleCollection, options: ModelOptions) -> Course:
    """The steps and checks of each candidate."""
    plan = Plan(collection.set, np.array(part(collection, FITTING)), options.seed)
    everything, choosing = collection.set.examples, list[int]()
    held = {cell for cells in objective(collection, options).constraints for cell in cells}
    of_cell = Counter[int]()
    for i in part(collection, CHOOSING):
        cell = everything[i].cell
        if cell in held or of_cell[cell] < MOST_CHOOSING:
            choosing.append(i)
            of_cell[cell] += 1
    return Course(plan, choosing, options.most_steps)


def objective(collection: ExampleCollection, options: ModelOptions) -> Objective:
    """What all candidates aim at."""
    return Objective(collection.set, collection.scores, options.trained_up_to, options.allowed)


def fit_candidates(
    model: PreTrainedModel, heads: HeadBetas, collection: ExampleCollection,
    options: ModelOptions, report: Report, began: Began, ended: Ended,
) -> list[Candidate]:  # fmt: skip
    """The best point of each form, which begins at that of a simpler one.

    Raises:
      NotWorthItError: no constant gains on the examples that choose, of all heads or of each, nor a
        line of all: no other is tried, unless a kind is asked for or a trained length is held.
    """
    tools = (processor(model.device), *map(version, TOOLS))
    memo = Memo(collection.folder, collection.digest, str(model.device), *tools)
    passes = Passes(model, heads, collection.set, memo, report)
    of_each, everything = course(collection, options), forms(collection, options)
    descent = Descent(passes, objective(collection, options), of_each)
    candidates = list[Candidate]()
    # A constant cannot spare the trained lengths and gain at others: a rule of log n can.
    free_to_go_on = options.kind is not None or bool(options.trained_up_to)
    for number, form in enumerate(everything, 1):
        title = f"kind {number} of {len(everything)} ({form.label})"
        began(title, of_each.work(form))
        start = _start(form, candidates, heads.heads)
        point = descent.run(form, descent.at(form, start))
        if form.kind in _SHARED and form.of != ALIKE:
            alike = _alike(form, candidates, heads.heads)
            if alike.value.leads_by(0, point.value):
                began(f"{title}, again", of_each.work(form)[:-1])
                point = descent.run(form, alike)
        candidates.append(Candidate(form, point))
        ended(candidates[-1])
        if form.kind == CONSTANT and form.of != ALIKE and not free_to_go_on:
            _require_gain(candidates, collection)
    return candidates


def _require_gain(candidates: Sequence[Candidate], collection: ExampleCollection) -> None:
    """Raises NotWorthItError if none leads plain softmax as a rule has to lead a simpler one."""
    if any(candidate.point.value.leads_by(LEAST_LEAD) for candidate in candidates):
        return
    gain, error = max(candidate.point.value.lead() for candidate in candidates)
    raise NotWorthItError(
        "not for this model: neither a rule for all heads nor a constant for each gains on the "
        f"examples that choose (at best {gain:+.3f} ± {error:.3f} nats), and no other is tried; "
        "give prompts that the model answers in part, or a --kind, which is tried all the same",
        plain_alone(collection.set, collection.scores),
    )


def _alike(form: Form, candidates: Sequence[Candidate], heads: list[Head]) -> Point:
    """The rule of the same kind that all heads have alike, as numbers of each head or layer."""
    alike = replace(form, of=ALIKE)
    point = next(candidate.point for candidate in candidates if candidate.form == alike)
    return point._replace(numbers=form.zeros(heads) + point.numbers)


def _start(form: Form, candidates: Sequence[Candidate], heads: list[Head]) -> np.ndarray:
    """The last candidate that this form contains; the best of those that ONE_RATIO contains."""
    held = [
        (candidate.point.value.gain * (form.kind == ONE_RATIO), numbers)
        for candidate in reversed(candidates)
        if (numbers := form.holding(candidate.form, candidate.point.numbers, heads)) is not None
    ]
    return max(held, key=lambda item: item[0])[1] if held else form.zeros(heads)


def choose(
    candidates: Sequence[Candidate], collection: ExampleCollection, options: ModelOptions
) -> Chosen:
    """The best of all, and of those that export if only these are published."""
    of_form = {candidate.form: candidate for candidate in candidates}
    kinds = _forms(collection, _SHARED, _kinds(options), HEAD)
    free = _choose([of_form[form] for form in kinds], options.kind)
    if not (allowed := exporting(collection, options)):
        return Chosen(free, free, [])
    kind = ONE_RATIO if options.kind == LOG_SIZE else options.kind
    return Chosen(_choose([of_form[form] for form in allowed], kind), free, allowed)


def _choose(candidates: Sequence[Candidate], kind: str | None) -> Candidate:
    """The simplest that no other one leads by more than an error; or the last of a kind."""
    if kind is not None:
        return [c for c in candidates if c.form.kind == kind][-1]
    chosen, *others = candidates
    for other in others:
        if other.point.value.leads_by(LEAST_LEAD, chosen.point.value):
            chosen = other
    return chosen
