"""Scores of fits by a model's own answers."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibrate.cli.progress_bar import Steps
from calibrate.datasets.examples import ExampleCollection
from calibrate.errors import CalibrateError
from calibrate.evidence.baselines import log_size, paper
from calibrate.evidence.evidence import BASELINE, Evidence, Scored
from calibrate.evidence.metrics import ANSWERS, LOG_P, RIGHT
from calibrate.model.batches import begin_passes
from calibrate.model.collect_examples import Job
from calibrate.model.objective import compare
from calibrate.model.questions import answers_of
from calibrate.model.scoring import result_cache, score_fits
from calibrate.model.splits import TEST, split
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.report.scores_record import Sample, ScoresRecord
from calibrate.store.fit import Fit

Rules = Mapping[str, Fit]
MAX_SAMPLES = 8


def score_fit(
    fit: Fit, job: Job, collection: ExampleCollection, jobs: Jobs = ONE_PROCESS
) -> ScoresRecord:
    """Scores a fit by a model's answers, beside the paper's published polynomial and log n."""
    n = fit.source.get("options", {}).get("trained_up_to") or 0
    by_size = {f"log n / log {n}": log_size(n)} if n > 1 else {}
    fits = {fit.reference: fit}
    scores = score_rules(job, collection, fits, {"paper": paper(), **by_size}, jobs)
    which, _ = _test_split(collection, fits)
    return replace(scores, samples=list(_samples(job, which, scores.evidence, fit.reference)))


def changed_most(evidence: Evidence, rule: str) -> list[int]:
    """Places of the answers that a rule changes most, at most one of each template and length.

    Those come first whose exact match changes, and then those whose probability changes more.
    """
    before, after = (
        np.exp(evidence.scores(name, LOG_P).astype(float)) for name in (BASELINE, rule)
    )
    right = [evidence.scores(name, RIGHT) for name in (BASELINE, rule)]
    order = np.lexsort((-np.abs(after - before), right[0] == right[1]))
    firsts = dict[int, int]()
    for item in order[(before != after)[order]].tolist():
        stratum = int(evidence.stratum[item])
        if not evidence.strata[stratum].protected:
            firsts.setdefault(stratum, item)
    return list(firsts.values())[:MAX_SAMPLES]


def _samples(job: Job, which: Sequence[int], evidence: Evidence, rule: str) -> Iterable[Sample]:
    """The answers that a rule changes most; as token ids without a tokenizer."""
    examples = job.examples
    items = answers_of(examples, which)
    try:
        decode = job.folder.tokenizer().decode
    except CalibrateError:
        decode = str
    for item in changed_most(evidence, rule):
        answers = [examples.examples[i] for i in items[item]]
        prompt, of = answers[0].tokens[: answers[0].start], examples.cells[answers[0].cell]
        title = f"{of.template}, {of.length:,} tokens"
        right = " / ".join(decode(x.tokens[x.start :]) for x in answers)
        yield Sample(item, title, decode(prompt), right)


def score_rules(
    job: Job, collection: ExampleCollection, fits: Rules, others: Rules, jobs: Jobs = ONE_PROCESS
) -> ScoresRecord:
    """Scores the examples of a model under the baseline, fits, which get a verdict, and others.

    Raises:
      CalibrateError: the collection has too few examples for the test split of a fit to it.
      CoefficientsError: a fit names layers or heads that the model lacks.
    Warns:
      UserWarning: a fit was made for another model.
    """
    which, scored = _test_split(collection, fits)
    scores = {BASELINE: collection.scores.at(which)}
    fingerprint = job.configuration["fingerprint"]
    _warn_of_other_models(fits, job.folder.name, fingerprint)
    rules, cache = {**fits, **others}, result_cache(collection, job.device)
    units = job.examples.units(which) * len(rules)
    with Steps() as steps, job.running(jobs) as runner:
        begin_passes(steps, "scoring", job.examples, units)
        scores |= score_fits(runner, job.examples, which, rules, cache, steps)
    of = Scored(job.folder.name, fingerprint, ANSWERS)
    own = len(which) < len(job.examples.examples)
    evidence = replace(compare(job.examples, which, scores, of, own), fits=rules)
    return ScoresRecord(evidence, tuple(fits), scored=scored)


def _test_split(collection: ExampleCollection, fits: Rules) -> tuple[list[int], str]:
    """The test split of the fits to a collection, or all examples; and in words which these are."""
    examples, run = collection.set, collection.folder
    n = len(answers_of(examples, range(len(examples.examples))))
    own = [name for name, fit in fits.items() if fit.source.get("collection") == collection.digest]
    if not own:
        return list(range(len(examples.examples))), f"all {n:,} examples of {run}"
    which = split(examples, TEST)
    if not which:
        raise CalibrateError(
            f"{run} has no example in the test split of {own[0]}; collect more examples of each "
            "prompt template and length"
        )
    return which, (
        f"{len(answers_of(examples, which)):,} of the {n:,} examples of {run}: the test split of "
        f"{', '.join(own)}"
    )


def _warn_of_other_models(fits: Rules, model: str, fingerprint: str) -> None:
    for name, fit in fits.items():
        if fit.fingerprint not in (None, fingerprint):
            warnings.warn(
                f"{name} was made for {fit.fingerprint}, and {model} is {fingerprint}: another "
                "model's fit is scored",
                stacklevel=3,
            )
