"""The fit of a model's heads, optimised on the log-likelihood of the model's answers.

1. `choose_families` (`options.py`): one constant for all heads, and the kind and parameter sharing
   that are asked for.
2. `HeadRuleOptimizer` (`optimizer.py`): rules from gradients of the calibration split, with the
   largest interpolation weight that is within the margins on the validation split.
3. `_evaluate_on_test_split`: gains and losses, for which the fit is accepted or refused
   (`acceptance.py`).

A weight is an interpolation weight s: beta(s) = 1 + s (beta - 1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import PAPER, paper
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import BASELINE, OWN, Evidence
from calibrate.evidence.metrics import LOG_P
from calibrate.model.acceptance import (
    no_gain,
    require_enough_examples,
    require_improvement,
)
from calibrate.model.objective import ModelObjective
from calibrate.model.optimizer import HeadRuleOptimizer
from calibrate.model.options import ModelOptions, choose_families
from calibrate.model.parameters import HeadId
from calibrate.model.runner import MODEL_PACKAGES, Runner
from calibrate.model.scored_splits import (
    Calibration,
    ModelScorer,
    ModelSolution,
    Validation,
    validation_indices,
)
from calibrate.model.scoring import begin_passes, result_cache
from calibrate.model.splits import TEST, split
from calibrate.model.transformers_scorer import TransformersScorer
from calibrate.parallel import SILENT, Progress
from calibrate.prompts.examples import ExampleCollection
from calibrate.store.fit import Fit
from calibrate.store.saving import provenance


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A fit through a model, with its evidence."""

    coefficients: Fit
    solution: ModelSolution
    evidence: Evidence  # the test split under the baseline, the fit (OWN), and other rules
    losses: Mapping[str, list[Estimate]]  # by rule: of each constraint, nats per token


def fit_examples(
    runner: Runner,
    collection: ExampleCollection,
    name: str,
    options: ModelOptions,
    progress: Progress = SILENT,
) -> ModelFit:
    """Fits the rules of a model's heads to a collection of examples.

    Results of passes are cached in the collection, so that the same call continues an interrupted
    one.

    Args:
      runner: of the model; the result does not depend on its workers.
      name: of the fit.
      progress: advances after each pass.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: some attention of the model is not looked up by name.
      QualityError: too few examples, or no significant gain on held-out examples.
    """
    require_enough_examples(collection)
    examples, configuration = collection.set, collection.manifest["configuration"]
    cache = result_cache(collection, runner.device)
    scorer = TransformersScorer(runner, runner.heads(), examples, cache, progress)
    limits = options.trained_up_to, options.max_kl, options.tolerance
    objective = ModelObjective(examples, collection.scores, *limits)
    model = {
        "head": configuration["model"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
    }
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
      objective: the examples, with the baseline's scores and the constraints.
      name: of the fit.
      model: the `source` of the coefficient file, without the options.
      progress: advances after each pass.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      QualityError: no significant gain on held-out examples.
    """
    examples = objective.examples
    calibration = Calibration(scorer, examples, options.max_steps, options.seed, progress)
    validation = Validation(scorer, objective, validation_indices(objective), progress)
    optimizer = HeadRuleOptimizer(
        calibration,
        validation,
        choose_families(options, examples),
        options.heads_per_layer,
    )
    constant, *others = optimizer.solve()
    solution = others[-1] if others else constant
    rules = solution.rules(scorer.heads)
    if rules is None:  # beta is 1 for every head
        raise no_gain(solution)
    source = {**model, "options": options.record(solution.weight)}
    fit = replace(rules, name=name, source=source, provenance=provenance(*MODEL_PACKAGES))
    return _evaluate_on_test_split(validation, solution, constant, fit, options, progress)


def _evaluate_on_test_split(
    validation: Validation,
    solution: ModelSolution,
    constant: ModelSolution,
    fit: Fit,
    options: ModelOptions,
    progress: Progress,
) -> ModelFit:
    """Evaluates the fit and other rules on the test split.

    Raises:
      QualityError: the fit has no significant gain, or loses more than its margins.
    """
    objective, heads = validation.objective, validation.scorer.heads
    test = split(objective.examples, TEST)
    fits = {OWN: fit, PAPER: paper(), **_global_constant(constant, solution, heads)}
    passes = objective.examples.units(test) * len(fits)
    begin_passes(progress, "test split", objective.examples, passes)
    scores = validation.scorer.score([*fits.values()], test)
    evidence = objective.evidence(test, dict(zip(fits, scores, strict=True)))
    evidence = replace(evidence, fits=fits)
    checks = {rule: objective.check(evidence, rule) for rule in fits}
    require_improvement(evidence, checks[OWN], solution.weight)
    gain = None if solution is constant else _gain_over_constant(evidence)
    record = _evidence_record(evidence, options.kind, gain)
    losses = {rule: [x.loss for x in results] for rule, results in checks.items()}
    return ModelFit(replace(fit, evidence=record), solution, evidence, losses)


def _global_constant(
    constant: ModelSolution, solution: ModelSolution, heads: list[HeadId]
) -> dict[str, Fit]:
    """One constant for all heads, under its name; empty if it is the fit itself, or beta = 1."""
    rules = constant.rules(heads)
    if rules is None or solution is constant:
        return {}
    return {CONSTANT: replace(rules, name=CONSTANT)}


def _gain_over_constant(evidence: Evidence) -> Estimate:
    """The paired gain of the fit over one constant for all heads, on the judged items.

    A constant that gained nothing is beta = 1, the baseline.
    """
    over = CONSTANT if CONSTANT in evidence.rules else BASELINE
    return evidence.judged.gain(OWN, LOG_P, over)


# The evidence in the coefficient file


def _evidence_record(
    evidence: Evidence, kind: str, over_constant: Estimate | None
) -> dict[str, Any]:
    """The evidence of a fit on the test split, without the verdict.

    Args:
      evidence: of the fit, OWN, and other rules.
      kind: of the rules.
      over_constant: gain over one constant for all heads; None if the fit is that constant.
    """
    record: dict[str, Any] = {"held_out": evidence.judged.held_out_records()}
    if over_constant is not None:
        numbers = {"gain": float(over_constant.mean), "se": float(over_constant.error)}
        # The standard error of a single group is NaN, and left out.
        finite = {name: number for name, number in numbers.items() if np.isfinite(number)}
        record["kinds"] = [{"kind": kind} | finite]
    return record
