"""A fit through a model: rules of its heads, optimised on the log-likelihood of its answers.

1. Families: one constant for all heads, and the kind and parameter sharing that are asked for
   (`options.py`).
2. Calibration split: for each a step of natural gradient (`natural_gradient.py`), or proximal Adam
   (`proximal_adam.py`), after which heads are pruned (`head_rule_optimizer.py`).
3. Validation split: the largest interpolation weight within the margins.
4. Test split: gain and losses of the rules, which are accepted or refused (`acceptance.py`), and
   the gain over the constant.

A weight is an interpolation weight s throughout: beta(s) = 1 + s (beta - 1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from calibrate.core.rule import CONSTANT
from calibrate.datasets.examples import ExampleCollection
from calibrate.errors import QualityError
from calibrate.evidence.baselines import PAPER, paper
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import BASELINE, OWN, Evidence
from calibrate.evidence.metrics import LOG_P
from calibrate.evidence.verdict import judged_items
from calibrate.model.acceptance import (
    LIMIT_PARAMETERS,
    cause_of_refusal,
    nats,
    require_enough_examples,
    require_improvement,
)
from calibrate.model.batches import begin_passes
from calibrate.model.calibration_and_validation import (
    ModelScorer,
    ModelSolution,
    Validation,
    calibration_of,
    validation_indices,
)
from calibrate.model.head_rule_optimizer import HeadRuleOptimizer
from calibrate.model.objective import ModelObjective
from calibrate.model.options import ModelOptions, families_of
from calibrate.model.parameters import HeadId
from calibrate.model.records import evidence_record, source_record
from calibrate.model.runner import MODEL_PACKAGES, Runner
from calibrate.model.scoring import result_cache
from calibrate.model.splits import TEST, split
from calibrate.model.transformers_scorer import TransformersScorer
from calibrate.parallel import SILENT, Progress
from calibrate.store.fit import Fit
from calibrate.store.publishing import provenance

SHOWN_WEIGHTS = (0.25, 0.5, 1.0)  # of the gain/KL table, beside the published weight
_SAME_WEIGHT = 0.125  # or less apart: the published weight stands for both


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A fit through a model, with its evidence."""

    coefficients: Fit
    heads: list[HeadId]  # of the model
    solution: ModelSolution
    evidence: Evidence  # the test split under the baseline, the fit, OWN, and other rules
    losses: Mapping[str, list[Estimate]]  # by rule: nats per token, of each constraint


