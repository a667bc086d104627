"""A fit through a model: rules of its heads, optimised on the log-likelihood of its answers.

1. Candidates: kinds of rule x parameter sharing, the simplest first (`candidates.py`).
2. Calibration split: for each candidate a step of natural gradient (`natural_gradient.py`), or
   proximal Adam (`proximal_adam.py`), after which heads are pruned (`head_rule_optimizer.py`).
3. Constraints: the largest interpolation weight within the margins (`interpolation_search.py`).
4. Validation split: the simplest candidate that is not significantly worse than the best.
5. Test split: gain and losses of the selected rules, which are accepted or refused
   (`acceptance.py`), and what the file keeps of them (`quality_record.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from calibrate.core.rule import LOG_SIZE
from calibrate.core.rule_kinds import CONSTANT
from calibrate.datasets.examples import ExampleCollection, Scores
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.scores import OWN, Evidence
from calibrate.model.acceptance import (
    limiting_constraint,
    nats,
    require_enough_examples,
    require_improvement,
)
from calibrate.model.basis import SHARED_SLOPE
from calibrate.model.batches import begin_passes
from calibrate.model.cache import TOOLS, result_cache
from calibrate.model.candidates import (
    ModelOptions,
    candidate_families,
    rounds_of,
    select_solution,
    should_stop_early,
)
from calibrate.model.fit_splits import ModelSolution, Validation, calibration_of, validation_indices
from calibrate.model.head_rule_optimizer import HeadRuleOptimizer
from calibrate.model.model_scorer import TransformersScorer
from calibrate.model.objective import ModelObjective
from calibrate.model.parameters import HeadId
from calibrate.model.quality_record import quality_record, source_record
from calibrate.model.runner import Runner
from calibrate.model.scorer import ModelScorer
from calibrate.model.splits import TEST, split
from calibrate.parallel.progress import SILENT, Progress
from calibrate.store.coefficients import Coefficients
from calibrate.store.fits_store import load, published_store
from calibrate.store.publishing import provenance

# Baselines, on every head.
PAPER = "paper"
ONE_CONSTANT = "constant"
ONE_LINE = "kappa-log-n"
WEIGHTS = (0.25, 0.5, 1.0)  # interpolation weights of the gain/KL table, and the published one
_SAME_WEIGHT = 0.125  # or less apart: the published weight stands for both


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A fit through a model, and why it is of this kind."""

    coefficients: Coefficients
    heads: list[HeadId]  # of the model
    solutions: list[ModelSolution]  # of each candidate that was tried, the simplest first
    selected: ModelSolution
    evidence: Evidence  # the test split under the baseline, the fit, OWN, and other rules
    losses: Mapping[str, list[Estimate]]  # by rule: nats per token, of each constraint


