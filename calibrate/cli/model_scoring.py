"""Scores of fits by the answers of a model."""

import warnings
from collections.abc import Mapping
from dataclasses import replace

from calibrate.errors import CalibrateError
from calibrate.evidence.baselines import LOG_N, PAPER, log_size_rule, paper
from calibrate.evidence.evidence import BASELINE, Scored
from calibrate.evidence.metrics import ANSWERS
from calibrate.model.collect_examples import Job
from calibrate.model.objective import compare_rules
from calibrate.model.scoring import begin_passes, result_cache, score_fits
from calibrate.model.splits import TEST, split
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.prompts.examples import ExampleCollection
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.terminal import Steps
from calibrate.store.fit import Fit


def score_fit_of_model(
    fit: Fit, job: Job, collection: ExampleCollection, jobs: Jobs = ONE_PROCESS
) -> ScoresRecord:
    """Scores a fit by a model's answers, beside the published polynomial and log-n scaling."""
    n = fit.source.get("options", {}).get("trained_up_to") or 0
    baselines = {PAPER: paper()}
    if n > 1:
        baselines[f"{LOG_N}{n}"] = log_size_rule(n)
    fits = {fit.reference: fit}
    return score_rules_on_answers(job, collection, fits, baselines, jobs)


def score_rules_on_answers(
    job: Job,
    collection: ExampleCollection,
    fits: Mapping[str, Fit],
    others: Mapping[str, Fit],
    jobs: Jobs = ONE_PROCESS,
) -> ScoresRecord:
    """Scores the examples of a model under the baseline, fits, which get a verdict, and others.

    Raises:
      CalibrateError: the collection has too few examples for the test split of a fit to it.
      CoefficientsError: a fit names layers or heads that the model lacks.
    Warns:
      UserWarning: a fit was made for another model.
    """
    indices, scored = _test_split(collection, fits)
    scores = {BASELINE: collection.scores.at(indices)}
    fingerprint = job.configuration["fingerprint"]
    _warn_of_other_models(fits, job.folder.name, fingerprint)
    rules, cache = {**fits, **others}, result_cache(collection, job.device)
    units = job.examples.units(indices) * len(rules)
    with Steps() as steps:
        begin_passes(steps, "scoring", job.examples, units)
        scores |= score_fits(job.runner(jobs), job.examples, indices, rules, cache, steps)
    source = Scored(job.folder.name, fingerprint, ANSWERS)
    is_split = len(indices) < len(job.examples.examples)
    evidence = replace(compare_rules(job.examples, indices, scores, source, is_split), fits=rules)
    return ScoresRecord(evidence, tuple(fits), scored=scored)


def _test_split(collection: ExampleCollection, fits: Mapping[str, Fit]) -> tuple[list[int], str]:
    """(indices, description) of the examples to score: the test split of a fit, or all of them."""
    examples, run = collection.set, collection.folder
    n = len(examples.examples)
    own = [name for name, fit in fits.items() if fit.source.get("collection") == collection.digest]
    if not own:
        return list(range(n)), f"all {n:,} examples of {run}"
    indices = split(examples, TEST)
    if not indices:
        raise CalibrateError(
            f"{run} has no example in the test split of {own[0]}; collect more examples of each "
            "prompt template and length"
        )
    names = ", ".join(own)
    return indices, f"{len(indices):,} of the {n:,} examples of {run}: the test split of {names}"


def _warn_of_other_models(fits: Mapping[str, Fit], model: str, fingerprint: str) -> None:
    for name, fit in fits.items():
        if fit.fingerprint not in (None, fingerprint):
            warnings.warn(
                f"{name} is a fit of {fit.fingerprint}, and is scored on another model, {model} "
                f"({fingerprint})",
                stacklevel=3,
            )
