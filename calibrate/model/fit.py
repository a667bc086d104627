"""A fit through a model: the rules of its heads under which it answers best."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import LOG_P, OWN, PLAIN, RIGHT, Evidence
from calibrate.evidence.prior import LEAST_GAIN
from calibrate.evidence.verdict import judge
from calibrate.export.plan import ALIKE
from calibrate.files.coefficients import Coefficients
from calibrate.files.examples import ExampleCollection
from calibrate.files.publishing import provenance
from calibrate.files.store import load, published_store
from calibrate.maths.rule import LOG_SIZE
from calibrate.model.answers import plain_alone
from calibrate.model.descent import Solution
from calibrate.model.forms import CONSTANT, ONE_RATIO, Form, Head
from calibrate.model.objective import Objective
from calibrate.model.passes import Memo, Report, check_vocabulary
from calibrate.model.problem import TOOLS, Began, ModelOptions, ModelProblem
from calibrate.model.score_fits import score_fits
from calibrate.model.splits import JUDGING, N_SPLITS, split, splits_of
from calibrate.transformers.betas import head_betas

PAPER, ONE_CONSTANT, ONE_LINE = "paper", "constant", "kappa-log-n"  # rivals, on every head
FREE = "free"  # the best rule that need not export
LEAST_EXAMPLES = 8  # of a template and length


class NotWorthItError(QualityError):
    """No rule is worth publishing, by the evidence of plain softmax, a fit and its rivals."""

    def __init__(self, message: str, evidence: Evidence) -> None:
        super().__init__(message)
        self.evidence = evidence


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A fit through a model, and why it is of this kind."""

    coefficients: Coefficients
    heads: list[Head]  # of the model
    solved: list[Solution]  # each form that was tried
    published: Solution
    free: Solution | None  # the best if it need not export; None is plain softmax
    exporting: list[Form]  # what engines run of the model; none if it need not export
    evidence: Evidence  # held-out examples under plain softmax, the fit, OWN, and its rivals
    losses: Mapping[str, list[Estimate]]  # by rule: nats a token, of each part that is protected

    @property
    def beside(self) -> str | None:
        """For export, the name of the best rule without that constraint; else None."""
        if not self.exporting:
            return None
        if self.free is None or not self.free.numbers.any():
            return PLAIN
        return FREE if FREE in self.evidence.rules else OWN

    @property
    def export_cost(self) -> Estimate | None:
        """Nats of log p of the answers that a fit for export gives away; None for other fits."""
        if self.beside is None:
            return None
        return self.evidence.answers.gain(self.beside, LOG_P, over=OWN)


def fit_through(
    load_model: Callable[[], PreTrainedModel],
    collection: ExampleCollection,
    name: str,
    options: ModelOptions,
    report: Report = lambda tokens, resumed: None,
    began: Began = lambda what, passes: None,
    ended: Callable[[Solution], None] = lambda solution: None,
) -> ModelFit:
    """Fits the rules of a model's heads by the mean log p of its answers, and chooses among kinds.

    Results of passes are kept under the collection: the same call carries on where one stopped.

    Args:
      load_model: loads the model of the collection; called once.
      report: called after each batch.
      began: called before each kind of rule, and before the judgement.
      ended: called with each solution when it is found.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: the model does not look attention up.
      QualityError: there are too few answers, or no rule is worth it on held-out examples.
    """
    _require_answers(collection)
    model = load_model()
    check_vocabulary(collection.set, model.config.get_text_config().vocab_size)
    with head_betas(model) as betas:
        problem = ModelProblem(model, betas, collection, options, report, began)
        for form in problem.forms():
            ended(problem.solve(form))
            if problem.is_hopeless():
                break
    free, exporting = problem.choose(exporting=False), problem.exporting()
    published = problem.choose(exporting=True) if exporting else free
    fit = published and published.fit(betas.heads)
    if published is None or fit is None:
        raise _nothing_gains(problem, collection)
    fit = replace(
        fit, name=name, source=_source(collection, options), provenance=provenance(*TOOLS)
    )
    fits = {OWN: fit, **_rivals(fit, problem.solved, betas.heads, bool(exporting))}
    best = free and free.fit(betas.heads)
    if exporting and best and best != fit:
        fits[FREE] = replace(best, name="rival")
    began("judging", [split(collection.set, JUDGING)] * len(fits))
    evidence, losses = _judge(model, collection, problem.objective, fits, report)
    require_worth(evidence, losses[OWN], options.allowed)
    found = ModelFit(fit, betas.heads, problem.solved, published, free, exporting, evidence, losses)
    return replace(found, coefficients=replace(fit, quality=_quality(found)))


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
    text = np.array([cell.text for cell in examples.cells])[cells]
    if text.any() and len(np.unique(splits_of(examples.examples)[text])) < N_SPLITS:
        longest = max(cell.length for cell in examples.cells if cell.text)
        raise QualityError(
            f"the {text.sum()} windows of plain text leave none to choose or to judge by; collect "
            f"a longer text, of four times {longest:,} tokens at least, or shorter --lengths"
        )


def _nothing_gains(problem: ModelProblem, collection: ExampleCollection) -> NotWorthItError:
    gain = max((solution.value.over() for solution in problem.solved), key=lambda gain: gain.mean)
    all_tried = len(problem.solved) == len(problem.forms())
    more = "" if all_tried else ", or a --kind to try all the same"
    return NotWorthItError(
        f"not for this model: no rule gains on the examples that choose (at best {_nats(gain)}); "
        f"see `calibrate model diagnose`, or give prompts that the model answers in part{more}",
        plain_alone(collection.set, collection.scores),
    )


