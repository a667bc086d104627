"""Scoring rules on the examples of a whole model, with progress on stderr."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from calibrate.cli.loading import examples_of
from calibrate.cli.model_options import Source
from calibrate.cli.model_steps import job_of, model_progress
from calibrate.errors import CalibrateError
from calibrate.files.coefficients import Coefficients, identity
from calibrate.files.collection import kind_of, open_collection
from calibrate.files.examples import ExampleCollection, ExampleSet, Scores
from calibrate.report.model_scores_record import ModelScoresRecord
from calibrate.report.streams import stderr
from calibrate.rows.baselines import log_size, one_constant, paper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from calibrate.model.collect_examples import Job


class Rules(NamedTuple):
    """The rules to compare with plain softmax, by name."""

    all: dict[str, Coefficients]
    fits: dict[str, Coefficients]  # those of them that get a verdict
    constants: list[str]  # the names of those that are one constant on every head


def score_model(source: Source, rules: Rules) -> ModelScoresRecord:
    """Scores the examples of a model under plain softmax and other rules.

    Raises:
      CalibrateError: the model is not that of the collection, or cannot be found; the collection
        has too few examples to judge a fit of its own.
      CoefficientsError: a fit names layers or heads that the model lacks.
    Warns:
      UserWarning: a fit was made for another model.
    """
    if source.run is not None and kind_of(source.run) != "examples":
        raise CalibrateError(
            f"{source.run} is not a collection of a model's examples; make one with `calibrate "
            "collect --model`, or score a head (--head) or logits (--logits) without RUN"
        )
    job, collection = job_of(source)
    from calibrate.model.comparison import PLAIN, compare

    todo, scores = dict(rules.all), dict[str, Scores]()
    if collection:
        which, scored = _to_judge(collection, rules.fits)
        scores[PLAIN] = Scores(*(column[which] for column in collection.scores))
    else:
        which = list(range(len(job.examples.examples)))
        scored = f"{len(which):,} examples, made for this evaluation"
        _warn_of_seen_examples(rules.fits, job.examples)
        todo[PLAIN] = identity()
    fingerprint = job.configuration["fingerprint"]
    _warn_of_other_models(rules.fits, job.folder.name, fingerprint)
    kept = (collection.folder, collection.digest) if collection else None
    scores |= _score(job, which, todo, kept)
    comparison = compare(
        job.examples, which, {PLAIN: scores[PLAIN]} | {r: scores[r] for r in rules.all}
    )
    return ModelScoresRecord(
        comparison, job.folder.name, fingerprint, collection.digest if collection else None, scored,
        tuple(rules.fits), tuple(rules.constants),
    )  # fmt: skip


def rules_beside(
    fits: dict[str, Coefficients], constants: Sequence[float], trained_up_to: int | None
) -> Rules:
    """The fits, the paper's numbers, and what else is asked for."""
    of_constants = {f"constant {beta:g}": one_constant(beta) for beta in constants}
    rules = {"paper": paper(), **of_constants}
    if trained_up_to is not None:
        rules[f"log n / log {trained_up_to}"] = log_size(trained_up_to)
    return Rules({**fits, **rules}, fits, list(of_constants))


def _to_judge(
    collection: ExampleCollection, fits: Mapping[str, Coefficients]
) -> tuple[list[int], str]:
    """The examples that no fit was made of or chosen by, and in words which these are."""
    from calibrate.model.parts import JUDGING, parts_of

    examples, run = collection.set.examples, collection.folder
    own = [name for name, fit in fits.items() if fit.source.get("collection") == collection.digest]
    if not own:
        return list(range(len(examples))), f"all {len(examples):,} examples of {run}"
    which = np.flatnonzero(parts_of(examples) == JUDGING).tolist()
    if not which:
        raise CalibrateError(
            f"{run} has no example that {own[0]} was not made of; collect more examples of each "
            "template and length"
        )
    return which, (
        f"{len(which):,} of the {len(examples):,} examples of {run}: {', '.join(own)} "
        f"{'was' if len(own) == 1 else 'were'} made of the others"
    )


def _warn_of_other_models(fits: Mapping[str, Coefficients], model: str, fingerprint: str) -> None:
    for name, fit in fits.items():
        if fit.fingerprint not in (None, fingerprint):
            warnings.warn(
                f"{name} was made for {fit.fingerprint}, and {model} is {fingerprint}: another "
                "model's fit is scored",
                stacklevel=3,
            )


def _warn_of_seen_examples(fits: Mapping[str, Coefficients], examples: ExampleSet) -> None:
    """Warns of examples that fits were made of, as far as their collections are in ./runs."""
    from calibrate.model.parts import JUDGING, parts_of

    tokens = [example.tokens.tobytes() for example in examples.examples]
    for name, fit in fits.items():
        if (run := examples_of(fit)) is None:
            continue
        made_of = open_collection(run, ExampleCollection).set.examples
        parts = zip(made_of, parts_of(made_of), strict=True)
        seen = {example.tokens.tobytes() for example, part in parts if part != JUDGING}
        if n_seen := sum(x in seen for x in tokens):
            warnings.warn(
                f"{name} was made of {n_seen:,} of these {len(tokens):,} examples ({run}): they "
                "are not held out; give another --seed, or other prompts and text",
                stacklevel=3,
            )


def _score(
    job: "Job", which: Sequence[int], rules: Mapping[str, Coefficients],
    kept: tuple[Path, str] | None,
) -> dict[str, Scores]:  # fmt: skip
    """The scores under each rule; `kept` is the folder and digest of the collection."""
    from calibrate.model.score_fits import Kept, score_fits, units_of

    def load() -> "PreTrainedModel":
        stderr.print(f"loading {job.folder.path}")
        return job.folder.load(job.dtype, job.device)

    units = units_of(job.examples, which) * len(rules)
    with model_progress("scoring", job.examples, units) as steps:
        return score_fits(
            load, job.examples, which, rules, kept and Kept(*kept),
            lambda tokens, resumed: steps.advance(work=tokens, resumed=resumed),
        )  # fmt: skip