def fit_examples(
    runner: Runner,
    collection: ExampleCollection,
    name: str,
    options: ModelOptions,
    progress: Progress = SILENT,
) -> ModelFit:
    """Fits the rules of a model's heads to a collection of its answers; see `fit_head_rules`.

    Results of passes are cached in the collection: the same call carries on where one stopped.

    Args:
      runner: of the model of the collection; the result does not depend on its workers.
      progress: of the stages of the search and of the test, in steps of a batch.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: the model does not look attention up.
      QualityError: too few answers, or no significant improvement on held-out examples.
    """
    require_enough_examples(collection)
    cache, examples = result_cache(collection, runner.device), collection.set
    bounds = options.trained_up_to, options.max_kl, options.tolerance
    objective = ModelObjective(examples, collection.scores, *bounds)
    configuration = collection.manifest["configuration"]
    model = {
        "head": configuration["model"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
    }
    scorer = TransformersScorer(runner, runner.heads(), examples, cache, progress)
    return fit_head_rules(scorer, objective, name, model, options, progress)


def fit_head_rules(
    scorer: ModelScorer,
    objective: ModelObjective,
    name: str,
    model: Mapping[str, Any],
    options: ModelOptions,
    progress: Progress = SILENT,
) -> ModelFit:
    """Fits the rules of a model's heads by the mean log p of its answers.

    Args:
      scorer: of the model.
      objective: the examples, with the scores of the baseline and the constraints.
      name: of the fit.
      model: what the file says of it in `source`.
      options: of the fit.
      progress: of the stages of the search and of the test, in steps of a batch.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      QualityError: no significant improvement on held-out examples.
    """
    examples = objective.examples
    calibration = calibration_of(scorer, examples, options.max_steps, options.seed, progress)
    validation = Validation(scorer, objective, validation_indices(objective), progress)
    optimizer = HeadRuleOptimizer(
        calibration,
        validation,
        families_of(options, examples),
        options.interpolation,
        options.heads_per_layer,
    )
    constant, *others = optimizer.solve()
    solution = others[-1] if others else constant
    rules = solution.rules(scorer.heads)
    if rules is None:  # beta is 1 on every head
        raise QualityError(_no_gain(validation, solution, options), parameter=LIMIT_PARAMETERS)
    source = {**model, **source_record(options, solution.weight)}
    fit = replace(rules, name=name, source=source, provenance=provenance(*MODEL_PACKAGES))
    return _evaluate_on_test_split(validation, solution, constant, fit, options, progress)


def _no_gain(validation: Validation, solution: ModelSolution, options: ModelOptions) -> str:
    """The refusal of a fit that gains nothing on the validation split."""
    remedy = "give prompts that the model answers in part"
    return (
        f"not for this model: {solution.family.label} gains nothing on the validation split "
        f"({nats(solution.value.over())}); "
        f"{cause_of_refusal(validation, solution, options) or remedy}"
    )


def _evaluate_on_test_split(
    validation: Validation,
    solution: ModelSolution,
    constant: ModelSolution,
    fit: Fit,
    options: ModelOptions,
    progress: Progress,
) -> ModelFit:
    """Evaluates rules on the test split; refuses them unless they improve."""
    objective, heads = validation.objective, validation.scorer.heads
    test = split(objective.examples, TEST)
    fits = {OWN: fit, PAPER: paper(), **_global_constant(constant, solution, heads)}
    interpolated = _at_shown_weights(solution, heads)
    rules = [*fits.values(), *interpolated.values()]
    passes = objective.examples.units(test) * len(rules)
    begin_passes(progress, "test split", objective.examples, passes)
    scores = validation.scorer.score(rules, test)
    by_rule = dict(zip(fits, scores, strict=False))
    by_weight = dict(zip(interpolated, scores[len(fits) :], strict=True))
    by_weight[solution.weight] = by_rule[OWN]
    evidence = replace(objective.evidence(test, by_rule), fits=fits)
    checks = {rule: objective.check(evidence, rule) for rule in fits}
    # A weight that is given is limited by no constraint.
    binding = [] if options.interpolation else checks[OWN]
    require_improvement(evidence, binding, lambda: cause_of_refusal(validation, solution, options))
    at_weights = {
        weight: objective.evidence(test, {OWN: by_weight[weight]}) for weight in sorted(by_weight)
    }
    gain = None if solution is constant else _gain_over_constant(evidence)
    record = evidence_record(evidence, at_weights, options.kind, gain)
    fit = replace(fit, evidence=record)
    losses = {rule: [x.loss for x in of_rule] for rule, of_rule in checks.items()}
    return ModelFit(fit, heads, solution, evidence, losses)


def _at_shown_weights(solution: ModelSolution, heads: list[HeadId]) -> dict[float, Fit]:
    """By weight, the rules at SHOWN_WEIGHTS that are not near the published one."""
    interpolated = dict[float, Fit]()
    for weight in SHOWN_WEIGHTS:
        fit = solution._replace(weight=weight).rules(heads)
        if fit is not None and abs(weight - solution.weight) > _SAME_WEIGHT:
            interpolated[weight] = fit
    return interpolated


def _global_constant(
    constant: ModelSolution, solution: ModelSolution, heads: list[HeadId]
) -> dict[str, Fit]:
    """One constant for all heads, by its name; none if it is the fit itself, or beta = 1."""
    rules = constant.rules(heads)
    if rules is None or solution is constant:
        return {}
    return {CONSTANT: replace(rules, name=CONSTANT)}


def _gain_over_constant(evidence: Evidence) -> Estimate:
    """The paired gain of the fit, OWN, over one constant for all heads, on the items that decide.

    A constant that gains nothing is beta = 1, the baseline.
    """
    over = CONSTANT if CONSTANT in evidence.rules else BASELINE
    return judged_items(evidence).gain(OWN, LOG_P, over)
