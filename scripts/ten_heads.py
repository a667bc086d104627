"""Comparison of many heads, each calibrated anew: paired t-tests and bootstrap over heads.

Used by scripts/reproduce_table1, scripts/choose_rule and scripts/figures.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from calibrate.rows.baselines import (
    PLAIN,
    ScoredRule,
    fitted_rules,
    fixed_rules,
    in_order,
    label,
)
from calibrate.rows.comparison import (
    N_RESAMPLES,
    Comparison,
    gains_over_plain,
    headroom_share,
    paired_p,
)

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients
from calibrate.files.npz import read_arrays, write_arrays
from calibrate.rows.collect import collect
from calibrate.rows.fit_collection import resolve_options
from calibrate.rows.heads import Head
from calibrate.rows.model_selection import choose
from calibrate.rows.score_head import Score, score_head, standard_error
from calibrate.rows.solved_rows import solve_collection

MIN_HEADS = 5  # with fewer, resampling does not show the spread between heads
ARRAYS = (
    "accuracy", "error", "gain", "gain_error", "p_plain", "p_paper", "p_own",
    "headroom", "headroom_low", "headroom_high", "per_head",
)  # fmt: skip


@dataclass(frozen=True)
class HeadsComparison(Comparison):
    """A comparison whose accuracies, gains, tests and intervals are over heads."""

    heads: list[str]
    per_head: np.ndarray  # (rules, heads, sizes) accuracy
    # `hindsight_beta` is (heads, sizes).


@dataclass(frozen=True)
class Calibration:
    """The sets that the fits of a study are made of, the same for every head."""

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
      calibration: the sets that the fits are made of; their seed is that of the scored sets too,
        which come from another stream.
      folder: of collections and scores.
      done: called with a line after each head's collection, and after its scores.
    Warns:
      UserWarning: a head for which no rule is worth publishing; its own fit is plain softmax.
    """
    scores = []
    for head in heads:
        rules = calibrate_head(head, calibration, folder / "collections")
        done(f"{head.name}: collected and fitted")
        scores.append(cached_scores(head, sizes, sets, calibration.seed, rules, folder / "scores"))
        done(f"{head.name}: scored")
    return compare_heads([head.name for head in heads], scores)


def calibrate_head(head: Head, calibration: Calibration, folder: Path) -> dict[str, ScoredRule]:
    """Every rule that a head is scored under, its own fits among them."""
    place = folder / f"{head_key(head)}-{calibration.key()}"
    collection = collect(head, calibration.sizes, calibration.sets, calibration.seed, place)
    try:
        rows = solve_collection(collection)
        choice = choose(rows, resolve_options(collection))
        fitted = fitted_rules(rows, choice)
        fitted |= {f"own fit, q = {c.q:g}": c.fit for c in choice.trade}
    except QualityError as failure:
        fitted = {"own": PLAIN}  # `calibrate fit` publishes nothing
        warnings.warn(f"{head.name} has no fit of its own: {failure}", stacklevel=3)
    return in_order({**fixed_rules(), **fitted})


def head_key(head: Head) -> str:
    """The name of a head's cache files; two heads of one name have different ones."""
    return f"{Path(head.name).name}-{hashlib.sha256(head.fingerprint.encode()).hexdigest()[:12]}"


def cached_scores(
    head: Head,
    sizes: Sequence[int],
    sets: int | None,
    seed: int,
    rules: Mapping[str, ScoredRule],
    folder: Path,
) -> list[Score]:
    """`score_head`, cached in an npz file per size."""
    scores = []
    for size in sorted(set(sizes)):
        betas = {name: _rule_key(rule) for name, rule in sorted(rules.items())}
        text = repr((head.fingerprint, size, sets, seed, betas))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = folder / f"{head_key(head)}-n{size}-{digest}.npz"
        if not path.exists():
            (score,) = score_head(head, [size], sets, seed, rules)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, {
                **score.correct, "chosen_on/beta": [score.chosen_on, score.hindsight_beta]
            })  # fmt: skip
        correct = read_arrays(path)
        chosen_on, beta = correct.pop("chosen_on/beta")
        scores.append(
            Score(size, {rule: correct[rule] for rule in rules}, int(chosen_on), float(beta))
        )
    return scores


