"""Comparison of many heads, each calibrated anew: paired t-tests and bootstrap over heads.

Used by table1.py.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.baselines import fixed_rules, one_constant
from calibrate.evidence.estimate import Strata
from calibrate.evidence.evidence import OWN, PLAIN
from calibrate.evidence.metrics import RIGHT
from calibrate.fitting.fit_collection import validation_scorer
from calibrate.fitting.fitted_baselines import fitted_baselines
from calibrate.fitting.options import resolve_options
from calibrate.fitting.select import fit_and_select
from calibrate.parallel import ONE_PROCESS
from calibrate.report import labels
from calibrate.report.labels import in_order
from calibrate.rows.collect import collect
from calibrate.rows.heads import Head
from calibrate.rows.score_head import score_head
from calibrate.solver.solved_rows import solve_collection
from calibrate.storage.npz import read_arrays, write_arrays
from calibrate.store.coefficients import Coefficients, identity

MIN_HEADS = 5  # with fewer, resampling does not show the spread between heads
N_RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)  # per cent
HINDSIGHT = "hindsight"  # the best of these constants at each set size; nobody can deploy it
HINDSIGHT_BETAS = np.geomspace(1, 1000, 40)
MAX_CHOOSING_SETS = 4_096
ARRAYS = (
    "accuracy", "error", "gain", "gain_error", "p_plain", "p_paper", "p_own",
    "headroom", "headroom_low", "headroom_high", "per_head",
)  # fmt: skip

Rules = dict[str, Coefficients]
Table = dict[str, np.ndarray]  # rule -> (heads, sizes)


@dataclass(frozen=True)
class Answers:
    """Right answers of one head at one set size, of every rule on the same sets.

    The first half of the sets, at most 4,096, choose the constant of hindsight, which is scored on
    the others alone. Its accuracy is that of the baseline on all sets, and its gain on those.
    """

    size: int
    right: dict[str, np.ndarray]  # rule -> bool (sets,)
    chosen_on: int = 0  # so many first sets chose the constant of hindsight
    hindsight_beta: float = np.nan

    @property
    def sets(self) -> int:
        return len(next(iter(self.right.values())))

    def shares(self, first: int = 0) -> dict[str, float]:
        """The share of right answers of each rule, of the sets from `first` on."""
        return {rule: float(right[first:].mean()) for rule, right in self.right.items()}


@dataclass(frozen=True)
class HeadsComparison:
    """Every rule at every set size, over heads: (rules, sizes); what is not defined is NaN."""

    heads: list[str]
    sizes: list[int]
    sets: list[int]  # of each size
    chosen_on: list[int]  # so many first sets of each size chose the constant of hindsight
    rules: list[str]
    accuracy: np.ndarray
    error: np.ndarray  # its standard error
    p_plain: np.ndarray  # two-sided paired t-test against the baseline
    p_paper: np.ndarray  # against the paper's published polynomial
    p_own: np.ndarray  # and against the fitted rule of each head
    gain: np.ndarray  # accuracy less that of the baseline on the same sets
    gain_error: np.ndarray  # its standard error
    headroom: np.ndarray  # gain as a share of hindsight's
    headroom_low: np.ndarray  # 95 % bootstrap interval
    headroom_high: np.ndarray
    hindsight_beta: np.ndarray  # (heads, sizes)
    per_head: np.ndarray  # (rules, heads, sizes) accuracy


@dataclass(frozen=True)
class Calibration:
    """The sets that the rules of a study are fitted to, the same for every head."""

    sizes: Sequence[int]
    sets: int
    seed: int = 0

    def key(self) -> str:
        text = f"{sorted(set(self.sizes))}|{self.sets}|{self.seed}|all"
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def study(
    heads: Sequence[Head],
    sizes: Sequence[int],
    sets: int | None,
    calibration: Calibration,
    folder: Path,
    done: Callable[[str], None] = lambda line: None,
) -> HeadsComparison:
    """Collects from each head, fits every kind of rule, and scores all of them on other sets.

    Collections and scores that are in the folder already are not made again.

    Args:
      heads: any number; paired tests are over them.
      sizes: set sizes to score.
      sets: of each size; None is `held_out_sets`.
      calibration: the sets that rules are fitted to; their seed is that of the scored sets too,
        which come from another stream.
      folder: of collections and scores.
      done: called with a line after each head's collection, and after its scores.
    Warns:
      UserWarning: a head without a significant gain; its fitted rule is the baseline.
    """
    scores = []
    for head in heads:
        rules = calibrate_head(head, calibration, folder / "collections")
        done(f"{head.name}: collected and fitted")
        scores.append(cached_answers(head, sizes, sets, calibration.seed, rules, folder / "scores"))
        done(f"{head.name}: scored")
    return compare_heads([head.name for head in heads], scores)


def calibrate_head(head: Head, calibration: Calibration, folder: Path) -> Rules:
    """Every rule that a head is scored under, its fitted ones among them; hindsight is none."""
    place = folder / f"{head_key(head)}-{calibration.key()}"
    collection = collect(head, calibration.sizes, calibration.sets, calibration.seed, place)
    rules: Rules = dict(fixed_rules())
    try:
        rows = solve_collection(collection)
        accuracy = validation_scorer(head, collection, ONE_PROCESS)
        selection = fit_and_select(rows, resolve_options(collection), accuracy)
        rules |= fitted_baselines(rows, selection)
        rules |= {f"fitted rule, q = {c.q:g}": c.coefficients for c in selection.by_q}
    except QualityError as failure:
        rules["own"] = identity()  # `calibrate fit` publishes nothing
        warnings.warn(f"{head.name} has no fit of its own: {failure}", stacklevel=3)
    return in_order(rules)


def label(rule: str) -> str:
    """The name of a rule in tables and figures."""
    return "best constant in hindsight" if rule == HINDSIGHT else labels.label(rule)


def head_key(head: Head) -> str:
    """The name of a head's cache files; two heads of one name have different ones."""
    return f"{Path(head.name).name}-{hashlib.sha256(head.fingerprint.encode()).hexdigest()[:12]}"


