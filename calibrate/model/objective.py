"""Rules compared by a model's answers, and what a fit through the model aims at.

That is the mean log p of the answers, templates and lengths of equal weight. What is protected
bounds the strength of a rule: the mean of KL(plain || rule) of text, with two of its errors, and
what answers up to a trained length lose may be no more than is allowed, nats a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import KL, LOG_P, OWN, PLAIN, RIGHT, Evidence, Scored, Stratum
from calibrate.files.examples import ExampleSet, Scores
from calibrate.model.questions import answers_of, log_p_of_any, per_question, question_of
from calibrate.model.splits import TEST, VALIDATION, groups_of, whole_templates

ALLOWED_KL = 0.01  # nats a token, of protected text; of trained lengths, what their log p loses
_ERRORS = 2.0  # that are added to the KL of text
SAFETY_FACTOR = 1 / 2  # of what trained lengths may lose, by the examples that choose: others judge
_OTHER = "other"
_NO_GAIN = Estimate(0.0, np.nan)  # of a part without examples
_ANSWERS = Scored("", items="answers")


def compare(
    examples: ExampleSet, which: Sequence[int], scores: Mapping[str, Scores],
    of: Scored = _ANSWERS, own: bool = False,
) -> Evidence:  # fmt: skip
    """Rules by their scores of some examples: LOG_P, RIGHT of whole answers, and KL of text.

    An item is a question, with log of the summed probability of its right answers, or a window of
    text. A stratum is a template at a length. Windows from one stretch are a group, whatever their
    lengths; so are the examples of a group, and others are independent.

    Args:
      which: numbers of the examples that were scored.
      scores: by rule, with an entry for each of `which`; the baseline is PLAIN.
      of: what was scored.
      own: whether a fit was made of these examples: some templates are none that it has seen.
    """
    index = np.asarray(which, int)
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
    if of.items == _ANSWERS.items:  # a measure of the user's own does not tell
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
    """Examples with the scores of the baseline, and which of them are protected.

    Args:
      plain: scores of the baseline, an entry per example.
      trained_up_to: length in tokens up to which answers are protected too; None or 0 for none.
      allowed: nats a token that protected text and lengths may lose.
      of: what is scored.
    Attributes:
      protected: the cells of each part that is: plain text, and every trained cell of answers.
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
        """The protected part that loses most by a value, in words with its option."""
        loss, cells = max(zip(value.losses, self.protected, strict=True))
        length = self.examples.cells[cells[0]].length
        part = f"answers of {length:,} tokens (--trained-up-to)"
        part = "protected text (--text), as KL," if self.is_text[cells[0]] else part
        return (
            f"a rule that gains {value.gain:+.3f} nats costs {part} {loss.mean:.4f} nats a token, "
            f"and {self.allowed:g} is allowed (--allowed-loss)"
        )

    def evidence(self, which: Sequence[int], scores: Mapping[str, Scores]) -> Evidence:
        """Some examples under the baseline and under rules, by their scores of them."""
        plain = {PLAIN: self.plain.at(which)}
        return compare(self.examples, which, {**plain, **scores}, self._of, own=True)

    def losses(self, evidence: Evidence, which: Sequence[int], rule: str) -> list[Estimate]:
        """Nats a token that a rule loses of each protected part; 0 where it has none of `which`.

        Text loses its KL; where some of it is of a register that the fit has not seen, that counts.
        """
        cell = self.cell[[answers[0] for answers in answers_of(self.examples, which)]]
        found = []
        for cells in self.protected:
            held = np.isin(cell, cells)
            if not held.any():
                found.append(_NO_GAIN)
            elif self.is_text[cells[0]]:
                found.append(evidence.text.unseen.mean(rule, KL))
            else:
                gain = evidence.where(held).gain_a_token(rule)
                found.append(gain._replace(mean=0.0 - gain.mean))
        return found

    def value(self, which: Sequence[int], scores: Scores) -> "Value":
        """The value of a rule on some examples."""
        evidence = self.evidence(which, {OWN: scores})
        losses = self.losses(evidence, which, OWN)
        answers = evidence.answers.unseen
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
        """The most that any part loses, nats a token, with a margin: others judge."""
        text, answers = self.losses[: int(self.has_text)], self.losses[int(self.has_text) :]
        found = [loss.mean + _ERRORS * np.nan_to_num(loss.error) for loss in text]
        return float(max([*found, *(loss.mean / SAFETY_FACTOR for loss in answers)], default=0.0))

    @property
    def is_allowed(self) -> bool:
        """True if no retention text and no trained length loses more than it may."""
        return self.lost <= self.allowed

    def over(self, other: "Value | None" = None) -> Estimate:
        """Mean gain over another rule on the same examples; None is the baseline."""
        if other is None:
            return self.answers.gain(OWN, LOG_P)
        its = {measure: x[-1] for measure, x in other.answers.values.items()}
        return self.answers.with_rule(_OTHER, its).gain(OWN, LOG_P, _OTHER)
