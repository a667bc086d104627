"""Scoring one head: how often it is right under several softmax rules, on sets no fit has seen."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.errors import CalibrateError
from calibrate.files.coefficients import Coefficients
from calibrate.maths.masking import NO_WEIGHT, as_masks
from calibrate.maths.row_batches import row_entropy
from calibrate.maths.rule import beta_of
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run
from calibrate.rows.baselines import HINDSIGHT_BETAS, Hindsight, LogSize, ScoredRule
from calibrate.rows.heads import Head, head_loader
from calibrate.rows.protocol import call
from calibrate.rows.work_units import attended_pieces, one_ahead, plan_units

STREAM = "evaluate"
# Default number of sets: (up to this size, so many), and beyond.
HELD_OUT_SETS = ((256, 32_768), (4_096, 4_096))
HELD_OUT_SETS_BEYOND = 1_024
MAX_CHOOSING_SETS = 4_096


@dataclass(frozen=True)
class Score:
    """Accuracy at one set size, of every rule on the same sets."""

    size: int
    correct: dict[str, np.ndarray]  # rule -> bool (sets,)
    chosen_on: int = 0  # the constant of "hindsight" was chosen on so many first sets
    hindsight_beta: float = np.nan

    @property
    def sets(self) -> int:
        return len(next(iter(self.correct.values())))

    def outcomes(self, rule: str, paired_with: str | None = None) -> np.ndarray:
        """(sets,) 1 where a rule is right, else 0.

        The sets that chose the constant of "hindsight" are left out of its outcomes, and of those
        of a rule that is paired with it.
        """
        first = self.chosen_on if "hindsight" in (rule, paired_with) else 0
        return self.correct[rule][first:].astype(float)

    def accuracy(self, rule: str) -> float:
        """Share of the sets that the head gets right.

        That of "hindsight" is the accuracy of plain softmax on all sets, plus its gain over plain
        softmax on the sets that did not choose its constant.
        """
        if rule == "hindsight" and "plain" in self.correct:
            return float(self.outcomes("plain").mean() + self.gain(rule, "plain")[0])
        return float(self.outcomes(rule).mean())

    def standard_error(self, rule: str) -> float:
        """Binomial standard error of the accuracy; NaN of a single set."""
        if rule == "hindsight" and "plain" in self.correct:
            # Plain softmax on sets that chose, and what it and its gain are on the others.
            share, plain = self.chosen_on / self.sets, self.outcomes("plain")
            others = self.outcomes(rule) - share * plain[self.chosen_on :]
            of_choosing = standard_error(plain[: self.chosen_on]) if self.chosen_on else 0.0
            return float(np.hypot(share * of_choosing, standard_error(others)))
        return standard_error(self.outcomes(rule))

    def gain(self, rule: str, over: str) -> tuple[float, float]:
        """(difference of accuracy, its standard error), paired set by set."""
        difference = self.outcomes(rule, over) - self.outcomes(over, rule)
        return float(difference.mean()), standard_error(difference)


def standard_error(samples: np.ndarray) -> float:
    """Standard error of the mean of samples; NaN of a single one."""
    return float(samples.std(ddof=1) / np.sqrt(len(samples))) if len(samples) > 1 else np.nan


def held_out_sets(size: int) -> int:
    """How many sets of a size are scored by default."""
    return next((sets for most, sets in HELD_OUT_SETS if size <= most), HELD_OUT_SETS_BEYOND)


def score_head(
    head: Head,
    sizes: Sequence[int],
    sets: int | None,
    seed: int,
    rules: Mapping[str, ScoredRule],
    *,
    report: Callable[[Score], None] = lambda score: None,
    jobs: Jobs = ONE_PROCESS,
) -> list[Score]:
    """Scores each rule on the same sets; the head runs once per set.

    Args:
      head: one whose attention can be scored (`correct`); processes load it as in `collect`.
      sizes: set sizes n.
      sets: how many sets of each size, drawn from the stream "evaluate", which no fit has seen.
        None is `held_out_sets`.
      seed: of the data.
      rules: name -> fit, or another rule of `calibrate.rows.baselines`.
      report: called after each size.
      jobs: where it runs, a set size at a time; the scores do not depend on it.
    Returns:
      One Score per size.
    Raises:
      CalibrateError: a head that breaks the protocol.
      TypeError: a rule of another type.
    Warns:
      UserWarning: a fit that was made for another head.
    """
    _check_rules(rules)
    _warn_of_other_heads(head, rules.values())
    load_head = head_loader(head)
    counts = {n: held_out_sets(n) if sets is None else sets for n in sorted(set(sizes))}
    tasks = [partial(_score_size, load_head, n, count, seed, rules) for n, count in counts.items()]
    return run(tasks, jobs, report)


def _check_rules(rules: Mapping[str, ScoredRule]) -> None:
    for name, rule in rules.items():
        if not isinstance(rule, ScoredRule):
            raise TypeError(
                f"rule {name!r} is {rule!r}; give a fit, or a rule of calibrate.rows.baselines"
            )
        if isinstance(rule, Hindsight) != (name == "hindsight"):
            raise TypeError(f"rule {name!r} is {rule!r}; Hindsight() must be named 'hindsight'")


def _warn_of_other_heads(head: Head, rules: Iterable[ScoredRule]) -> None:
    for fit in rules:
        if isinstance(fit, Coefficients) and fit.fingerprint not in (None, head.fingerprint):
            warnings.warn(
                f"{fit.reference} was made for head {fit.source.get('head')!r} "
                f"({fit.fingerprint}), and is scored on {head.name!r} ({head.fingerprint})",
                stacklevel=3,
            )


def _score_size(
    load_head: Callable[[], Head],
    size: int,
    sets: int,
    seed: int,
    rules: Mapping[str, ScoredRule],
) -> Score:
    """Runs the head over all sets of one size, once, and scores every rule on each."""
    head = load_head()
    fits = {name: rule for name, rule in rules.items() if isinstance(rule, Coefficients)}
    by_size = {name: rule.beta(size) for name, rule in rules.items() if isinstance(rule, LogSize)}
    at_size = RulesAtSize(list(fits.values()), list(by_size.values()))
    names = [*fits, *by_size]
    few = hasattr(head, "correct_each") and choosing_sets(sets) == sets // 2
    search = HindsightSearch(sets, few) if "hindsight" in rules else None
    correct = np.empty((sets, len(names)), bool)
    for rows, attended in _held_out(head, size, sets, seed):
        outcomes = _correct(head, attended, at_size.plus(search.betas() if search else []))
        correct[rows] = outcomes[:, : len(names)]
        if search:
            search.record(rows, outcomes[:, len(names) :])
    by_name = dict(zip(names, correct.T.copy(), strict=True))
    if search is None:
        return Score(size, {name: by_name[name] for name in rules})
    by_name["hindsight"], beta = search.result()
    return Score(size, {name: by_name[name] for name in rules}, choosing_sets(sets), beta)


def choosing_sets(sets: int) -> int:
    """How many of the first sets choose the constant of "hindsight"."""
    return min(sets // 2, MAX_CHOOSING_SETS)


class RulesAtSize(NamedTuple):
    """Rules at one set size: fits, and constants."""

    fits: Sequence[Coefficients]
    constants: Sequence[float] | np.ndarray  # beta

    def plus(self, constants: Sequence[float] | np.ndarray) -> "RulesAtSize":
        return self._replace(constants=[*self.constants, *constants])

    def weights(self, logits: ArrayLike) -> np.ndarray:
        """Attention weights under each rule: what `adaptive_softmax` gives for each.

        Args:
          logits: (count, n) float32; -9,000 and less means masked.
        Returns:
          (count, fits + constants, n) float32.
        """
        z = as_masks(np.asarray(logits, np.float32))
        H, log_n = row_entropy(z), np.log(np.maximum((z > -np.inf).sum(axis=1), 1))
        betas = np.empty((len(z), len(self.fits) + len(self.constants)), np.float32)
        for column, fit in zip(betas.T, self.fits, strict=False):
            of_fit = fit.only.coefficients, fit.only.domain, fit.rule
            column[:] = beta_of(H.astype(float), log_n, *of_fit, np)
        betas[:, len(self.fits) :] = self.constants
        # NumPy, which compiles nothing for each set size, works while JAX runs the next piece.
        with np.errstate(invalid="ignore", over="ignore"):  # rows of +inf; the largest beta
            shifted = np.maximum(z - z.max(axis=1, keepdims=True), NO_WEIGHT)
            powers: np.ndarray = betas[..., None] * shifted[:, None]
        np.exp(powers, out=powers)
        powers /= powers.sum(axis=-1, keepdims=True)
        return powers


class HindsightSearch:
    """Chooses the best constant on the first sets, and scores it on the others.

    Args:
      sets: how many there are.
      all_along: whether the others are scored under all constants too: for a few sets that takes
        less time than to compile for one constant.
    """

    def __init__(self, sets: int, all_along: bool = False):
        self.chosen: int | None = None
        self._all_along = all_along
        self._choosing = choosing_sets(sets)
        self._correct = np.empty((sets, len(HINDSIGHT_BETAS)), bool)

    def betas(self) -> np.ndarray:
        """The constants to score on the next sets: all, or the best once it is chosen."""
        if self.chosen is None or self._all_along:
            return HINDSIGHT_BETAS
        return HINDSIGHT_BETAS[[self.chosen]]

    def record(self, rows: slice, correct: np.ndarray) -> None:
        """Takes the outcomes of `betas()` on some sets, bool (sets, betas)."""
        if correct.shape[1] == 1:
            self._correct[rows, self.chosen] = correct[:, 0]
            return
        self._correct[rows] = correct
        if self.chosen is None and rows.stop >= self._choosing:
            self.chosen = int(self._correct[: self._choosing].sum(axis=0).argmax())

    def result(self) -> tuple[np.ndarray, float]:
        """(bool (sets,), outcomes of the best constant; the constant)."""
        assert self.chosen is not None
        return self._correct[:, self.chosen].copy(), float(HINDSIGHT_BETAS[self.chosen])


def _held_out(head: Head, size: int, sets: int, seed: int) -> Iterator[tuple[slice, Any]]:
    """(which sets, what the head's `attend` returned) piece by piece."""
    for unit in plan_units(size, sets):
        for part, _, attended in one_ahead(attended_pieces(head, STREAM, seed, unit)):
            yield slice(unit.first + part.start, unit.first + part.stop), attended


def _correct(head: Head, attended: Any, rules: RulesAtSize) -> np.ndarray:
    """bool (count, rules): whether the head is right under each rule."""
    weights = rules.weights(attended.logits)
    count, n_rules, _ = weights.shape
    if hasattr(head, "correct_each"):
        correct = call(head, "correct_each", attended, weights)
        return _check_correct(head, correct, (count, n_rules))
    columns = (call(head, "correct", attended, weights[:, i]) for i in range(n_rules))
    return np.stack([_check_correct(head, column, (count,)) for column in columns], axis=1)


def _check_correct(head: Head, correct: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    correct = np.asarray(correct)
    if correct.shape != shape or correct.dtype != bool:
        raise CalibrateError(
            f"head {head.name!r}: correct gave {correct.dtype}{correct.shape}, "
            f"expected bool {shape}"
        )
    return correct