def _rivals(
    fit: Coefficients, solved: list[Solution], heads: list[Head], exporting: bool
) -> dict[str, Coefficients]:
    """What a fit is compared with: rules for all heads, which export too if it does."""
    alike = {s.form.kind: s.fit(heads) for s in solved if s.form.of == ALIKE}
    line = alike.get(ONE_RATIO) if exporting else alike[LOG_SIZE]
    rivals = {ONE_CONSTANT: alike[CONSTANT], ONE_LINE: line}
    others = {k: replace(x, name="rival") for k, x in rivals.items() if x and x != fit}
    return {PAPER: load("paper@1", published_store()), **others}


def _judge(
    model: PreTrainedModel, collection: ExampleCollection, objective: Objective,
    fits: dict[str, Coefficients], report: Report,
) -> tuple[Evidence, dict[str, list[Estimate]]]:  # fmt: skip
    """The fit and its rivals as the runtime applies them to held-out examples, and their losses."""
    which = split(collection.set, JUDGING)
    memo = Memo(collection.folder, collection.digest)
    scores = score_fits(lambda: model, collection.set, which, fits, memo, report)
    evidence = objective.evidence(which, scores)
    return evidence, {rule: objective.losses(evidence, which, rule) for rule in fits}


def require_worth(evidence: Evidence, losses: list[Estimate], allowed: float) -> None:
    """Raises NotWorthItError unless held-out answers gain by the fit, OWN.

    It raises it, too, where protected text or lengths evidently lose more than `allowed`, in nats a
    token.
    """
    answers, verdict = evidence.answers, judge(evidence, OWN)
    gain = answers.gain(OWN, LOG_P)
    if not verdict.use or gain.mean < LEAST_GAIN:
        advice = "collect more examples, or see `calibrate model diagnose`"
        if not answers.mean(PLAIN, RIGHT).mean:
            advice = "the model gets no answer right: give prompts that it can answer in part"
        raise NotWorthItError(
            f"not for this model: log p changes by {_nats(gain)} on {answers.n:,} held-out "
            f"answers; {advice}",
            evidence,
        )
    evident = [x for x in losses if x.mean > allowed and not x.interval[0] <= allowed]
    if evident:
        lost = max(evident)
        raise NotWorthItError(
            f"protected tokens lose {lost.mean:.4f} ± {lost.error:.4f} nats each, and {allowed:g} "
            "is allowed; collect more of them, or allow more with --allowed-loss",
            evidence,
        )


def _quality(fit: ModelFit) -> dict[str, Any]:
    return {
        "held_out": [_at(n, part) for n, part in fit.evidence.answers.by("size").items()],
        "candidates": [{"kind": s.form.label, "gain": s.value.gain} for s in fit.solved],
        "verdict": _verdict(fit),
    }


def _at(length: int, part: Evidence) -> dict[str, Any]:
    """log p of the answers of a length under plain softmax and under the fit."""
    before, after = (float(part.mean(rule, LOG_P).mean) for rule in (PLAIN, OWN))
    row = {"size": length, "rows": part.n, "before": before, "after": after}
    error = float(part.gain(OWN, LOG_P).error)
    return row | ({"error": error} if np.isfinite(error) else {})


def _verdict(fit: ModelFit) -> str:
    """What the fit is and gains, whether one rule for all heads does as well, and what it costs."""
    form, answers = fit.published.form, fit.evidence.answers
    what = "a factor of their own" if form.kind == ONE_RATIO else "a rule"
    changed = fit.published.heads_changed(fit.heads)
    words = f"{len(changed)} of {len(fit.heads)} heads have {what}"
    words = "one rule for all heads" if form.of == ALIKE else words
    before, after = (100 * answers.mean(rule, RIGHT).mean for rule in (PLAIN, OWN))
    words += (
        f" ({form.kind}): log p {_nats(answers.gain(OWN, LOG_P))}, answers right {before:.1f} -> "
        f"{after:.1f} %, on {answers.n:,} held-out answers"
    )
    names = {ONE_CONSTANT: "one constant", ONE_LINE: "one line in log n"}
    as_good = [names[x] for x in answers.not_behind(OWN, LOG_P) if x in names]
    words += f"; {as_good[0]} for all heads does as well" if as_good else ""
    return words + (f"; export costs {_cost(fit)}" if fit.exporting else "")


def _cost(fit: ModelFit) -> str:
    cost = fit.export_cost
    if cost is None or not cost.sign > 0:
        return "nothing beyond chance"
    return f"{_nats(cost)} an answer, beside {fit.free.form.label if fit.free else PLAIN}"


def _nats(estimate: Estimate) -> str:
    return f"{estimate.mean:+.3f} ± {estimate.error:.3f} nats"


def _source(collection: ExampleCollection, options: ModelOptions) -> dict[str, Any]:
    configuration = collection.manifest["configuration"]
    named = {
        "kind": options.kind, "trained_up_to": options.trained_up_to,
        "allowed_loss": options.allowed, "steps": options.most_steps,
        "for_export": True if options.engines else None,
    }  # fmt: skip
    return {
        "head": configuration["model"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
        "seed": options.seed,
        "options": {"through": "model"} | {k: v for k, v in named.items() if v is not None},
    }