def fit_examples(
    runner: Runner,
    collection: ExampleCollection,
    name: str,
    options: ModelOptions,
    progress: Progress = SILENT,
) -> ModelFit:
    """Fits the rules of a model's heads by the mean log p of its answers, and chooses among kinds.

    Results of passes are cached in the collection: the same call carries on where one stopped.

    Args:
      runner: of the model of the collection; the result does not depend on its workers.
      progress: of a stage for each kind of rule and for the test, in steps of a batch.
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
    source = {
        "head": configuration["model"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
    }
    scorer = TransformersScorer(runner, runner.heads(), examples, cache, progress)
    return fit_rules(scorer, objective, name, source, options, progress)


def fit_rules(
    scorer: ModelScorer,
    objective: ModelObjective,
    name: str,
    source: Mapping[str, Any],
    options: ModelOptions,
    progress: Progress = SILENT,
) -> ModelFit:
    """The same, by a scorer of the model and an objective; `source` goes into the file."""
    families = candidate_families(options, objective.examples)
    calibration = calibration_of(scorer, objective, options.max_steps, options.seed)
    validation = Validation(scorer, objective, validation_indices(objective))
    optimizer = HeadRuleOptimizer(
        calibration,
        validation,
        families,
        options.interpolation,
        progress,
        heads_per_layer=options.heads_per_layer,
    )
    for round_ in rounds_of(families, options):
        for solution in optimizer.solve(round_):
            gain = f"{solution.value.gain:+.3f} nats on the validation split"
            progress.note(f"{solution.family.label}: {gain}")
        if should_stop_early(optimizer.solutions, options):
            break
    selected = select_solution(optimizer.solutions, options)
    fit = selected and selected.rules(scorer.heads)
    if selected is None or fit is None:
        raise QualityError(_no_gain(optimizer))
    source = {**source, **source_record(options, selected.weight)}
    fit = replace(fit, name=name, source=source, provenance=provenance(*TOOLS))
    return _test(optimizer, selected, fit)


def _no_gain(optimizer: HeadRuleOptimizer) -> str:
    """The refusal of a fit that gains nothing on the validation split."""
    gains = [solution.value.over() for solution in optimizer.solutions]
    gain = max(gains, key=lambda gain: gain.mean)
    remedy = "see `calibrate model diagnose`, or give prompts that the model answers in part"
    return (
        "not for this model: no rule gains on the validation split (at best "
        f"{nats(gain)}); {limiting_constraint(optimizer) or remedy}"
    )


def _test(optimizer: HeadRuleOptimizer, selected: ModelSolution, fit: Coefficients) -> ModelFit:
    """Evaluates the selected rules on the test split; refuses them unless they improve."""
    objective, heads = optimizer.validation.objective, optimizer.validation.scorer.heads
    solutions, indices = optimizer.solutions, split(objective.examples, TEST)
    fits = {OWN: fit, **_baselines(fit, solutions, heads)}
    interpolated = _at_other_weights(selected, heads)
    scores = _test_scores(optimizer, [*fits.values(), *interpolated.values()], indices)
    of_fits = dict(zip(fits, scores[: len(fits)], strict=True))
    by_weight = dict(zip(interpolated, scores[len(fits) :], strict=True))
    by_weight[selected.weight] = of_fits[OWN]
    evidence = replace(objective.evidence(indices, of_fits), fits=fits)
    results = {rule: objective.check(evidence, rule) for rule in fits}
    # A weight that is given is limited by no constraint.
    own_results = [] if optimizer.weight else results[OWN]
    require_improvement(evidence, own_results, partial(limiting_constraint, optimizer))
    losses = {rule: [x.loss for x in of_rule] for rule, of_rule in results.items()}
    at_weights = {
        weight: objective.evidence(indices, {OWN: by_weight[weight]})
        for weight in sorted(by_weight)
    }
    quality = quality_record(evidence, at_weights, solutions)
    return ModelFit(replace(fit, quality=quality), heads, solutions, selected, evidence, losses)


def _test_scores(
    optimizer: HeadRuleOptimizer, rules: Sequence[Coefficients], indices: Sequence[int]
) -> list[Scores]:
    """The scores of rules on the test split, at once: text is passed once under the baseline."""
    examples = optimizer.validation.objective.examples
    begin_passes(optimizer.progress, "judging", examples, examples.units(indices) * len(rules))
    return optimizer.validation.scorer.score(rules, indices)


def _at_other_weights(selected: ModelSolution, heads: list[HeadId]) -> dict[float, Coefficients]:
    """By interpolation weight, the selected rules at weights that are not near the selected one."""
    interpolated = dict[float, Coefficients]()
    for weight in WEIGHTS:
        fit = selected._replace(weight=weight).rules(heads)
        if fit is not None and abs(weight - selected.weight) > _SAME_WEIGHT:
            interpolated[weight] = fit
    return interpolated


def _baselines(
    fit: Coefficients, solutions: Sequence[ModelSolution], heads: list[HeadId]
) -> dict[str, Coefficients]:
    """The baselines of a fit: rules for all heads, which export too if it does."""
    by_kind = {x.family.kind: x.rules(heads) for x in solutions if x.family.is_global}
    log_size = by_kind.get(SHARED_SLOPE, by_kind.get(LOG_SIZE))
    baselines = {ONE_CONSTANT: by_kind[CONSTANT], ONE_LINE: log_size}
    others = {k: replace(x, name="baseline") for k, x in baselines.items() if x and x != fit}
    return {PAPER: load("paper@1", published_store()), **others}
