"""A fit through a model: rules of its heads, optimised on the log-likelihood of its answers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibrate.core.rule import LOG_SIZE
from calibrate.datasets.examples import ExampleCollection
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.metrics import KL, LOG_P
from calibrate.evidence.non_inferiority import check_limits
from calibrate.evidence.prior import MIN_GAIN
from calibrate.evidence.scores import OWN, Evidence
from calibrate.evidence.verdict import judge, judged_items
from calibrate.export.plan import GLOBAL
from calibrate.model.cache import TOOLS, result_cache
from calibrate.model.candidate_rules import Began, ModelOptions, ModelProblem
from calibrate.model.head_rule_optimizer import Scorer, Solution
from calibrate.model.model_scorer import ModelScorer, Report
from calibrate.model.objective import Objective, Part, share_of_bound
from calibrate.model.parameters import CONSTANT, SHARED_SLOPE, Head
from calibrate.model.runner import Runner
from calibrate.model.splits import TEST, split, splits_of
from calibrate.store.coefficients import Coefficients
from calibrate.store.fits_store import load, published_store
from calibrate.store.publishing import provenance

# Baselines, on every head.
PAPER = "paper"
ONE_CONSTANT = "constant"
ONE_LINE = "kappa-log-n"
MIN_EXAMPLES = 8  # of a template and length
STRENGTHS = (0.25, 0.5, 1.0)  # interpolation weights of the gain/KL table, and the published one
_SAME_STRENGTH = 0.125  # or less apart: the published weight stands for both


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A fit through a model, and why it is of this kind."""

    coefficients: Coefficients
    heads: list[Head]  # of the model
    solved: list[Solution]  # each form that was tried
    published: Solution
    evidence: Evidence  # held-out examples under the baseline, the fit, OWN, and other rules
    trade: Evidence  # the same under the fit at interpolation weights, which name the rules
    losses: Mapping[str, list[Estimate]]  # by rule: nats a token, of each part with a margin


def fit_through(
    runner: Runner,
    collection: ExampleCollection,
    name: str,
    options: ModelOptions,
    report: Report = lambda tokens, resumed: None,
    began: Began = lambda what, passes: None,
    ended: Callable[[Solution], None] = lambda solution: None,
) -> ModelFit:
    """Fits the rules of a model's heads by the mean log p of its answers, and chooses among kinds.

    Results of passes are cached in the collection: the same call carries on where one stopped.

    Args:
      runner: of the model of the collection; the result does not depend on its workers.
      report: called after each batch.
      began: called before each kind of rule, and before the test.
      ended: called with each solution.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: the model does not look attention up.
      QualityError: too few answers, or no significant improvement on held-out examples.
    """
    _require_answers(collection)
    memo, examples = result_cache(collection, runner.device), collection.set
    bounds = options.trained_up_to, options.max_kl, options.tolerance
    objective = Objective(examples, collection.scores, *bounds)
    configuration = collection.manifest["configuration"]
    source = {
        "head": configuration["model"], "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
    }  # fmt: skip
    passes = ModelScorer(runner, runner.heads(), examples, memo, report)
    return fit_by(passes, objective, name, source, options, began, ended)


def fit_by(
    passes: Scorer,
    objective: Objective,
    name: str,
    source: Mapping[str, Any],
    options: ModelOptions,
    began: Began = lambda what, passes: None,
    ended: Callable[[Solution], None] = lambda solution: None,
) -> ModelFit:
    """The same, by a scorer of the model and an objective; `source` goes into the file."""
    problem, heads = ModelProblem(passes, objective, options, began), passes.heads
    for forms in problem.rounds():
        for solution in problem.solve(forms):
            ended(solution)
        if problem.should_stop_early():
            break
    published = problem.choose()
    fit = published and published.fit(heads)
    if published is None or fit is None:
        gain = max((s.value.over() for s in problem.solved), key=lambda gain: gain.mean)
        remedy = "see `calibrate model diagnose`, or give prompts that the model answers in part"
        raise QualityError(
            "not for this model: no rule gains on the validation split (at best "
            f"{_nats(gain)}); {problem.limiting_constraint() or remedy}"
        )
    source = {**source, **_options(options, published.strength)}
    fit = replace(fit, name=name, source=source, provenance=provenance(*TOOLS))
    fits = {OWN: fit, **_baselines(fit, problem.solved, heads)}
    indices = split(objective.examples, TEST)
    others = [s for s in STRENGTHS if abs(s - published.strength) > _SAME_STRENGTH]
    rules = fits | {str(s): x for s in others if (x := published.fit(heads, s))}
    began("judging", objective.examples.units(indices) * len(rules))
    scores = passes.score_fits(rules, indices)  # at once: text is passed once under the baseline
    scores[str(published.strength)] = scores[OWN]
    evidence = replace(objective.evidence(indices, {x: scores.pop(x) for x in fits}), fits=fits)
    losses = {rule: objective.losses(evidence, indices, rule) for rule in fits}
    bounded = [] if options.interpolation else zip(objective.parts, losses[OWN], strict=True)
    require_worth(evidence, list(bounded), problem.limiting_constraint)
    traded = objective.evidence(indices, dict(sorted(scores.items(), key=lambda x: float(x[0]))))
    result = ModelFit(fit, heads, problem.solved, published, evidence, traded, losses)
    return replace(result, coefficients=replace(fit, quality=_quality(result)))