def _rule_key(rule: ScoredRule) -> str:
    """The numbers that determine a rule's beta."""
    return repr((rule.rule, rule.entries) if isinstance(rule, Coefficients) else rule)


def compare_heads(heads: Sequence[str], scores: Sequence[Sequence[Score]]) -> HeadsComparison:
    """Scores of several heads at the same sizes, side by side.

    Args:
      heads: names, at least two, each once.
      scores: per head, one Score per size. Rules that some head lacks are left out.
    Raises:
      ValueError: fewer than two heads, or one of them twice.
    """
    if len(set(heads)) < max(2, len(heads)):
        raise ValueError(f"heads are {list(heads)}; give at least two, each once")
    first = scores[0]
    rules = [r for r in first[0].correct if all(r in of_head[0].correct for of_head in scores)]
    columns = list(zip(*scores, strict=True))  # per size, the scores of all heads

    def each(measure: Callable[[Sequence[Score], str], object]) -> np.ndarray:
        return np.array([[measure(column, rule) for column in columns] for rule in rules], float)

    per_head = np.array(
        [[[s.accuracy(rule) for s in of_head] for of_head in scores] for rule in rules]
    )
    gain = each(lambda column, rule: np.mean(_gains(column, rule, "plain")))
    headroom = each(_headroom)
    return HeadsComparison(
        head=f"{len(heads)} heads",
        heads=list(heads),
        sizes=[score.size for score in first],
        sets=[score.sets for score in first],
        chosen_on=[score.chosen_on for score in first],
        rules=rules,
        per_head=per_head,
        accuracy=per_head.mean(axis=1),
        error=np.apply_along_axis(standard_error, 1, per_head),
        p_plain=each(lambda column, rule: _p_against(column, rule, "plain")),
        p_paper=each(lambda column, rule: _p_against(column, rule, "paper")),
        p_own=each(lambda column, rule: _p_against(column, rule, "own")),
        gain=gain,
        gain_error=each(lambda column, rule: standard_error(_gains(column, rule, "plain"))),
        headroom=headroom[..., 0],
        headroom_low=headroom[..., 1],
        headroom_high=headroom[..., 2],
        hindsight_beta=np.array([[s.hindsight_beta for s in of_head] for of_head in scores]),
    )


def _accuracies(column: Sequence[Score], rule: str, other: str) -> np.ndarray:
    """(heads,) accuracy of a rule on the sets that it shares with another."""
    return np.array([score.outcomes(rule, other).mean() for score in column])


def _gains(column: Sequence[Score], rule: str, other: str) -> np.ndarray:
    return _accuracies(column, rule, other) - _accuracies(column, other, rule)


def _p_against(column: Sequence[Score], rule: str, other: str) -> float:
    if other == rule or other not in column[0].correct:
        return np.nan
    return paired_p(_accuracies(column, rule, other), _accuracies(column, other, rule))


def _headroom(column: Sequence[Score], rule: str) -> tuple[float, float, float]:
    """(share of hindsight's gain, its 95 % interval over heads), NaN where there is none."""
    if rule == "plain" or not {"plain", "hindsight"} <= column[0].correct.keys():
        return (np.nan,) * 3
    means = np.array([gains_over_plain(score, rule).mean(axis=0) for score in column])
    drawn = np.random.default_rng(0).integers(0, len(means), (N_RESAMPLES, len(means)))
    share, low, high = headroom_share(means.sum(axis=0), means[drawn].sum(axis=1))
    return (share, low, high) if len(column) >= MIN_HEADS else (share, np.nan, np.nan)


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
        head=f"{len(record['heads'])} heads",
        heads=record["heads"],
        sizes=record["sizes"],
        sets=record["sets"],
        chosen_on=record["hindsight_chosen_on"],
        rules=[rule["rule"] for rule in record["rules"]],
        hindsight_beta=np.array(record["hindsight_beta"], float),
        **{name: np.array([rule[name] for rule in record["rules"]], float) for name in ARRAYS},
    )
