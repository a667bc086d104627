"""`calibrate model evaluate`: score fits by a model's own answers."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from typer import BadParameter, Option

from calibrate.cli.evaluate import Scored
from calibrate.cli.loading import collection_of, load_fits
from calibrate.cli.model_collect import (
    Constants,
    RunOrExamples,
    model_steps,
    open_or_make,
    parse_betas,
)
from calibrate.errors import CalibrateError
from calibrate.files.coefficients import Coefficients, identity
from calibrate.files.collection import open_collection
from calibrate.files.examples import ExampleCollection, ExampleSet, Scores
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from calibrate.model.collect_examples import Job
    from calibrate.report.scores_record import ScoresRecord


@dataclass(frozen=True)
class ModelEvaluateRequest(Scored, RunOrExamples):
    """What `calibrate model evaluate` is asked for."""

    constants: Constants = ""
    trained_up_to: Annotated[
        int | None,
        Option(min=2, help="Tokens the model was trained up to, N; log n / log N is compared."),
    ] = None

    def __post_init__(self) -> None:
        """Checks what goes together."""
        super().__post_init__()
        parse_betas(self.constants)
        if self.as_csv and self.as_json:
            raise BadParameter("--csv cannot be used with --json")


def evaluate(request: ModelEvaluateRequest) -> "ScoresRecord":
    """Score fits by a model's own answers, beside simpler rules.

    Log p and how many are right, by template and length, on RUN, a collection of examples, or on
    those that --model and the options of `model collect` make. Of the collection that a fit was
    made of, only the examples count that it has not seen. With RUN, scores are kept: the same
    command continues where it was interrupted.

    Example: calibrate model evaluate runs/model --fits mine --constants 1.15,1.3
    """
    fits, constants = load_fits(request.fits, request.store), parse_betas(request.constants)
    rules = rules_beside(fits, constants, request.trained_up_to)
    return score_rules(*open_or_make(request.model, request, request.run), rules)


class Rules(NamedTuple):
    """The rules to compare with plain softmax, by name."""

    all: dict[str, Coefficients]
    fits: dict[str, Coefficients]  # those of them that get a verdict
    constants: list[str]  # the names of those that are one constant on every head


def rules_beside(
    fits: dict[str, Coefficients], constants: Sequence[float], trained_up_to: int | None
) -> Rules:
    """The fits, the paper's numbers, and what else is asked for."""
    from calibrate.evidence.baselines import log_size, one_constant, paper

    of_constants = {f"constant {beta:g}": one_constant(beta) for beta in constants}
    rules = {"paper": paper(), **of_constants}
    if trained_up_to is not None:
        rules[f"log n / log {trained_up_to}"] = log_size(trained_up_to)
    return Rules({**fits, **rules}, fits, list(of_constants))


def score_fit(
    fit: Coefficients,
    job: "Job",
    collection: ExampleCollection | None,
    constants: Sequence[float] = (),
) -> "ScoresRecord":
    """Scores a fit by a model's answers, beside constants and log n."""
    trained = fit.source.get("options", {}).get("trained_up_to") or 0
    rules = rules_beside({fit.reference: fit}, constants, trained if trained > 1 else None)
    return score_rules(job, collection, rules)


def score_rules(job: "Job", collection: ExampleCollection | None, rules: Rules) -> "ScoresRecord":
    """Scores the examples of a model under plain softmax and other rules.

    Args:
      collection: that the examples are of, if they were not made for this evaluation.
    Raises:
      CalibrateError: the collection has too few examples to judge a fit of its own.
      CoefficientsError: a fit names layers or heads that the model lacks.
    Warns:
      UserWarning: a fit was made for another model.
    """
    from calibrate.evidence.evidence import PLAIN, Scored
    from calibrate.model.answers import compare
    from calibrate.report.scores_record import ScoresRecord

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
    scores |= _score(job, which, todo, collection)
    evidence = compare(
        job.examples, which, {PLAIN: scores[PLAIN]} | {r: scores[r] for r in rules.all},
        Scored(job.folder.name, fingerprint, "answers"),
    )  # fmt: skip
    return ScoresRecord(evidence, tuple(rules.fits), scored=scored)


def _to_judge(
    collection: ExampleCollection, fits: Mapping[str, Coefficients]
) -> tuple[list[int], str]:
    """The examples that no fit was made of or chosen by, and in words which these are."""
    from calibrate.model.splits import JUDGING, splits_of

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
    from calibrate.model.splits import JUDGING, splits_of

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
    job: "Job", which: Sequence[int], rules: Mapping[str, Coefficients],
    collection: ExampleCollection | None,
) -> dict[str, Scores]:  # fmt: skip
    """The scores under each rule, which a collection keeps."""
    from calibrate.model.passes import Memo
    from calibrate.model.score_fits import score_fits

    def load() -> "PreTrainedModel":
        stderr.print(f"loading {job.folder.path}")
        return job.folder.load(job.dtype, job.device)

    memo = Memo(collection.folder, collection.digest) if collection else Memo(None)
    units = job.examples.units(which) * len(rules)
    with model_steps("scoring", job.examples, units) as steps:
        return score_fits(
            load, job.examples, which, rules, memo,
            lambda tokens, resumed: steps.advance(work=tokens, resumed=resumed),
        )  # fmt: skip