def _require_answers(collection: ExampleCollection) -> None:
    examples, counts = collection.set, Counter[int]()
    groups = {
        (x.cell, x.group if x.group >= 0 else -1 - i) for i, x in enumerate(examples.examples)
    }
    counts.update(cell for cell, _ in groups)
    if all(cell.text for cell in examples.cells):
        raise QualityError(f"{collection.folder} has no answers; give --prompts or --task, too")
    items = "examples" if len(groups) == len(examples.examples) else "prompts or groups of lines"
    for i, cell in enumerate(examples.cells):
        if not cell.text and counts[i] < MIN_EXAMPLES:
            raise QualityError(
                f"template {cell.template} at {cell.length:,} tokens has {counts[i]} {items}; "
                f"collect {MIN_EXAMPLES} at least, and better 100, of each"
            )
    text = np.array([examples.cells[example.cell].text for example in examples.examples])
    if text.any() and len(np.unique(splits_of(examples)[text])) < 2:
        raise QualityError(
            f"{text.sum()} window of plain text is too few for validation and test; collect a "
            "longer text, or shorter --lengths"
        )


def _baselines(
    fit: Coefficients, solved: list[Solution], heads: list[Head]
) -> dict[str, Coefficients]:
    """The baselines of a fit: rules for all heads, which export too if it does."""
    shared = {s.form.kind: s.fit(heads) for s in solved if s.form.sharing == GLOBAL}
    line = shared.get(SHARED_SLOPE, shared.get(LOG_SIZE))
    baselines = {ONE_CONSTANT: shared[CONSTANT], ONE_LINE: line}
    others = {k: replace(x, name="baseline") for k, x in baselines.items() if x and x != fit}
    return {PAPER: load("paper@1", published_store()), **others}


def require_worth(
    evidence: Evidence,
    losses: Sequence[tuple[Part, Estimate]],
    limiting_constraint: Callable[[], str] = str,
) -> None:
    """Raises QualityError unless held-out answers gain by the fit, OWN, within its bounds.

    Retention text, and answers of trained lengths together, may lose no more than these in the
    mean. Errors of few examples are wide, so of one cell only a significant loss counts.

    Args:
      losses: of each part that is bounded, nats per token.
      limiting_constraint: says what keeps rules from gaining.
    """
    answers, verdict = evidence.answers, judge(evidence, OWN)
    gain = answers.gain(OWN, LOG_P)
    if not verdict.use or gain.mean < MIN_GAIN:
        remedy = "collect more examples, or see `calibrate model diagnose`"
        raise QualityError(
            f"not for this model: log p changes by {_nats(gain)} on {answers.n:,} held-out "
            f"{evidence.of.items.name}; {limiting_constraint() or remedy}"
        )
    broken = [
        (result.loss, result.limit.margin, result.limit.metric == KL)
        for result in check_limits(evidence, OWN) if not result.passed
    ]  # fmt: skip
    broken += [
        (loss, part.bound, part.is_text) for part, loss in losses
        if loss.mean > part.bound and not loss.interval[0] <= part.bound
    ]  # fmt: skip
    if broken:
        raise QualityError(_exceeded(*max(broken, key=lambda x: share_of_bound(x[0].mean, x[1]))))


def _exceeded(loss: Estimate, bound: float, is_text: bool) -> str:
    """The bound that a fit exceeds, and what to do."""
    lost = f"{loss.mean:.4f} ± {loss.error:.4f} nats per token"
    if is_text:
        return (
            f"retention text moves by a KL of {lost}, and {bound:g} is allowed; collect more of it "
            "(--retention-text), or allow more with --max-kl"
        )
    return (
        f"answers of trained lengths lose {lost}, and {bound:g} is allowed; collect more of them "
        "(lengths up to --trained-up-to), or allow more with --tolerance"
    )


def _quality(fit: ModelFit) -> dict[str, Any]:
    return {
        "held_out": judged_items(fit.evidence).gain_records(),
        "trade": _trade_records(fit.trade),
        "candidates": [{"kind": s.form.label, "gain": s.value.gain} for s in fit.solved],
    }


def _trade_records(trade: Evidence) -> list[dict[str, Any]]:
    """By interpolation weight, with errors: held-out gain, gain on other templates, KL of text."""
    held_out, text = judged_items(trade), trade.text.held_out_templates
    calibration = trade.answers.calibration_templates
    records = []
    for rule in trade.rules[1:]:
        estimates = {"gain": held_out.gain(rule, LOG_P)}
        if 0 < calibration.n < trade.answers.n:
            estimates["seen"] = calibration.gain(rule, LOG_P)
        if text.n:
            estimates["kl"] = text.mean(rule, KL)
        numbers = {name: x.mean for name, x in estimates.items()}
        numbers |= {f"{name}_error": x.error for name, x in estimates.items()}
        known = {name: float(x) for name, x in numbers.items() if np.isfinite(x)}
        records.append({"strength": float(rule), **known})
    return records


def _nats(estimate: Estimate) -> str:
    return f"{estimate.mean:+.3f} ± {estimate.error:.3f} nats"


def _options(options: ModelOptions, strength: float) -> dict[str, Any]:
    """The options as a file keeps them, whose keys stay: `allowed_loss` is the bound of KL.

    It bounds the NLL of trained lengths, too, unless there is a `tolerance`.
    """
    bounds = options.max_kl, options.tolerance if options.trained_up_to else options.max_kl
    max_kl, tolerance = (None, None) if options.interpolation else bounds
    named = {
        "kind": options.kind, "trained_up_to": options.trained_up_to,
        "allowed_loss": max_kl, "tolerance": None if tolerance == max_kl else tolerance,
        "steps": options.most_steps, "strength": strength,
        "for_export": True if options.engines else None,
    }  # fmt: skip
    known = {key: value for key, value in named.items() if value is not None}
    return {"seed": options.seed, "options": {"through": "model"} | known}
