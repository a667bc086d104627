"""A fit through a model: the rules of its heads under which it answers best."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from calibrate.errors import QualityError
from calibrate.export.plan import ALIKE
from calibrate.files.coefficients import Coefficients
from calibrate.files.examples import ExampleCollection, Scores
from calibrate.files.provenance import provenance
from calibrate.files.store import load, published_store
from calibrate.maths.rule import LOG_SIZE
from calibrate.model.answering import check_vocabulary
from calibrate.model.candidates import (
    TOOLS,
    Began,
    Candidate,
    Chosen,
    Ended,
    ModelOptions,
    choose,
    fit_candidates,
    objective,
    part,
)
from calibrate.model.comparison import PLAIN, compare, plain_alone
from calibrate.model.judging import (
    FREE,
    ONE_CONSTANT,
    ONE_LINE,
    OWN,
    PAPER,
    Judged,
    NotWorthItError,
)
from calibrate.model.parts import JUDGING, N_PARTS, parts_of
from calibrate.model.passes import Report
from calibrate.model.rule_parameters import CONSTANT, ONE_RATIO, Head
from calibrate.model.score_fits import Kept, score_fits
from calibrate.transformers.betas import head_betas

LEAST_EXAMPLES = 8  # of a template and length


@dataclass(frozen=True, eq=False)
class ModelFit:
    """A fit through a model, and why it is of this kind."""

    coefficients: Coefficients
    heads: list[tuple[int, int]]  # of the model
    chosen: Chosen
    candidates: list[Candidate]
    judged: Judged


def fit_through(
    load_model: Callable[[], PreTrainedModel],
    collection: ExampleCollection,
    name: str,
    options: ModelOptions,
    report: Report = lambda tokens, resumed: None,
    began: Began = lambda what, passes: None,
    ended: Ended = lambda candidate: None,
) -> ModelFit:
    """Fits the rules of a model's heads by the mean log p of its answers, and chooses among kinds.

    Results of passes are kept under the collection: the same call carries on where one stopped.

    Args:
      load_model: loads the model of the collection; called once.
      report: called with the tokens of each batch, and whether it was passed before.
      began: called before each kind of rule, and before the judgement, with the examples of every
        pass that it may take.
      ended: called with each candidate when it is found.
    Raises:
      CalibrateError: a log p or a derivative is not finite, or memory runs out.
      CoefficientsError: the model does not look attention up.
      QualityError: there are too few answers, or no rule is worth it on examples that it has not
        seen.
    """
    _require_answers(collection)
    model = load_model()
    check_vocabulary(collection.set, model.config.get_text_config().vocab_size)
    with head_betas(model) as heads:
        candidates = fit_candidates(model, heads, collection, options, report, began, ended)
    chosen = choose(candidates, collection, options)
    fit = chosen.published.fit(heads.heads)
    if fit is None:
        raise NotWorthItError(
            "not for this model: no rule on its heads answers better on examples that choose; "
            "`calibrate diagnose` shows what each head wants",
            plain_alone(collection.set, collection.scores),
        )
    fit = replace(
        fit, name=name, source=_source(collection, options), provenance=provenance(*TOOLS)
    )
    rivals = _rivals(fit, candidates, options, heads.heads)
    free, beside = chosen.free.fit(heads.heads), None
    if options.engines:
        beside = PLAIN if free is None else OWN if free == fit else FREE
        rivals |= {FREE: replace(free, name="rival")} if free and beside == FREE else {}
    fits = {OWN: fit, **rivals}
    began("judging", [part(collection, JUDGING)] * len(fits))
    judged = _judge(model, collection, options, fits, report)
    judged = replace(judged, beside=beside)
    judged.require_worth()
    quality = _quality(judged, candidates, _verdict(judged, chosen, heads.heads))
    return ModelFit(replace(fit, quality=quality), heads.heads, chosen, candidates, judged)


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
    if text.any() and len(np.unique(parts_of(examples.examples)[text])) < N_PARTS:
        longest = max(cell.length for cell in examples.cells if cell.text)
        raise QualityError(
            f"the {text.sum()} windows of plain text leave none to choose or to judge by; collect "
            f"a longer text, of four times {longest:,} tokens at least, or shorter --lengths"
        )


def _rivals(
    fit: Coefficients, candidates: list[Candidate], options: ModelOptions,
    heads: list[tuple[int, int]],
) -> dict[str, Coefficients]:  # fmt: skip
    """What a fit is compared with; of a fit for export, rules for all heads that export too."""
    alike = {c.form.kind: c.fit(heads) for c in candidates if c.form.of == ALIKE}
    line = alike.get(ONE_RATIO) if options.engines else alike[LOG_SIZE]
    rivals = {ONE_CONSTANT: alike[CONSTANT], ONE_LINE: line}
    others = {label: replace(x, name="rival") for label, x in rivals.items() if x and x != fit}
    return {PAPER: load("paper@1", published_store()), **others}


def _judge(
    model: PreTrainedModel, collection: ExampleCollection, options: ModelOptions,
    fits: dict[str, Coefficients], report: Report,
) -> Judged:  # fmt: skip
    """The fit and its rivals as the runtime applies them, on examples that none has seen."""
    which = part(collection, JUDGING)
    kept = Kept(collection.folder, collection.digest)
    scores = score_fits(lambda: model, collection.set, which, fits, kept, report)
    aim = objective(collection, options)
    losses = {label: aim.value(which, s.log_p).losses for label, s in scores.items()}
    plain = Scores(*(column[which] for column in collection.scores))
    found = compare(collection.set, which, {PLAIN: plain, **scores})
    return Judged(found, losses, options.allowed)


def _verdict(judged: Judged, chosen: Chosen, heads: list[Head]) -> str:
    form, changed = chosen.published.form, chosen.published.heads_changed(heads)
    what = "a factor of their own" if form.kind == ONE_RATIO else "a rule"
    words = f"{len(changed)} of {len(heads)} heads have {what}"
    if form.of == ALIKE:
        words = "one rule for all heads"
    cost = f"; {judged.export_cost_in_words(chosen.free.form.label)}" if judged.beside else ""
    return f"{words} ({form.kind}): {judged.summary()}{cost}"


def _quality(judged: Judged, candidates: list[Candidate], verdict: str) -> dict[str, Any]:
    return {
        "held_out": judged.by_length(),
        "candidates": [
            {"kind": candidate.form.label, "gain": candidate.point.value.gain}
            for candidate in candidates
        ],
        "verdict": verdict,
    }


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
