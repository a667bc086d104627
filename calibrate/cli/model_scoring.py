"""Scores of fits by a model's own answers."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from transformers import PreTrainedModel

from calibrate.cli.loading import collection_of
from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError
from calibrate.evidence.baselines import log_size, one_constant, paper
from calibrate.evidence.evidence import PLAIN, Scored
from calibrate.files.coefficients import Coefficients, identity
from calibrate.files.collection import open_collection
from calibrate.files.examples import ExampleCollection, ExampleSet, Scores
from calibrate.model.collect_examples import Job
from calibrate.model.objective import compare
from calibrate.model.passes import NOWHERE, Memo, batch_tokens, score_fits
from calibrate.model.splits import JUDGING, splits_of
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.streams import stderr

Rules = Mapping[str, Coefficients]


def model_steps(title: str, examples: ExampleSet, units: Sequence[Sequence[int]]) -> Steps:
    """A step for each batch of each unit of work, of as much work as it has tokens."""
    work = [n for unit in units for n in batch_tokens(examples, unit)]
    return Steps(title, len(work), sum(work))


def score_fit(
    fit: Coefficients, job: Job, collection: ExampleCollection | None, constants: list[float]
) -> ScoresRecord:
    """Scores a fit by a model's answers, beside constants and log n."""
    trained = fit.source.get("options", {}).get("trained_up_to") or 0
    others = rules_beside(constants, trained if trained > 1 else None)
    return score_rules(job, collection, {fit.reference: fit}, others)


def rules_beside(constants: list[float], trained_up_to: int | None) -> Rules:
    """The paper's numbers on every head, and what else is asked for."""
    rules = {"paper": paper(), **{f"constant {beta:g}": one_constant(beta) for beta in constants}}
    by_size = {f"log n / log {n}": log_size(n) for n in [trained_up_to] if n is not None}
    return rules | by_size


def score_rules(
    job: Job, collection: ExampleCollection | None, fits: Rules, others: Rules
) -> ScoresRecord:
    """Scores the examples of a model under plain softmax and other rules.

    Args:
      collection: that the examples are of, if they were not made for this evaluation.
      fits: get a verdict.
    Raises:
      CalibrateError: the collection has too few examples to judge a fit of its own.
      CoefficientsError: a fit names layers or heads that the model lacks.
    Warns:
      UserWarning: a fit was made for another model.
    """
    rules, scores = {**fits, **others}, dict[str, Scores]()
    todo = dict(rules)
    if collection:
        which, scored = _to_judge(collection, fits)
        scores[PLAIN] = Scores(*(column[which] for column in collection.scores))
    else:
        which = list(range(len(job.examples.examples)))
        scored = f"{len(which):,} examples, made for this evaluation"
        _warn_of_seen_examples(fits, job.examples)
        todo[PLAIN] = identity()
    fingerprint = job.configuration["fingerprint"]
    _warn_of_other_models(fits, job.folder.name, fingerprint)
    scores |= _score(job, which, todo, collection)
    evidence = compare(
        job.examples, which, {PLAIN: scores[PLAIN]} | {r: scores[r] for r in rules},
        Scored(job.folder.name, fingerprint, "answers"),
    )  # fmt: skip
    return ScoresRecord(evidence, tuple(fits), scored=scored)


def _to_judge(collection: ExampleCollection, fits: Rules) -> tuple[list[int], str]:
    """The examples that no fit was made of or chosen by, and in words which these are."""
    examples, run = collection.set.examples, collection.folder
    own = [name for name, fit in fits.items() if fit.source.get("collection") == collection.digest]
    if not own:
        return list(range(len(examples))), f"all {len(examples):,} examples of {run}"
    which = np.flatnonzero(splits_of(examples) == JUDGING).tolist()
    if not which:
        raise CalibrateError(
            f"{run} has no example that {own[0]} was not made of; collect more examples of each "
            "template and length"
        )
    return which, (
        f"{len(which):,} of the {len(examples):,} examples of {run}: {', '.join(own)} "
        f"{'was' if len(own) == 1 else 'were'} made of the others"
    )


def _warn_of_other_models(fits: Rules, model: str, fingerprint: str) -> None:
    for name, fit in fits.items():
        if fit.fingerprint not in (None, fingerprint):
            warnings.warn(
                f"{name} was made for {fit.fingerprint}, and {model} is {fingerprint}: another "
                "model's fit is scored",
                stacklevel=3,
            )


def _warn_of_seen_examples(fits: Rules, examples: ExampleSet) -> None:
    """Warns of examples that fits were made of, as far as their collections are in ./runs."""
    tokens = [example.tokens.tobytes() for example in examples.examples]
    for name, fit in fits.items():
        if not fit.of_whole_model or (run := collection_of(fit)) is None:
            continue
        made_of = open_collection(run, ExampleCollection).set.examples
        parts = zip(made_of, splits_of(made_of), strict=True)
        seen = {example.tokens.tobytes() for example, part in parts if part != JUDGING}
        if n_seen := sum(x in seen for x in tokens):
            warnings.warn(
                f"{name} was made of {n_seen:,} of these {len(tokens):,} examples ({run}): they "
                "are not held out; give another --seed, or other prompts and text",
                stacklevel=3,
            )


def _score(
    job: Job, which: Sequence[int], rules: Rules,
    collection: ExampleCollection | None,
) -> dict[str, Scores]:  # fmt: skip
    """The scores under each rule, which a collection keeps."""

    def load() -> PreTrainedModel:
        stderr.print(f"loading {job.folder.path}")
        return job.folder.load(job.dtype, job.device)

    memo = Memo(collection.folder, collection.digest) if collection else NOWHERE
    units = job.examples.units(which) * len(rules)
    with model_steps("scoring", job.examples, units) as steps:
        return score_fits(
            load, job.examples, which, rules, memo,
            lambda tokens, resumed: steps.advance(work=tokens, resumed=resumed),
        )  # fmt: skip