def cached_answers(
    head: Head, sizes: Sequence[int], sets: int | None, seed: int, rules: Rules, folder: Path
) -> list[Answers]:
    """`right_answers` of each size, cached in an npz file."""
    found = []
    for size in sorted(set(sizes)):
        betas = {name: repr((rule.rule, rule.entries)) for name, rule in sorted(rules.items())}
        text = repr((head.fingerprint, size, sets, seed, betas))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = folder / f"{head_key(head)}-n{size}-{digest}.npz"
        if not path.exists():
            answers = right_answers(head, size, sets, seed, rules)
            path.parent.mkdir(parents=True, exist_ok=True)
            chosen = [answers.chosen_on, answers.hindsight_beta]
            write_arrays(path, {**answers.right, "chosen_on/beta": chosen})
        arrays = read_arrays(path)
        chosen_on, beta = arrays["chosen_on/beta"]
        right = {rule: arrays[rule] for rule in (*rules, HINDSIGHT)}
        found.append(Answers(size, right, int(chosen_on), float(beta)))
    return found


def right_answers(head: Head, size: int, sets: int | None, seed: int, rules: Rules) -> Answers:
    """Scores the rules, and every constant of hindsight, on the same sets."""
    constants = {f"beta {beta!r}": one_constant(beta) for beta in HINDSIGHT_BETAS.tolist()}
    evidence = score_head(head, [size], sets, seed, {**rules, **constants})
    trials = np.array([evidence.scores(name, RIGHT) for name in constants], bool)
    chosen_on = min(trials.shape[1] // 2, MAX_CHOOSING_SETS)
    best = int(trials[:, :chosen_on].sum(axis=1).argmax())
    right = {name: evidence.scores(name, RIGHT).astype(bool) for name in rules}
    right[HINDSIGHT] = trials[best]
    return Answers(size, right, chosen_on, float(HINDSIGHT_BETAS[best]))


@dataclass(frozen=True)
class Shares:
    """Shares of right answers of the rules that all heads have."""

    rules: list[str]
    every: Table  # of all sets
    unseen: Table  # of those that did not choose the constant of hindsight

    @classmethod
    def of(cls, scores: Sequence[Sequence[Answers]]) -> "Shares":
        """The shares of the answers of each head at each size."""
        rules = [r for r in scores[0][0].right if all(r in of_head[0].right for of_head in scores)]

        def table(shares: Callable[[Answers], dict[str, float]]) -> Table:
            found = [[shares(answers) for answers in of_head] for of_head in scores]
            return {rule: np.array([[x[rule] for x in row] for row in found]) for rule in rules}

        unseen = table(lambda answers: answers.shares(answers.chosen_on))
        return cls(rules, table(Answers.shares), unseen)

    def differences(self, over: str) -> np.ndarray:
        """(rules, heads, sizes) of each rule over one, on the sets that both have.

        NaN of a rule over itself, and where heads lack the one.
        """
        differences = np.full((len(self.rules), *self.every[PLAIN].shape), np.nan)
        for i, rule in enumerate(self.rules):
            if rule != over and over in self.rules:
                shared = self.unseen if HINDSIGHT in (rule, over) else self.every
                differences[i] = shared[rule] - shared[over]
        return differences


def compare_heads(heads: Sequence[str], scores: Sequence[Sequence[Answers]]) -> HeadsComparison:
    """Scores of several heads at the same sizes, side by side.

    Args:
      heads: names, at least two.
      scores: per head, the answers at each size. Rules that some head lacks are left out.
    """
    first, shares, strata = scores[0], Shares.of(scores), _over_heads(len(heads))
    baseline = shares.every[PLAIN]
    gain = shares.differences(PLAIN)
    gain[shares.rules.index(PLAIN)] = 0
    accuracy = baseline + gain
    (mean, error), (mean_gain, gain_error) = (
        strata.mean_and_error(x.swapaxes(1, 2)) for x in (accuracy, gain)
    )
    p = {
        other: strata.estimate(shares.differences(other).swapaxes(1, 2)).p
        for other in (PLAIN, "paper", OWN)
    }
    headroom = np.array([_headroom(rule, shares.unseen) for rule in shares.rules])
    return HeadsComparison(
        heads=list(heads),
        sizes=[answers.size for answers in first],
        sets=[answers.sets for answers in first],
        chosen_on=[answers.chosen_on for answers in first],
        rules=shares.rules,
        per_head=accuracy,
        accuracy=mean,
        error=error,
        p_plain=p[PLAIN],
        p_paper=p["paper"],
        p_own=p[OWN],
        gain=mean_gain,
        gain_error=gain_error,
        headroom=headroom[:, 0],
        headroom_low=headroom[:, 1],
        headroom_high=headroom[:, 2],
        hindsight_beta=np.array([[s.hindsight_beta for s in of_head] for of_head in scores]),
    )


def _over_heads(n: int) -> Strata:
    """The design of means over heads, which are independent and count alike."""
    return Strata(np.zeros(n, int), np.arange(n), np.ones(n))


def _headroom(rule: str, unseen: Table) -> np.ndarray:
    """(3, sizes) share of hindsight's gain, and its 95 % interval over heads; NaN where none."""
    n_heads, n_sizes = unseen[PLAIN].shape
    found = np.full((3, n_sizes), np.nan)
    if rule == PLAIN or HINDSIGHT not in unseen:
        return found
    pair = np.array([unseen[name] - unseen[PLAIN] for name in (rule, HINDSIGHT)])
    drawn = np.random.default_rng(0).integers(0, n_heads, (N_RESAMPLES, n_heads))
    gain, best = pair[:, drawn].sum(axis=2)  # (resamples, sizes)
    possible = np.percentile(best, INTERVAL[0], axis=0) > 0
    shares = gain / np.where(best > 0, best, np.nan)
    found[0] = np.divide(*pair.sum(axis=1), where=possible, out=found[0])
    if n_heads >= MIN_HEADS:
        found[1:, possible] = np.nanpercentile(shares[:, possible], INTERVAL, axis=0)
    return found


def record_of(comparison: HeadsComparison) -> dict[str, Any]:
    """All of a comparison for JSON; shares, not per cent; null where nothing is defined."""

    def rounded(values: np.ndarray) -> Any:
        return [
            rounded(row) if row.ndim else float(f"{row:.6g}") if np.isfinite(row) else None
            for row in np.asarray(values)
        ]

    return {
        "heads": comparison.heads,
        "sizes": comparison.sizes,
        "sets": comparison.sets,
        "hindsight_chosen_on": comparison.chosen_on,
        "hindsight_beta": rounded(comparison.hindsight_beta),
        "rules": [
            {
                "rule": rule,
                "label": label(rule),
                **{name: rounded(getattr(comparison, name)[i]) for name in ARRAYS},
            }
            for i, rule in enumerate(comparison.rules)
        ],
    }


def comparison_of(record: dict[str, Any]) -> HeadsComparison:
    """The comparison that a record was made of."""
    return HeadsComparison(
        heads=record["heads"],
        sizes=record["sizes"],
        sets=record["sets"],
        chosen_on=record["hindsight_chosen_on"],
        rules=[rule["rule"] for rule in record["rules"]],
        hindsight_beta=np.array(record["hindsight_beta"], float),
        **{name: np.array([rule[name] for rule in record["rules"]], float) for name in ARRAYS},
    )
