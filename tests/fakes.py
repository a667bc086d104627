"""A model that is known: log p of its answers is quadratic in the beta of its heads."""

from dataclasses import dataclass, field

import numpy as np

from calibrate.prompts.examples import Cell, Example, ExampleSet, Scores

LOG_P = -3.0  # nats, of every answer under the baseline


def even_examples(lengths, texts=(), count=8):
    """So many examples of each length in tokens, answers of two tokens, and windows of text."""
    cells = [Cell("a", n, False) for n in lengths] + [Cell("text", n, True) for n in texts]
    made = [
        Example(np.zeros(cell.length, np.int32), 1 if cell.text else cell.length - 2, i)
        for i, cell in enumerate(cells)
        for _ in range(count)
    ]
    return ExampleSet(tuple(cells), tuple(made))


def scores_of(log_p, kl=0.0):
    """Scores of answers, none of which is right; `kl` is summed over the tokens of text."""
    log_p = np.asarray(log_p, float)
    plain = Scores.baseline(log_p, np.zeros(len(log_p), np.int32))
    return plain._replace(kl=plain.kl + kl)


@dataclass
class QuadraticScorer:
    """A `ModelScorer` whose answers gain slope a - curvature a^2 / 2, with a = beta - 1, by head.

    Beta is that at the length of an example, where the entropy is half of log n. In text every head
    costs fisher |a|^power / 2 a token.

    Attributes:
      slope: (heads,) nats.
      noise: nats of each head's a that alternate in sign from example to example.
      scored: the (indices, number of rules) of every call of `score`.
      differentiated: the indices of every call of `gradient`.
    """

    examples: ExampleSet
    slope: np.ndarray
    curvature: float = 1.0
    fisher: float = 0.0
    power: float = 2.0
    noise: float = 0.0
    scored: list = field(default_factory=list)
    differentiated: list = field(default_factory=list)

    def __post_init__(self):
        self.heads = [(i // 4, i % 4) for i in range(len(self.slope))]

    def baseline(self):
        """The scores of all examples under plain softmax."""
        return scores_of(np.full(len(self.examples.examples), LOG_P))

    def score(self, rules, indices):
        assert all(rule is not None for rule in rules)  # the baseline's scores are known
        self.scored.append((list(indices), len(rules)))
        return [self._scores(self._steps(rule, indices), indices) for rule in rules]

    def gradient(self, parameters, indices, weights):
        self.differentiated.append(list(indices))
        a = self._steps(parameters.rules(self.heads), indices)
        slopes = self.slope - self.curvature * a + self._noise(len(a))[:, None]
        return np.einsum(
            "rceh,eh->rc", self._jacobian(parameters, indices), weights[:, None] * slopes
        )

    def fisher_scores(self, parameters, indices):
        """One for each window and head: their squares add up to the curvature of the mean KL."""
        jacobian = self._jacobian(parameters, indices)
        scores = (
            jacobian.reshape(*parameters.numbers.shape, -1) * (self.fisher / len(indices)) ** 0.5
        )
        return np.moveaxis(scores, -1, 0)

    def _steps(self, rule, indices):
        """(examples, heads) beta - 1; `rule` is None for plain softmax."""
        log_n = np.log([len(self.examples.examples[i].tokens) for i in indices])
        a = np.zeros((len(log_n), len(self.heads)))
        for column, head in zip(a.T, self.heads, strict=True):
            if rule and (entry := rule.entry_of(*head)):
                column += entry.beta_at(log_n / 2, log_n, rule.rule) - 1
        return a

    def _jacobian(self, parameters, indices, h=2.0**-10):
        """(rows, columns, examples, heads) derivatives of beta, by central differences."""
        numbers = parameters.numbers
        jacobian = np.zeros((*numbers.shape, len(indices), len(self.heads)))
        for place in np.ndindex(numbers.shape):
            step = np.zeros_like(numbers)
            step[place] = h
            up, down = (
                self._steps(parameters._replace(numbers=x).rules(self.heads), indices)
                for x in (numbers + step, numbers - step)
            )
            jacobian[place] = (up - down) / (2 * h)
        return jacobian

    def _noise(self, n):
        return np.resize([-self.noise, self.noise], n)

    def _scores(self, a, indices):
        cells = [self.examples.cells[self.examples.examples[i].cell] for i in indices]
        is_text = np.array([cell.text for cell in cells])
        gain = a @ self.slope - self.curvature * (a**2).sum(1) / 2 + self._noise(len(a)) * a.sum(1)
        kl = self.fisher * (abs(a) ** self.power).sum(1) / 2 * self.examples.n_answer(indices)
        return scores_of(LOG_P + np.where(is_text, 0, gain), np.where(is_text, kl, 0))
