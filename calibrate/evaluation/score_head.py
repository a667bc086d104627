"""Evaluate: how often a head is right under several softmax rules, on sets that no fit has seen."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from calibrate.collecting.work_units import attended_pieces, one_ahead, plan_units
from calibrate.errors import CalibrateError
from calibrate.evaluation.baselines import Hindsight, LogSize, ScoredRule
from calibrate.files.coefficients import Coefficients
from calibrate.files.score_files import Outcome, add_scores, read_scores, scores_path
from calibrate.heads import Head, sent
from calibrate.heads.protocol import call
from calibrate.maths.rule import N_COEFFICIENTS, Rule, beta_of
from calibrate.maths.shannon_entropy import centre, log_size
from calibrate.parallel.jobs import HERE, Jobs, run

STREAM = "evaluate"
# Sets of each size unless told otherwise: (up to this size, so many), and beyond.
HELD_OUT_SETS = ((256, 32_768), (4_096, 4_096))
HELD_OUT_SETS_BEYOND = 1_024
MOST_CHOOSING_SETS = 4_096


class Score(NamedTuple):
    """Accuracy at one set size, of every rule on the same sets."""

    size: int
    correct: dict[str, np.ndarray]  # rule -> bool (sets,)
    chosen_on: int = 0  # so many first sets chose the constant of "hindsight"
    hindsight_beta: float = np.nan

    @property
    def sets(self) -> int:
        return len(next(iter(self.correct.values())))

    def scored(self, rule: str, like: str | None = None) -> np.ndarray:
        """(sets,) 1 where a rule is right, of the sets that it, or one `like` it, may count."""
        first = self.chosen_on if "hindsight" in (rule, like) else 0
        return self.correct[rule][first:].astype(float)

    def accuracy(self, rule: str) -> float:
        """Share of the sets that the head gets right.

        What was chosen in hindsight has the accuracy of plain softmax on all sets, and what it
        gains over it on the sets that did not choose.
        """
        if rule == "hindsight" and "plain" in self.correct:
            return float(self.scored("plain").mean() + self.gain(rule, "plain")[0])
        return float(self.scored(rule).mean())

    def standard_error(self, rule: str) -> float:
        """Binomial standard error of the accuracy; NaN of a single set."""
        return standard_error(self.scored(rule))

    def gain(self, rule: str, over: str) -> tuple[float, float]:
        """(difference of accuracy, its standard error), paired set by set."""
        difference = self.scored(rule, like=over) - self.scored(over, like=rule)
        return float(difference.mean()), standard_error(difference)


def standard_error(samples: np.ndarray) -> float:
    """Of the mean of samples; NaN of a single one."""
    return float(samples.std(ddof=1) / np.sqrt(len(samples))) if len(samples) > 1 else np.nan


def held_out_sets(size: int) -> int:
    """How many sets of a size are scored by default."""
    return next((sets for most, sets in HELD_OUT_SETS if size <= most), HELD_OUT_SETS_BEYOND)


def evaluate(
    head: Head,
    sizes: Sequence[int],
    sets: int | None,
    seed: int,
    rules: Mapping[str, ScoredRule],
    report: Callable[[Score], None] = lambda score: None,
    folder: Path | None = None,
    jobs: Jobs = HERE,
) -> list[Score]:
    """Scores each rule on the same sets; the head runs once per set.

    Other processes load the head as in `collect`.

    Args:
      head: one whose attention can be scored (`correct`).
      sizes: set sizes n.
      sets: how many sets of each size, drawn from the stream "evaluate": no fit has seen them.
        None is `held_out_sets`.
      seed: of the data.
      rules: name -> fit, or another rule of `pipeline.rules`.
      report: called after each size.
      folder: where scores are kept, so that the same call does no work twice; None keeps none.
      jobs: where it is done, a set size at a time; the scores do not depend on it.
    Returns:
      One Score per size.
    Raises:
      CalibrateError: a head that breaks the protocol, or kept scores that are damaged.
      TypeError: a rule that is none.
    Warns:
      UserWarning: a fit that was made for another head.
    """
    for name, rule in rules.items():
        if not isinstance(rule, ScoredRule):
            raise TypeError(f"rule {name!r} is {rule!r}; give a fit, or one of pipeline.rules")
        if isinstance(rule, Hindsight) != (name == "hindsight"):
            raise TypeError(f"rule {name!r} is {rule!r}; Hindsight() is called 'hindsight'")
    _warn_of_other_heads(head, rules.values())
    there, place = sent(head), folder and folder.absolute()
    counts = {n: held_out_sets(n) if sets is None else sets for n in sorted(set(sizes))}
    tasks = [
        partial(_score, there, size, count, seed, rules, place) for size, count in counts.items()
    ]
    return run(tasks, jobs, report)


def _warn_of_other_heads(head: Head, rules: Iterable[ScoredRule]) -> None:
    for fit in rules:
        if isinstance(fit, Coefficients) and fit.fingerprint not in (None, head.fingerprint):
            warnings.warn(
                f"{fit.reference} was made for head {fit.source.get('head')!r} "
                f"({fit.fingerprint}), and is scored on {head.name!r} ({head.fingerprint})",
                stacklevel=3,
            )


def _score(
    sent_head: Callable[[], Head],
    size: int,
    sets: int,
    seed: int,
    rules: Mapping[str, ScoredRule],
    folder: Path | None,
) -> Score:
    """The score of one size; what the folder knows already is not computed again."""
    head = sent_head()
    path = folder and scores_path(folder / head_folder(head), size, sets, seed)
    known = read_scores(path, head.fingerprint, sets) if path else {}
    keys = {name: _key(rule, sets) for name, rule in rules.items()}
    missing = {keys[name]: rule for name, rule in rules.items() if keys[name] not in known}
    if missing:
        known |= _run_head(head, size, sets, seed, missing)
        if path:
            add_scores(path, head.fingerprint, sets, known)
    correct = {name: known[key].correct for name, key in keys.items()}
    if "hindsight" not in rules:
        return Score(size, correct)
    return Score(size, correct, _choosing_sets(sets), known[keys["hindsight"]].beta)


def head_folder(head: Head) -> str:
    """A name for what is kept of a head: two heads of one name stay apart."""
    digest = hashlib.sha256(head.fingerprint.encode()).hexdigest()
    return f"{Path(head.name).name}-{digest[:12]}"


def _key(rule: ScoredRule, sets: int) -> str:
    """What determines a rule's beta, in words."""
    if isinstance(rule, Coefficients):
        return repr((rule.rule, rule.entries))
    return f"{rule!r} on {_choosing_sets(sets)}" if isinstance(rule, Hindsight) else repr(rule)


