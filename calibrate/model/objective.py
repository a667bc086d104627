"""Comparison of rules by a model's answers, and the objective of a fit through the model.

That is the mean log p of the answers, templates and lengths of equal weight. Two bounds limit how
much of a rule is applied, in nats per token: the KL divergence of retention text from the baseline,
in the mean with two of its errors, and the NLL that answers up to a trained length lose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calibrate.datasets.examples import ExampleSet, Scores
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.metrics import ANSWERS, KL, LOG_P, RIGHT
from calibrate.evidence.non_inferiority import (
    MAX_KL,
    N_ERRORS_OF_KL,
    NLL_TOLERANCE_PER_TOKEN,
    SAFETY_FACTOR,
)
from calibrate.evidence.scores import OWN, PLAIN, Evidence, Scored, Stratum
from calibrate.model.questions import answers_of, log_p_of_any, per_question, question_of
from calibrate.model.splits import TEST, VALIDATION, groups_of, whole_templates

_OTHER = "other"
_NO_GAIN = Estimate(0.0, np.nan)  # of a part without examples
_ANSWERS = Scored("", items=ANSWERS)


def compare(
    examples: ExampleSet, indices: Sequence[int], scores: Mapping[str, Scores],
    of: Scored = _ANSWERS, own: bool = False,
) -> Evidence:  # fmt: skip
    """Rules by their scores of some examples: LOG_P, RIGHT of whole answers, and KL of text.

    An item is a question, with log of the summed probability of its right answers, or a window of
    text. A stratum is a template at a length. Windows from one segment are a group, whatever their
    lengths; so are the examples of a group, and others are independent.

    Args:
      indices: of the examples that were scored.
      scores: by rule, with an entry for each of `indices`; the baseline is PLAIN.
      of: what was scored.
      own: whether a fit was made of these examples: some templates are held out from it.
    """
    index = np.asarray(indices, int)
    question, n_answer = question_of(examples, index), examples.n_answer(index)
    first = np.unique(question, return_index=True)[1]  # its answers have a cell and a group
    cell = np.array([example.cell for example in examples.examples])[index[first]]
    present, stratum = np.unique(cell, return_inverse=True)
    cells = [examples.cells[i] for i in present]
    per_token = np.array([c.text for c in cells])[stratum]
    tokens = np.where(per_token, n_answer[first], 1)
    rules = (PLAIN, *(rule for rule in scores if rule != PLAIN))
    log_p = [log_p_of_any(scores[rule].log_p, question) / tokens for rule in rules]
    share = [per_question(np.maximum, scores[x].right / n_answer, question) for x in rules]
    values = {LOG_P: log_p}
    if of.items == _ANSWERS.items:  # unknown by a measure of the user's own
        values[RIGHT] = [np.where(per_token, x, x == 1) for x in share]
    if per_token.any():
        values[KL] = [scores[rule].kl[first] / n_answer[first] for rule in rules]
    parts = whole_templates(examples) if own else [None] * len(examples.cells)
    unseen = [parts[i] in (VALIDATION, TEST) for i in present]
    by_log_p = np.lexsort((-scores[PLAIN].log_p, question))
    likeliest = by_log_p[np.unique(question[by_log_p], return_index=True)[1]]
    return Evidence(
        rules, {measure: np.array(x) for measure, x in values.items()},
        tuple(Stratum(c.length, c.template, c.text, x) for c, x in zip(cells, unseen, strict=True)),
        stratum, groups_of(examples)[index[first]], np.ones(len(first)), of,
        tokens=np.where(per_token, 1, n_answer[likeliest]),
    )  # fmt: skip


def plain_alone(examples: ExampleSet, scores: Scores) -> Evidence:
    """The baseline on all examples, by its scores of them."""
    return compare(examples, range(len(examples.examples)), {PLAIN: scores})


class Part(NamedTuple):
    """Examples whose loss is bounded: all retention text, or the answers of a trained cell."""

    cells: list[int]
    is_text: bool
    bound: float  # nats per token


class Objective:
    """Examples with the scores of the baseline, and the cells with margins (protected).

    Args:
      plain: scores of the baseline, an entry per example.
      trained_up_to: length in tokens up to which answers are protected too; None or 0 for none.
      max_kl: KL divergence of retention text, nats per token, at most.
      tolerance: NLL that answers up to `trained_up_to` may lose, nats per token.
      of: what is scored.
    Attributes:
      parts: those whose loss is bounded: retention text first, then every trained cell of answers.
    """

    def __init__(
        self, examples: ExampleSet, plain: Scores, trained_up_to: int | None = None,
        max_kl: float = MAX_KL, tolerance: float = NLL_TOLERANCE_PER_TOKEN, of: Scored = _ANSWERS,
    ):  # fmt: skip
        self.examples, self.plain, self.max_kl, self._of = examples, plain, max_kl, of
        self.cell = np.array([example.cell for example in examples.examples])
        self.is_text = np.array([cell.text for cell in examples.cells])
        trained = [cell.length <= (trained_up_to or 0) for cell in examples.cells]
        text = np.flatnonzero(self.is_text).tolist()
        answers = np.flatnonzero(~self.is_text & trained).tolist()
        self.parts = [Part(text, True, max_kl)] if text else []
        self.parts += [Part([i], False, tolerance) for i in answers]

    @property
    def protected(self) -> list[list[int]]:
        """The cells of each part."""
        return [part.cells for part in self.parts]

    def limiting_constraint(self, value: "Value") -> str:
        """The part that loses the largest share of its bound, in words with its option."""
        pairs = zip(value.losses, self.parts, strict=True)
        loss, part = max(pairs, key=lambda pair: share_of_bound(pair[0].mean, pair[1].bound))
        if part.is_text:
            loses = f"moves retention text (--retention-text) by a KL of {loss.mean:.4f} nats"
            option = "--max-kl"
        else:
            length = self.examples.cells[part.cells[0]].length
            loses = f"costs answers of {length:,} tokens (--trained-up-to) {loss.mean:.4f} nats"
            option = "--tolerance"
        return (
            f"a rule that gains {value.gain:+.3f} nats {loses} per token, and {part.bound:g} is "
            f"allowed ({option})"
        )

    def evidence(self, indices: Sequence[int], scores: Mapping[str, Scores]) -> Evidence:
        """Some examples under the baseline and under rules, by their scores of them."""
        plain = {PLAIN: self.plain.at(indices)}
        return compare(self.examples, indices, {**plain, **scores}, self._of, own=True)

    def losses(self, evidence: Evidence, indices: Sequence[int], rule: str) -> list[Estimate]:
        """Nats per token that a rule loses of each part; 0 where it has none of `indices`.

        Text loses its KL; where some of it is of held-out domains, these count alone.
        """
        cell = self.cell[[answers[0] for answers in answers_of(self.examples, indices)]]
        losses = []
        for part in self.parts:
            held = np.isin(cell, part.cells)
            if not held.any():
                losses.append(_NO_GAIN)
            elif part.is_text:
                losses.append(evidence.text.held_out_templates.mean(rule, KL))
            else:
                gain = evidence.where(held).gain_a_token(rule)
                losses.append(-gain)
        return losses

    def value(self, indices: Sequence[int], scores: Scores) -> "Value":
        """The value of a rule on some examples."""
        evidence = self.evidence(indices, {OWN: scores})
        losses = self.losses(evidence, indices, OWN)
        answers = evidence.answers.held_out_templates
        gain = float(answers.gain(OWN, LOG_P).mean) if answers.n else 0.0
        return Value(answers, gain, losses, self.parts)


def share_of_bound(loss: float, bound: float) -> float:
    """A loss as a share of its bound; of a bound of 0 any loss is infinitely much."""
    if bound > 0:
        return float(loss / bound)
    return np.inf if loss > 0 else float(loss)


@dataclass(frozen=True, eq=False)
class Value:
    """The scores of a rule, OWN, on some examples."""

    answers: Evidence
    gain: float  # nats of the answers
    losses: list[Estimate]  # of each part: nats per token
    parts: list[Part]

    @cached_property
    def _binding(self) -> tuple[float, float]:
        """The loss that is the largest share of its bound, with a margin, and that bound."""
        found = [
            (
                loss.mean + N_ERRORS_OF_KL * np.nan_to_num(loss.error) if part.is_text
                else loss.mean / SAFETY_FACTOR,
                part.bound,
            )
            for loss, part in zip(self.losses, self.parts, strict=True)
        ]  # fmt: skip
        return max(found, key=lambda pair: share_of_bound(*pair), default=(0.0, np.inf))

    @property
    def lost(self) -> float:
        """What the part loses that loses the largest share of its bound, nats per token.

        With a margin, as the test split has the last word.
        """
        return float(self._binding[0])

    @property
    def bound(self) -> float:
        """The bound of that part, nats per token."""
        return self._binding[1]

    @property
    def is_allowed(self) -> bool:
        """True if no part loses more than its bound."""
        return self.lost <= self.bound

    def over(self, other: "Value | None" = None) -> Estimate:
        """Mean gain over another rule on the same examples; None is the baseline."""
        if other is None:
            return self.answers.gain(OWN, LOG_P)
        scores = {measure: x[-1] for measure, x in other.answers.values.items()}
        return self.answers.with_rule(_OTHER, scores).gain(OWN, LOG_P, _OTHER)
