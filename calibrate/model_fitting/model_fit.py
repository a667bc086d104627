"""A fit through a model: the rules of its heads under which it answers best."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from calibrate.errors import QualityError
from calibrate.examples.answering import batch_tokens, check_vocabulary
from calibrate.examples.comparison import PLAIN, compare
from calibrate.examples.parts import CHOOSING, FITTING, JUDGING, parts_of
from calibrate.examples.score_fits import Kept, score_fits
from calibrate.files.coefficients import Coefficients
from calibrate.files.example_collection import ExampleCollection
from calibrate.files.example_set import Scores
from calibrate.files.provenance import provenance
from calibrate.files.store import load, published_store
from calibrate.maths.rule import ENTROPY_AND_SIZE, LOG_SIZE
from calibrate.model_fitting.descent import MOST_STEPS, Course, Descent, Point
from calibrate.model_fitting.judging import ONE_CONSTANT, ONE_LINE, OWN, PAPER, Judged
from calibrate.model_fitting.memo import Memo
from calibrate.model_fitting.objective import ALLOWED_LOSS, Objective
from calibrate.model_fitting.passes import Passes, Report
from calibrate.model_fitting.rule_parameters import CONSTANT, Form, typical
from calibrate.model_fitting.steps import Plan
from calibrate.transformers.betas import HeadBetas, head_betas

LEAST_EXAMPLES = 8  # of a template and length
MOST_CHOOSING = 32  # likewise: each check looks at all that choose
LEAST_LEAD = 0.01  # nats, of one candidate over a simpler one
_N_JUDGED = 4  # the fit, and three rivals
_SHARED = (CONSTANT, LOG_SIZE)
_EACH = (CONSTANT, LOG_SIZE, ENTROPY_AND_SIZE)
_TOOLS = ("torch", "transformers")


@dataclass(frozen=True)
class ModelOptions:
    """Of a fit through a model.

    Attributes:
      kind: of the rules; None for the best on the examples that choose.
      trained_up_to: length in tokens up to which answers may not get worse; None for none.
      allowed: nats a token that plain text, and answers up to that length, may lose.
      most_steps: of each candidate.
      seed: of the order of the examples.
    """

    kind: str | None = None
    trained_up_to: int | None = None
    allowed: float = ALLOWED_LOSS
    most_steps: int = MOST_STEPS
    seed: int = 0


class Candidate(NamedTuple):
    """The best point of one form."""

    form: Form
    point: Point

    @property
    def label(self) -> str:
        """Which heads have what kind of rule."""
        return f"{self.form.kind}, {'all heads alike' if self.form.shared else 'each head'}"

    @property
    def n_changed(self) -> int:
        """Heads whose beta is not 1; those of a shared rule count as one."""
        return int(self.point.numbers.any(axis=0).sum())


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A fit through a model, and why it is of this kind."""

    coefficients: Coefficients
    heads: list[tuple[int, int]]  # of the model
    chosen: Candidate
    candidates: list[Candidate]
    judged: Judged


def work_of(collection: ExampleCollection, options: ModelOptions) -> list[int]:
    """The tokens of each batch that a fit may pass through the model.

    Raises:
      QualityError: there are too few answers.
    """
    _require_answers(collection)
    course, judging = _course(collection, options), _part(collection, JUDGING)
    passes = [which for form in _forms(collection, options) for which in course.work(form)]
    passes += [judging] * _N_JUDGED
    everything = collection.set.examples
    return [tokens for which in passes for tokens in batch_tokens(everything, which)]


def fit_through(
    load_model: Callable[[], PreTrainedModel],
    collection: ExampleCollection,
    name: str,
    options: ModelOptions,
    report: Report = lambda tokens, resumed: None,
) -> ModelFit:
    """Fits the rules of a model's heads by the mean log p of its answers, and chooses among kinds.

    Results of passes are kept under the collection: the same call carries on where one stopped.

    Args:
      load_model: loads the model of the collection; called once.
      report: called with the tokens of each batch, and whether it was passed before.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: the model does not look attention up.
      QualityError: there are too few answers, or no rule is worth it on examples that it has not
        seen.
    """
    _require_answers(collection)
    model = load_model()
    check_vocabulary(collection.set, model.config.get_text_config().vocab_size)
    with head_betas(model) as heads:
        candidates = _candidates(model, heads, collection, options, report)
    chosen = _choose(candidates, options.kind)
    fit = chosen.form.fit(chosen.point.numbers, heads.heads)
    if fit is None:
        raise QualityError(
            "not for this model: no rule on its heads answers better on examples that choose; "
            "`calibrate diagnose` shows what each head wants"
        )
    fit = replace(
        fit, name=name, source=_source(collection, options), provenance=provenance(*_TOOLS)
    )
    judged = _judge(model, collection, options, candidates, fit, heads.heads, report)
    judged.require_worth()
    quality = _quality(judged, candidates, _verdict(judged, chosen, len(heads.heads)))
    return ModelFit(replace(fit, quality=quality), heads.heads, chosen, candidates, judged)


