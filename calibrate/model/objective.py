"""Comparison of rules by a model's answers, and the objective of a fit through the model.

The objective is the mean log p of the answers, templates and lengths of equal weight. Margins bound
the interpolation weight of a rule, nats a token: the mean of KL(plain || rule) of retention text,
plus two standard errors, and the loss of answers up to a trained length stay within them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import KL, LOG_P, OWN, PLAIN, RIGHT, Evidence, Scored, Stratum
from calibrate.files.examples import ExampleSet, Scores
from calibrate.model.questions import answers_of, log_p_of_any, per_question, question_of
from calibrate.model.splits import TEST, VALIDATION, groups_of, whole_templates

ALLOWED_KL = 0.01  # nats a token: KL of retention text; loss of log p at trained lengths
_ERRORS = 2.0  # standard errors that are added to the KL of text
SAFETY_FACTOR = 2.0  # on losses of trained lengths, on the validation split: the test split decides
_OTHER = "other"
_NO_GAIN = Estimate(0.0, np.nan)  # of a part without examples
_ANSWERS = Scored("", items="answers")


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


class Objective:
    """Examples with the scores of the baseline, and the cells with margins (protected).

    Args:
      plain: scores of the baseline, an entry per example.
      trained_up_to: length in tokens up to which answers are protected too; None or 0 for none.
      allowed: the margin, nats a token, of retention text and of these lengths.
      of: what is scored.
    Attributes:
      protected: the cells of each part: retention text, and every trained cell of answers.
    """

    def __init__(
        self, examples: ExampleSet, plain: Scores, trained_up_to: int | None = None,
        allowed: float = ALLOWED_KL, of: Scored = _ANSWERS,
    ):  # fmt: skip
        self.examples, self.plain, self.allowed, self._of = examples, plain, allowed, of
        self.cell = np.array([example.cell for example in examples.examples])
        self.is_text = np.array([cell.text for cell in examples.cells])
        trained = [cell.length <= (trained_up_to or 0) for cell in examples.cells]
        text = np.flatnonzero(self.is_text).tolist()
        self.protected = [text] if text else []
        self.protected += [[i] for i in np.flatnonzero(~self.is_text & trained).tolist()]

    def limiting_constraint(self, value: "Value") -> str:
        """The part beyond its margin that loses most by a value, in words with its option."""
        loss, cells = max(zip(value.losses, self.protected, strict=True))
        length = self.examples.cells[cells[0]].length
        part = f"answers of {length:,} tokens (--trained-up-to)"
        part = "retention text (--text), as KL," if self.is_text[cells[0]] else part
        return (
            f"a rule that gains {value.gain:+.3f} nats costs {part} {loss.mean:.4f} nats a token, "
            f"more than the margin of {self.allowed:g} (--allowed-loss)"
        )

    def evidence(self, indices: Sequence[int], scores: Mapping[str, Scores]) -> Evidence:
        """Some examples under the baseline and under rules, by their scores of them."""
        plain = {PLAIN: self.plain.at(indices)}
        return compare(self.examples, indices, {**plain, **scores}, self._of, own=True)

    def losses(self, evidence: Evidence, indices: Sequence[int], rule: str) -> list[Estimate]:
        """Nats a token that a rule loses of each protected part; 0 where it has none of `indices`.

        The loss of text is its KL; where some text domains are held out, of these alone.
        """
        cell = self.cell[[answers[0] for answers in answers_of(self.examples, indices)]]
        losses = []
        for cells in self.protected:
            held = np.isin(cell, cells)
            if not held.any():
                losses.append(_NO_GAIN)
            elif self.is_text[cells[0]]:
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
        return Value(answers, gain, losses, bool(self.is_text.any()), self.allowed)


@dataclass(frozen=True, eq=False)
class Value:
    """The scores of a rule, OWN, on some examples."""

    answers: Evidence
    gain: float  # nats of the answers
    losses: list[Estimate]  # of each protected part: nats a token
    has_text: bool  # the first part is text
    allowed: float

    @property
    def lost(self) -> float:
        """The largest loss of any part, nats a token, with safety factors."""
        text, answers = self.losses[: int(self.has_text)], self.losses[int(self.has_text) :]
        bounds = [loss.mean + _ERRORS * np.nan_to_num(loss.error) for loss in text]
        return float(max([*bounds, *(SAFETY_FACTOR * loss.mean for loss in answers)], default=0.0))

    @property
    def is_allowed(self) -> bool:
        """True if no retention text and no trained length loses more than it may."""
        return self.lost <= self.allowed

    def over(self, other: "Value | None" = None) -> Estimate:
        """Mean gain over another rule on the same examples; None is the baseline."""
        if other is None:
            return self.answers.gain(OWN, LOG_P)
        scores = {measure: x[-1] for measure, x in other.answers.values.items()}
        return self.answers.with_rule(_OTHER, scores).gain(OWN, LOG_P, _OTHER)
