"""Comparison of rules by a model's answers, and the objective of a fit through the model.

That is the mean log p of the answers. Two constraints limit how much of a rule is applied, in nats
per token: the KL divergence of retention text from the baseline, in the mean with two of its
errors, and the NLL that answers up to a trained length lose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from calibrate.datasets.examples import Cell, ExampleSet, Scores
from calibrate.defaults import MAX_KL, NLL_TOLERANCE_PER_TOKEN
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, Scored, Stratum
from calibrate.evidence.metrics import (
    ANSWERS,
    HIGHEST_KL,
    KL,
    LOG_P,
    LOG_P_PER_TOKEN,
    RIGHT,
    SAME_TOP,
    Metric,
)
from calibrate.evidence.non_inferiority import (
    SAFETY_FACTOR,
    NonInferiority,
    NonInferiorityResult,
    retention_text,
)
from calibrate.model.questions import log_p_of_any, per_question, question_of
from calibrate.model.splits import TEST, VALIDATION, groups_of, whole_templates

_OTHER = "other"
_ANSWERS = Scored("", items=ANSWERS)


def compare(
    examples: ExampleSet,
    indices: Sequence[int],
    scores: Mapping[str, Scores],
    of: Scored = _ANSWERS,
    own: bool = False,
    exact_match: bool = True,
) -> Evidence:
    """Rules by their scores of some examples: LOG_P, RIGHT of whole answers, and KL of text.

    An item is a question, with log of the summed probability of its right answers, or a window of
    text. A stratum is a template at a length, or a text domain. Answers have weight 1, and windows
    weights that are equal in total in each stratum. Windows from one segment are a group, whatever
    their lengths; so are the examples of a group, and others are independent.

    Args:
      indices: of the examples that were scored.
      scores: by rule, with an entry for each of `indices`; the baseline is BASELINE.
      of: what was scored.
      own: whether a fit was made of these examples: some templates are held out from it.
      exact_match: whether scores are of single tokens: without them RIGHT, SAME_TOP and
        HIGHEST_KL are left out.
    """
    index = np.asarray(indices, int)
    question = question_of(examples, index)
    first = np.unique(question, return_index=True)[1]  # its answers have a cell and a group
    cell = np.array([example.cell for example in examples.examples])[index[first]]
    present, stratum = np.unique(cell, return_inverse=True)
    per_token = np.array([examples.cells[i].text for i in present])[stratum]
    scores = {BASELINE: scores[BASELINE], **scores}  # the baseline is the first
    n_answer = examples.n_answer(index)
    by_log_p = np.lexsort((-scores[BASELINE].log_p, question))
    likeliest = by_log_p[np.unique(question[by_log_p], return_index=True)[1]]
    return Evidence(
        tuple(scores),
        _values(list(scores.values()), question, n_answer, per_token, exact_match),
        tuple(_strata(examples, present.tolist(), own)),
        stratum,
        groups_of(examples)[index[first]],
        np.where(per_token, _equal_strata(stratum), 1.0),
        of,
        tokens=np.where(per_token, 1, n_answer[likeliest]),
        text_tokens=np.where(per_token, n_answer[likeliest], 0),
    )


def _equal_strata(stratum: np.ndarray) -> np.ndarray:
    """(items,) weights that add up to the same in each stratum; 1 where all are as large."""
    count = np.bincount(stratum)
    return np.asarray((len(stratum) / (len(count) * count))[stratum])


def _values(
    scores: Sequence[Scores],
    question: np.ndarray,
    n_answer: np.ndarray,
    per_token: np.ndarray,
    exact_match: bool,
) -> dict[Metric, np.ndarray]:
    """By metric, (rules, questions).

    Args:
      scores: of each rule, with an entry for each answer.
      question: (answers,) int.
      n_answer: (answers,) tokens.
      per_token: (questions,) bool, True of windows of text.
      exact_match: whether single tokens are known: RIGHT, SAME_TOP and HIGHEST_KL.
    """
    first = np.unique(question, return_index=True)[1]
    tokens = np.where(per_token, n_answer[first], 1)
    values = {LOG_P: np.array([log_p_of_any(x.log_p, question) / tokens for x in scores])}
    if exact_match:
        right_share = [per_question(np.maximum, x.right / n_answer, question) for x in scores]
        values[RIGHT] = np.array([np.where(per_token, x, x == 1) for x in right_share])
    if per_token.any():
        values[KL] = np.array([x.kl[first] / n_answer[first] for x in scores])
        if exact_match:
            values[SAME_TOP] = np.array([1 - x.changed[first] / n_answer[first] for x in scores])
            values[HIGHEST_KL] = np.array([x.highest_kl[first] for x in scores])
    return values


def _strata(examples: ExampleSet, cells: Sequence[int], own: bool) -> list[Stratum]:
    """The stratum of each of some cells; held-out templates are marked if a fit is `own`."""
    splits = whole_templates(examples) if own else [None] * len(examples.cells)
    strata = []
    for i in cells:
        cell = examples.cells[i]
        is_held_out = splits[i] in (VALIDATION, TEST)
        strata.append(Stratum(cell.length, cell.template, cell.text, is_held_out))
    return strata


def plain_alone(examples: ExampleSet, scores: Scores) -> Evidence:
    """The baseline on all examples, by its scores of them."""
    return compare(examples, range(len(examples.examples)), {BASELINE: scores})


def constraints_of(
    examples: ExampleSet, trained_up_to: int | None, max_kl: float, tolerance: float
) -> list[NonInferiority]:
    """The limit on retention text, and those on each cell of answers of trained lengths."""
    constraints = [retention_text(max_kl)] if any(cell.text for cell in examples.cells) else []
    for cell in examples.cells:
        if not cell.text and cell.length <= (trained_up_to or 0):
            name, applies_to = f"answers of {cell.length:,} tokens", partial(_is_of_cell, cell)
            constraints.append(
                NonInferiority(name, applies_to, LOG_P_PER_TOKEN, tolerance, SAFETY_FACTOR)
            )
    return constraints


def _is_of_cell(cell: Cell, stratum: Stratum) -> bool:
    """True of the stratum of a cell."""
    return (stratum.size, stratum.template, stratum.protected) == (
        cell.length,
        cell.template,
        cell.text,
    )


class MarginUse(NamedTuple):
    """A loss, counted with caution, beside its margin; nats per token."""

    loss: float
    margin: float


class ModelObjective:
    """Examples with the scores of the baseline, and the constraints on what they may lose.

    Args:
      plain: scores of the baseline, an entry per example.
      trained_up_to: length in tokens up to which answers may lose little; None or 0 for none.
      max_kl: KL divergence of retention text, nats per token, at most.
      tolerance: NLL that answers up to `trained_up_to` may lose, nats per token.
      of: what is scored.
      exact_match: whether scores say which tokens are right.
    Attributes:
      cell: (examples,) int, the cell of each example.
      is_text: (cells,) bool.
      constraints: that on retention text first, then those on trained cells of answers.
    """

    def __init__(
        self,
        examples: ExampleSet,
        plain: Scores,
        trained_up_to: int | None = None,
        max_kl: float = MAX_KL,
        tolerance: float = NLL_TOLERANCE_PER_TOKEN,
        of: Scored = _ANSWERS,
        exact_match: bool = True,
    ):
        self.examples, self.plain, self.max_kl = examples, plain, max_kl
        self._of, self._exact_match = of, exact_match
        self.cell = np.array([example.cell for example in examples.examples])
        self.is_text = np.array([cell.text for cell in examples.cells])
        self.constraints = constraints_of(examples, trained_up_to, max_kl, tolerance)

    @property
    def constrained_cells(self) -> set[int]:
        """The cells that a constraint applies to."""
        strata = _strata(self.examples, range(len(self.examples.cells)), own=False)
        return {
            i
            for i, stratum in enumerate(strata)
            if any(limit.applies_to(stratum) for limit in self.constraints)
        }

    def describe_most_exceeded(self, value: "Value") -> str:
        """The constraint whose margin a rule exceeds most, in words with its parameter."""
        result = max(value.results, key=lambda result: result.share)
        limit, loss = result.limit, result.loss
        if limit.metric == KL:
            loses = f"moves {limit.name} by a KL of {loss.mean:.4f} nats"
            parameter = "max_kl="
        else:
            loses = f"costs {limit.name} (trained_up_to=) {loss.mean:.4f} nats"
            parameter = "tolerance="
        return (
            f"a rule that gains {value.gain:+.3f} nats {loses} per token, and "
            f"{limit.margin:g} is allowed ({parameter})"
        )

    def evidence(self, indices: Sequence[int], scores: Mapping[str, Scores]) -> Evidence:
        """Some examples under the baseline and under rules, by their scores of them."""
        scores = {BASELINE: self.plain.at(indices), **scores}
        return compare(self.examples, indices, scores, self._of, True, self._exact_match)

    def check(self, evidence: Evidence, rule: str) -> list[NonInferiorityResult]:
        """The loss of a rule by each constraint; 0 where no item is under it."""
        return [limit.check(evidence, rule) for limit in self.constraints]

    def value(self, indices: Sequence[int], scores: Scores) -> "Value":
        """The value of a rule on some examples."""
        evidence = self.evidence(indices, {OWN: scores})
        answers = evidence.answers.held_out_templates
        gain = float(answers.gain(OWN, LOG_P).mean) if answers.n else 0.0
        return Value(answers, gain, self.check(evidence, OWN))


@dataclass(frozen=True, eq=False)
class Value:
    """The scores of a rule, OWN, on some examples."""

    answers: Evidence
    gain: float  # nats of the answers
    results: list[NonInferiorityResult]  # of each constraint

    @property
    def losses(self) -> list[Estimate]:
        """Nats per token, by each constraint."""
        return [result.loss for result in self.results]

    @cached_property
    def limiting(self) -> MarginUse:
        """The loss that takes the largest share of its margin, counted with caution."""
        if not self.results:
            return MarginUse(0.0, np.inf)
        worst = max(self.results, key=lambda result: result.limit.share(result.cautious_loss))
        return MarginUse(worst.cautious_loss, worst.limit.margin)

    @property
    def is_allowed(self) -> bool:
        """True if no loss is more than its margin."""
        return self.limiting.loss <= self.limiting.margin

    def over(self, other: "Value | None" = None) -> Estimate:
        """Mean gain over another rule on the same examples; None is the baseline."""
        if other is None:
            return self.answers.gain(OWN, LOG_P)
        scores = {measure: x[-1] for measure, x in other.answers.values.items()}
        return self.answers.with_rule(_OTHER, scores).gain(OWN, LOG_P, _OTHER)