def _choosing_sets(sets: int) -> int:
    return min(sets // 2, MOST_CHOOSING_SETS)


class _Rules(NamedTuple):
    """Rules at one set size, as the kernel takes them: fits first, then constants."""

    guards: tuple[Rule, ...]
    coefficients: np.ndarray  # (fits, 5), zeros ahead of fewer
    domains: np.ndarray  # (fits, 2)
    constants: np.ndarray  # (constants,) beta

    def plus(self, constants: ArrayLike) -> "_Rules":
        both = np.concatenate([self.constants, np.asarray(constants, np.float32)])
        return self._replace(constants=both)


def _run_head(
    head: Head, size: int, sets: int, seed: int, rules: Mapping[str, ScoredRule]
) -> dict[str, Outcome]:
    """Runs the head over all sets of one size, once, and scores every rule on each."""
    fits = {key: rule for key, rule in rules.items() if isinstance(rule, Coefficients)}
    sized = {key: rule for key, rule in rules.items() if isinstance(rule, LogSize)}
    hindsight = [key for key, rule in rules.items() if isinstance(rule, Hindsight)]
    search = _Search(sets) if hindsight else None
    kernel_rules = _as_arrays(list(fits.values()), [rule.beta(size) for rule in sized.values()])
    n_rules = len(fits) + len(sized)
    correct = np.empty((sets, n_rules), bool)
    for rows, attended in _held_out(head, size, sets, seed):
        right = _correct(head, attended, kernel_rules.plus(search.betas() if search else []))
        correct[rows] = right[:, :n_rules]
        if search:
            search.record(rows, right[:, n_rules:])
    outcomes = {key: Outcome(correct[:, i]) for i, key in enumerate((*fits, *sized))}
    return outcomes | {key: search.outcome() for key in hindsight if search}


def _as_arrays(fits: list[Coefficients], constants: list[float]) -> _Rules:
    entries = [fit.only for fit in fits]
    powers = np.zeros((len(fits), max(N_COEFFICIENTS.values())), np.float32)
    for row, entry in zip(powers, entries, strict=True):
        row[-len(entry.coefficients) :] = entry.coefficients
    return _Rules(
        tuple(fit.rule for fit in fits),
        powers,
        np.array([entry.domain for entry in entries], np.float32).reshape(-1, 2),
        np.array(constants, np.float32),
    )


class _Search:
    """Chooses a constant on the first sets, and scores it on the others."""

    def __init__(self, sets: int):
        self.trials = Hindsight.trials()
        self.chosen: int | None = None
        self._choosing = _choosing_sets(sets)
        self._correct = np.empty((sets, len(self.trials)), bool)

    def betas(self) -> np.ndarray:
        """What to score on the next sets: every value, and once it is chosen the best."""
        return self.trials if self.chosen is None else self.trials[[self.chosen]]

    def record(self, rows: slice, right: np.ndarray) -> None:
        if self.chosen is not None:
            self._correct[rows, self.chosen] = right[:, 0]
            return
        self._correct[rows] = right
        if rows.stop >= self._choosing:
            self.chosen = int(self._correct[: self._choosing].sum(axis=0).argmax())

    def outcome(self) -> Outcome:
        assert self.chosen is not None
        return Outcome(self._correct[:, self.chosen].copy(), float(self.trials[self.chosen]))


def _held_out(head: Head, size: int, sets: int, seed: int) -> Iterator[tuple[slice, Any]]:
    """(which sets, what the head made of them), piece by piece."""
    for unit in plan_units(size, sets):
        for part, _, attended in one_ahead(attended_pieces(head, STREAM, seed, unit)):
            yield slice(unit.first + part.start, unit.first + part.stop), attended


def _correct(head: Head, attended: Any, rules: _Rules) -> np.ndarray:
    """bool (count, rules): whether the head is right under each rule."""
    weights = attention_weights(attended.logits, *rules[1:], guards=rules.guards)
    count, n_rules, _ = weights.shape
    if hasattr(head, "correct_each"):
        right = call(head, "correct_each", attended, weights)
        return _checked(head, right, (count, n_rules))
    columns = (call(head, "correct", attended, weights[:, i]) for i in range(n_rules))
    return np.stack([_checked(head, column, (count,)) for column in columns], axis=1)


def _checked(head: Head, right: Any, shape: tuple[int, ...]) -> np.ndarray:
    right = np.asarray(right)
    if right.shape != shape or right.dtype != bool:
        raise CalibrateError(
            f"head {head.name!r}: correct gave {right.dtype}{right.shape}, expected bool {shape}"
        )
    return right


@partial(jax.jit, static_argnames="guards")
def attention_weights(
    logits: jax.Array,
    coefficients: jax.Array,
    domains: jax.Array,
    constants: jax.Array,
    guards: tuple[Rule, ...],
) -> jax.Array:
    """Attention weights under several rules at once: what `adaptive_softmax` gives for each.

    The numbers of the rules are arguments, so that another head's fits are not another trace.

    Args:
      logits: (count, n), -inf where masked.
      coefficients: (fits, 5), highest power first; zeros ahead of the two of a log-size fit.
      domains: (fits, 2) in nats, or log n.
      constants: (constants,) beta of rules that do not look at the rows.
      guards: one per fit.
    Returns:
      (count, fits + constants, n).
    """
    row = centre(logits, -1)
    H, log_n = row.entropy[:, 0], log_size(logits, -1)[:, 0]
    betas = [
        beta_of(H, log_n, powers, domain, rule, jnp)
        for powers, domain, rule in zip(coefficients, domains, guards, strict=True)
    ]
    betas += [jnp.broadcast_to(constant, H.shape) for constant in constants]
    powers = jnp.exp(jnp.stack(betas, axis=1)[..., None] * row.shifted[:, None])
    return powers / jnp.sum(powers, axis=-1, keepdims=True)
