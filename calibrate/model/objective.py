"""The objective of a fit through a model: the mean log p of its answers, within constraints.

The constraints limit how much of a rule is applied, in nats per token: the KL divergence of
retention text from the baseline (its mean plus two standard errors), and the NLL that answers up to
a trained length lose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from calibrate.defaults import MAX_KL, NLL_TOLERANCE_PER_TOKEN
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, Scored, Stratum
from calibrate.evidence.harm_limits import (
    SAFETY_FACTOR,
    NonInferiority,
    NonInferiorityResult,
    retention_text,
)
from calibrate.evidence.metrics import (
    ANSWERS,
    KL,
    LOG_P,
    LOG_P_PER_TOKEN,
    RIGHT,
    Metric,
)
from calibrate.model.splits import TEST, VALIDATION, assign_groups, whole_template_splits
from calibrate.prompts.examples import Cell, ExampleSet, Scores

_OTHER = "other"
_SCORED_ANSWERS = Scored("", items=ANSWERS)

# Scores of rules as evidence


def compare_rules(
    examples: ExampleSet,
    indices: Sequence[int],
    scores: Mapping[str, Scores],
    of: Scored = _SCORED_ANSWERS,
    own: bool = False,
    exact_match: bool = True,
) -> Evidence:
    """Compares rules by their scores of some examples.

    An item is an answer, or a window of text. A stratum is a template at a length, or a text
    domain at a length. Answers have weight 1; windows have weights with the same sum in each
    stratum. Groups are those of `assign_groups`.

    Args:
      indices: of the examples that were scored.
      scores: by rule, one entry for each index; the baseline is BASELINE.
      of: the model.
      own: True if a fit was made on these examples, so that some templates are held out.
      exact_match: False if scores are not of single tokens: then RIGHT is left out.
    """
    index = np.asarray(indices, int)
    cell = np.array([example.cell for example in examples.examples])[index]
    present, stratum = np.unique(cell, return_inverse=True)
    is_text = np.array([examples.cells[i].text for i in present])[stratum]
    scores = {BASELINE: scores[BASELINE], **scores}  # the baseline is the first rule
    n_answer = examples.n_answer(index)
    return Evidence(
        tuple(scores),
        _metric_values(list(scores.values()), n_answer, is_text, exact_match),
        tuple(_make_strata(examples, present.tolist(), own)),
        stratum,
        assign_groups(examples)[index],
        np.where(is_text, _balanced_weights(stratum), 1.0),
        of,
        tokens=np.where(is_text, 1, n_answer),
    )


def baseline_evidence(examples: ExampleSet, scores: Scores) -> Evidence:
    """The baseline on all examples."""
    return compare_rules(examples, range(len(examples.examples)), {BASELINE: scores})


def _balanced_weights(stratum: np.ndarray) -> np.ndarray:
    """(items,) weights with the same sum in each stratum, and a mean of 1."""
    count = np.bincount(stratum)
    return np.asarray((len(stratum) / (len(count) * count))[stratum])


def _metric_values(
    scores: Sequence[Scores], n_answer: np.ndarray, is_text: np.ndarray, exact_match: bool
) -> dict[Metric, np.ndarray]:
    """The values of each metric, (rules, items).

    Args:
      scores: of each rule, one entry for each item.
      n_answer: (items,) tokens.
      is_text: (items,) bool; values of text are per token.
      exact_match: True if scores of single tokens are known.
    """
    values = {LOG_P: np.array([x.log_p / np.where(is_text, n_answer, 1) for x in scores])}
    if exact_match:
        shares = [x.right / n_answer for x in scores]
        values[RIGHT] = np.array([np.where(is_text, x, x == 1) for x in shares])
    if is_text.any():
        values[KL] = np.array([x.kl / n_answer for x in scores])
    return values


def _make_strata(examples: ExampleSet, cells: Sequence[int], own: bool) -> list[Stratum]:
    """The stratum of each cell; templates are marked as held out if `own`."""
    splits = whole_template_splits(examples) if own else [None] * len(examples.cells)
    strata = []
    for i in cells:
        cell = examples.cells[i]
        is_held_out = splits[i] in (VALIDATION, TEST)
        strata.append(Stratum(cell.length, cell.template, cell.text, is_held_out))
    return strata


# The objective


@dataclass(frozen=True, eq=False)
class Value:
    """The value of a rule, which is named OWN, on some examples."""

    answers: Evidence
    gain: float  # mean log p of the answers over the baseline, nats
    results: list[NonInferiorityResult]  # of each constraint

    @property
    def losses(self) -> list[Estimate]:
        """The loss by each constraint, nats per token."""
        return [result.loss for result in self.results]

    @cached_property
    def limiting(self) -> tuple[float, float]:
        """The cautious loss that is the largest share of its margin, and the margin."""
        losses = [(result.cautious_loss, result.limit) for result in self.results]
        loss, limit = max(losses, key=lambda x: x[1].share(x[0]), default=(0.0, None))
        return loss, limit.margin if limit else np.inf

    @property
    def is_allowed(self) -> bool:
        """True if no cautious loss exceeds its margin."""
        loss, margin = self.limiting
        return loss <= margin

    def over(self, other: "Value | None" = None) -> Estimate:
        """The mean gain over another rule on the same examples; over the baseline by default."""
        if other is None:
            return self.answers.gain(OWN, LOG_P)
        scores = {metric: x[-1] for metric, x in other.answers.values.items()}
        return self.answers.with_rule(_OTHER, scores).gain(OWN, LOG_P, _OTHER)


class ModelObjective:
    """Examples with the baseline's scores, and the constraints on rules.

    Args:
      baseline: scores of all examples.
      trained_up_to: length in tokens up to which answers may lose little; None or 0: no such limit.
      max_kl: largest KL divergence of retention text from the baseline, nats per token.
      tolerance: largest loss of NLL of answers up to `trained_up_to`, nats per token.
      of: the model.
      exact_match: see `compare_rules`.
    Attributes:
      cell: (examples,) int, the cell of each example.
      is_text: (cells,) bool.
      constraints: on retention text, if any, then on each trained cell of answers.
      constrained_cells: the cells that a constraint applies to.
    """

    def __init__(
        self,
        examples: ExampleSet,
        baseline: Scores,
        trained_up_to: int | None = None,
        max_kl: float = MAX_KL,
        tolerance: float = NLL_TOLERANCE_PER_TOKEN,
        of: Scored = _SCORED_ANSWERS,
        exact_match: bool = True,
    ):
        self.examples, self.baseline, self.max_kl = examples, baseline, max_kl
        self._of, self._exact_match = of, exact_match
        self.cell = np.array([example.cell for example in examples.examples])
        self.is_text = np.array([cell.text for cell in examples.cells])
        self.constraints = _make_constraints(examples, trained_up_to, max_kl, tolerance)
        strata = _make_strata(examples, range(len(examples.cells)), own=False)
        self.constrained_cells = {
            i
            for i, stratum in enumerate(strata)
            if any(limit.applies_to(stratum) for limit in self.constraints)
        }

    def evidence(self, indices: Sequence[int], scores: Mapping[str, Scores]) -> Evidence:
        """Compares the baseline and rules, by the rules' scores of some examples."""
        scores = {BASELINE: self.baseline.at(indices), **scores}
        return compare_rules(self.examples, indices, scores, self._of, True, self._exact_match)

    def check(self, evidence: Evidence, rule: str) -> list[NonInferiorityResult]:
        """The loss of a rule by each constraint; 0 if there are no items to which it applies."""
        return [limit.check(evidence, rule) for limit in self.constraints]

    def value(self, indices: Sequence[int], scores: Scores) -> Value:
        """The value of a rule by its scores of some examples."""
        evidence = self.evidence(indices, {OWN: scores})
        answers = evidence.answers.held_out_templates
        gain = float(answers.gain(OWN, LOG_P).mean) if answers.n else 0.0
        return Value(answers, gain, self.check(evidence, OWN))


def _make_constraints(
    examples: ExampleSet, trained_up_to: int | None, max_kl: float, tolerance: float
) -> list[NonInferiority]:
    """The limit on retention text, then the limit on each cell of answers of trained lengths."""
    constraints = [retention_text(max_kl)] if any(cell.text for cell in examples.cells) else []
    for cell in examples.cells:
        if not cell.text and cell.length <= (trained_up_to or 0):
            name, applies_to = f"answers of {cell.length:,} tokens", partial(_is_of_cell, cell)
            constraints.append(
                NonInferiority(name, applies_to, LOG_P_PER_TOKEN, tolerance, SAFETY_FACTOR)
            )
    return constraints


def _is_of_cell(cell: Cell, stratum: Stratum) -> bool:
    return (stratum.template, stratum.size, stratum.protected) == cell