def _require_answers(collection: ExampleCollection) -> None:
    examples = collection.set
    cells = np.array([example.cell for example in examples.examples])
    for i, cell in enumerate(examples.cells):
        if not cell.text and (count := int((cells == i).sum())) < LEAST_EXAMPLES:
            raise QualityError(
                f"template {cell.template} at {cell.length:,} tokens has {count} examples; "
                f"collect {LEAST_EXAMPLES} at least, and better 100, of each"
            )
    if all(cell.text for cell in examples.cells):
        raise QualityError(
            f"{collection.folder} has plain text alone; collect answers too, with --prompts or "
            "--task"
        )


def _forms(collection: ExampleCollection, options: ModelOptions) -> list[Form]:
    """What is tried, the simplest first; each kind for each head begins where the last ended."""
    scale = typical(np.array([len(example.tokens) for example in collection.set.examples]))
    kinds = _EACH if options.kind is None else _EACH[: _EACH.index(options.kind) + 1]
    forms = [Form(kind, True, *scale) for kind in _SHARED]
    return forms + [Form(kind, False, *scale) for kind in kinds]


def _course(collection: ExampleCollection, options: ModelOptions) -> Course:
    plan = Plan(collection.set, np.array(_part(collection, FITTING)), options.seed)
    everything, choosing = collection.set.examples, list[int]()
    of_cell = Counter[int]()
    for i in _part(collection, CHOOSING):
        if of_cell[everything[i].cell] < MOST_CHOOSING:
            choosing.append(i)
            of_cell[everything[i].cell] += 1
    return Course(plan, choosing, options.most_steps)


def _part(collection: ExampleCollection, part: int) -> list[int]:
    which: list[int] = np.flatnonzero(parts_of(collection.set.examples) == part).tolist()
    return which


def _candidates(
    model: PreTrainedModel, heads: HeadBetas, collection: ExampleCollection,
    options: ModelOptions, report: Report,
) -> list[Candidate]:  # fmt: skip
    memo = Memo(collection.folder, collection.digest, str(model.device), *map(version, _TOOLS))
    passes = Passes(model, heads, collection.set, memo, report)
    descent = Descent(passes, _objective(collection, options), _course(collection, options))
    candidates, last = list[Candidate](), dict[bool, np.ndarray]()
    for form in _forms(collection, options):
        start = np.zeros((form.n_numbers, 1 if form.shared else len(heads.heads)))
        if form.shared in last:
            start[: len(last[form.shared])] = last[form.shared]
        best = descent.run(form, descent.at(form, start))
        last[form.shared] = best.numbers
        candidates.append(Candidate(form, best))
    return candidates


def _choose(candidates: list[Candidate], kind: str | None) -> Candidate:
    """The simplest that no other one leads by more than an error; or the best of a kind."""
    if kind is not None:
        return next(c for c in candidates if c.form.kind == kind and not c.form.shared)
    chosen, *others = candidates
    for other in others:
        lead, error = other.point.value.lead(chosen.point.value)
        if lead > max(error, LEAST_LEAD):
            chosen = other
    return chosen


def _judge(
    model: PreTrainedModel, collection: ExampleCollection, options: ModelOptions,
    candidates: list[Candidate], fit: Coefficients, heads: list[tuple[int, int]], report: Report,
) -> Judged:  # fmt: skip
    """The fit and its rivals as the runtime applies them, on examples that none has seen."""
    fits = {OWN: fit, PAPER: load("paper@1", published_store())}
    for label, candidate in zip((ONE_CONSTANT, ONE_LINE), candidates[:2], strict=True):
        rival = candidate.form.fit(candidate.point.numbers, heads)
        if rival is not None and rival != fit:
            fits[label] = replace(rival, name="rival")
    which = _part(collection, JUDGING)
    kept = Kept(collection.folder, collection.digest)
    scores = score_fits(lambda: model, collection.set, which, fits, kept, report)
    objective = _objective(collection, options)
    losses = {label: objective.value(which, s.log_p).losses for label, s in scores.items()}
    plain = Scores(*(column[which] for column in collection.scores))
    found = compare(collection.set, which, {PLAIN: plain, **scores})
    return Judged(found, losses, options.allowed)


def _objective(collection: ExampleCollection, options: ModelOptions) -> Objective:
    return Objective(collection.set, collection.scores, options.trained_up_to, options.allowed)


def _verdict(judged: Judged, chosen: Candidate, n_heads: int) -> str:
    heads = f"{chosen.n_changed} of {n_heads} heads have a rule"
    if chosen.form.shared:
        heads = "one rule for all heads"
    return f"{heads} ({chosen.form.kind}): {judged.summary()}"


def _quality(judged: Judged, candidates: list[Candidate], verdict: str) -> dict[str, Any]:
    return {
        "held_out": judged.by_length(),
        "candidates": [
            {"kind": candidate.label, "gain": candidate.point.value.gain}
            for candidate in candidates
        ],
        "verdict": verdict,
    }


def _source(collection: ExampleCollection, options: ModelOptions) -> dict[str, Any]:
    configuration = collection.manifest["configuration"]
    named = {
        "kind": options.kind, "trained_up_to": options.trained_up_to,
        "allowed_loss": options.allowed, "steps": options.most_steps,
    }  # fmt: skip
    return {
        "head": configuration["model"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
        "seed": options.seed,
        "options": {"through": "model"} | {k: v for k, v in named.items() if v is not None},
    }
