"""Rules compared by a model's answers, and what a fit through the model aims at.

That is log p of the answers, templates and lengths of equal weight, while the mean log p a token of
protected text, and of answers up to a trained length, may fall by little. Each such constraint has
a multiplier that rises when a check finds it broken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import LOG_P, OWN, PLAIN, RIGHT, Evidence, Scored, Stratum
from calibrate.evidence.prior import ALLOWED_LOSS
from calibrate.files.examples import ExampleSet, Scores
from calibrate.model.splits import stretches_of

HELD_TO = 1 / 2  # of what is allowed, by the examples of a fit: others judge the whole of it
_FIRST = 0.01  # nats of the answers, for all that a constraint allows to lose: its multiplier
_RISE, _FALL = 4.0, 0.5  # of a multiplier
_OTHER = "other"
_NO_GAIN = Estimate(0.0, np.nan)  # of a part without examples
_ANSWERS = Scored("", items="answers")


def compare(
    examples: ExampleSet, which: Sequence[int], scores: Mapping[str, Scores], of: Scored = _ANSWERS
) -> Evidence:
    """Rules by their scores of some examples: LOG_P, and RIGHT of whole answers.

    A stratum is a template at a length. Windows of text from one stretch are a group, whatever
    their lengths; answers are independent.

    Args:
      which: numbers of the examples that were scored.
      scores: by rule, with an entry for each of `which`; plain softmax is PLAIN.
      of: what was scored.
    """
    index = np.asarray(which, int)
    cell = np.array([example.cell for example in examples.examples])[index]
    present, stratum = np.unique(cell, return_inverse=True)
    cells = [examples.cells[i] for i in present]
    per_token, n_answer = np.array([c.text for c in cells])[stratum], examples.n_answer(index)
    rules = (PLAIN, *(rule for rule in scores if rule != PLAIN))
    log_p = [scores[rule].log_p / np.where(per_token, n_answer, 1) for rule in rules]
    share = [scores[rule].right / n_answer for rule in rules]
    right = [np.where(per_token, x, x == 1) for x in share]
    return Evidence(
        rules, {LOG_P: np.array(log_p), RIGHT: np.array(right)},
        tuple(Stratum(c.length, c.template, c.text) for c in cells), stratum,
        stretches_of(examples)[index], np.ones(len(index)), of,
        tokens=np.where(per_token, 1, n_answer),
    )  # fmt: skip


def plain_alone(examples: ExampleSet, scores: Scores) -> Evidence:
    """Plain softmax on all examples, by its scores of them."""
    return compare(examples, range(len(examples.examples)), {PLAIN: scores})


class Objective:
    """Examples with the scores of plain softmax, and which of them are protected.

    Args:
      plain: scores of plain softmax, an entry per example.
      trained_up_to: length in tokens up to which answers are protected too; None or 0 for none.
      allowed: nats a token that protected text and lengths may lose in the mean: HELD_TO of that
        on the examples of the fit.
    Attributes:
      constraints: the cells of each: plain text, and every trained cell of answers.
    """

    def __init__(
        self, examples: ExampleSet, plain: Scores, trained_up_to: int | None = None,
        allowed: float = ALLOWED_LOSS,
    ):  # fmt: skip
        self.examples, self.plain, self.held_to = examples, plain, HELD_TO * allowed
        self.cell = np.array([example.cell for example in examples.examples])
        self.n_answer = examples.n_answer(range(len(self.cell)))
        self.is_text = np.array([cell.text for cell in examples.cells])
        trained = [cell.length <= (trained_up_to or 0) for cell in examples.cells]
        text = np.flatnonzero(self.is_text).tolist()
        self.constraints = [text] if text else []
        self.constraints += [[i] for i in np.flatnonzero(~self.is_text & trained).tolist()]

    def bar(self, value: "Value") -> str:
        """The constraint that a value breaks most, in words with its option."""
        loss, cells = max(zip(value.losses, self.constraints, strict=True))
        length = self.examples.cells[cells[0]].length
        part = f"answers of {length:,} tokens (--trained-up-to)"
        part = "protected text (--text)" if self.is_text[cells[0]] else part
        return (
            f"a rule that gains {value.gain:+.3f} nats costs {part} {loss.mean:.4f} nats a token, "
            f"and {self.held_to / HELD_TO:g} is allowed (--allowed-loss)"
        )

    def evidence(self, which: Sequence[int], scores: Mapping[str, Scores]) -> Evidence:
        """Some examples under plain softmax and under rules, by their scores of them."""
        plain = Scores(*(column[np.asarray(which)] for column in self.plain))
        return compare(self.examples, which, {PLAIN: plain, **scores})

    def losses(self, evidence: Evidence, which: Sequence[int], rule: str) -> list[Estimate]:
        """Nats a token that a rule loses of each constraint; 0 where it has none of `which`."""
        index = np.asarray(which)
        cell = self.cell[index]
        found = []
        for cells in self.constraints:
            held = np.isin(cell, cells)
            gain = evidence.where(held).gain_a_token(rule) if held.any() else _NO_GAIN
            found.append(gain._replace(mean=0.0 - gain.mean))
        return found

    def value(self, which: Sequence[int], scores: Scores) -> "Value":
        """What a rule is worth on some examples."""
        evidence = self.evidence(which, {OWN: scores})
        losses = self.losses(evidence, which, OWN)
        answers = evidence.answers
        return Value(answers, float(answers.gain(OWN, LOG_P).mean), losses, self.held_to)


@dataclass(frozen=True, eq=False)
class Value:
    """What a rule, OWN, is worth on some examples."""

    answers: Evidence
    gain: float  # nats of the answers
    losses: list[Estimate]  # of each constraint: nats a token
    held_to: float

    @property
    def is_allowed(self) -> bool:
        """Whether no protected text or length loses more than it may."""
        return all(loss.mean <= self.held_to for loss in self.losses)

    def over(self, other: "Value | None" = None) -> Estimate:
        """Mean gain over another rule on the same examples; None is plain softmax."""
        if other is None:
            return self.answers.gain(OWN, LOG_P)
        its = {measure: x[-1] for measure, x in other.answers.values.items()}
        return self.answers.with_rule(_OTHER, its).gain(OWN, LOG_P, _OTHER)


class Multipliers:
    """How much each constraint weighs now."""

    def __init__(self, objective: Objective):
        self._objective = objective
        self._each = np.full(len(objective.constraints), _FIRST / max(objective.held_to, 1e-6))

    def weights(self, which: Sequence[int], n_answers: float) -> np.ndarray:
        """d objective / d log p of the examples of a step, (examples,), of so many answers."""
        objective, index = self._objective, np.asarray(which)
        cell = objective.cell[index]
        weights: np.ndarray = ~objective.is_text[cell] / n_answers
        for multiplier, cells in zip(self._each, objective.constraints, strict=True):
            held = np.isin(cell, cells)
            weights += multiplier * held / objective.n_answer[index] / max(1, held.sum())
        return weights

    def adapt(self, value: Value) -> None:
        """Raises those of constraints that are broken, and lowers those that are far from it."""
        losses = np.array([loss.mean for loss in value.losses])
        self._each = np.where(losses > value.held_to, _RISE * self._each, self._each)
        self._each = np.where(losses < value.held_to / 2, _FALL * self._each, self._each)
