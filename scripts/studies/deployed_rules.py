"""Rules of the study of deployed heads, and their scores on held-out rows.

The rules are those of `calibrate.fit`, the paper's published polynomial, and Entropy-based
Temperature Scaling (ETS): T = softplus(a + b log(H / log n)), with a and b of maximum likelihood.

Reference: Balanya, Maronas and Ramos 2022, "Adaptive temperature scaling for robust calibration of
deep neural networks", arXiv 2208.00461.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from study import fit_even_if_refused

from calibrate.core.row_batches import row_entropy
from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, LOG_SIZE, POLYNOMIAL, RuleForm
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.evidence.baselines import PAPER, paper
from calibrate.evidence.calibration_error import (
    Reliability,
    expected_calibration_error,
    ranked_first,
    reliability,
)
from calibrate.evidence.evidence import BASELINE
from calibrate.fitting.fit_rule import can_have_slope, fit_rules
from calibrate.fitting.held_out import list_procedures
from calibrate.fitting.options import LEAST_SQUARES, FitOptions
from calibrate.parallel import ONE_PROCESS
from calibrate.rows.collect import collect_in_memory
from calibrate.rows.likelihood_profile import log_p
from calibrate.rows.logits_files import Arrays
from calibrate.rows.solve import SolvedInputs, solve_collection
from calibrate.store.entries import Entry

ETS = "ets"
RULES = {
    BASELINE: "softmax",
    CONSTANT: "constant",
    LOG_SIZE: "log-size",
    POLYNOMIAL: "default polynomial",
    ENTROPY_AND_SIZE: "entropy-and-size",
    ETS: "Entropy-based Temperature Scaling",
    LEAST_SQUARES: "the paper's procedure (`--paper`)",
    PAPER: "the paper's published polynomial",
}
MIN_SHARE = 1e-6  # of H / log n, whose logarithm ETS takes
FIRST_SLOPES = (0.0, 0.3, -0.3)  # b of the starts of ETS, in times of |a| or 1
RESAMPLES, SEED = 2_000, 0
MAX_CELLS = 1 << 24  # logits in memory at once, padded


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of a head: the content of its rows.npz, or some of them.

    Attributes:
      logits, right: flat, row after row; True at the right items.
      lengths, n, group, cluster, split: (rows,), see `deployed_heads.py`.
      about: names of clusters, counts of rows left out, versions.
    """

    logits: np.ndarray
    right: np.ndarray
    lengths: np.ndarray
    n: np.ndarray
    group: np.ndarray
    cluster: np.ndarray
    split: np.ndarray
    about: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "HeadRows":
        """Reads rows.npz; without `right`, the target alone is right."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in ("logits", "lengths", "n")}
            arrays |= {name: file[name].astype(int) for name in ("group", "cluster", "split")}
            about = json.loads(str(file["names"]))
            if "right" in file.files:
                right = file["right"]
            else:
                right = np.zeros(len(arrays["logits"]), bool)
                right[np.cumsum(arrays["lengths"]) - arrays["lengths"] + file["target"]] = True
        return cls(**arrays, right=right, about=about)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, chosen: np.ndarray) -> "HeadRows":
        """The rows where `chosen`, (rows,) bool, is True."""
        items = np.repeat(chosen, self.lengths)
        columns = {
            name: getattr(self, name)[chosen]
            for name in ("lengths", "n", "group", "cluster", "split")
        }
        return HeadRows(self.logits[items], self.right[items], **columns, about=self.about)

    def of_split(self, split: int) -> "HeadRows":
        """The rows of a split."""
        return self.take(self.split == split)

    def parts(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows of similar length: their numbers, logits padded with -inf, and right items."""
        starts = np.cumsum(self.lengths) - self.lengths
        order = np.argsort(self.lengths, kind="stable")
        bins = np.ceil(np.log2(np.maximum(self.lengths[order], 1))).astype(int)
        parts = []
        for value in np.unique(bins):
            rows = order[bins == value]
            n_rows = max(1, MAX_CELLS >> int(value))
            for first in range(0, len(rows), n_rows):
                parts.append(self._padded(rows[first : first + n_rows], starts))
        return parts

    def _padded(
        self, rows: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        width = np.arange(self.lengths[rows].max())
        is_item = width < self.lengths[rows][:, None]
        place = np.where(is_item, starts[rows][:, None] + width, 0)
        logits = np.where(is_item, self.logits[place], -np.inf).astype(np.float32)
        return rows, logits, self.right[place] & is_item

    def columns(self) -> dict[str, list[np.ndarray]]:
        """The rows as lists of arrays for `calibrate.fit`."""
        parts = self.parts()
        return {
            "logits": [logits for _, logits, _ in parts],
            "target": [right for *_, right in parts],
            "mask": [logits > -np.inf for _, logits, _ in parts],
            "group": [self.group[rows] for rows, *_ in parts],
        }


class FittedRule(NamedTuple):
    """A rule in numbers: its coefficients, and its domain as in a coefficient file."""

    name: str
    coefficients: list[float]
    domain: list[float]

    def beta(self, H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
        """(rows,) beta at (rows,) entropies and log n."""
        if self.name == ETS:
            return ets_beta(self.coefficients, H, log_n)
        entry = Entry(tuple(self.coefficients), tuple(self.domain))
        return np.broadcast_to(entry.beta_at(H, log_n, guards_of(self.name)), H.shape)


def guards_of(name: str) -> RuleForm:
    """The kind and the guards of a rule of `calibrate`."""
    if name == PAPER:
        return paper().rule
    if name == LEAST_SQUARES:
        return FitOptions(loss=LEAST_SQUARES).resolved().form(POLYNOMIAL)
    return FitOptions().resolved().form(name)


class Calibration(NamedTuple):
    """The rules that are fitted to the calibration split, by name, and the default's verdict."""

    rules: dict[str, FittedRule]
    verdict: str
    refusal: str  # of the default; "" where it is saved
    kinds: dict[str, float]  # NLL held out by folds of the calibration split


def fit_all(rows: HeadRows, head: str) -> Calibration:
    """Fits every rule to rows of the calibration split."""
    columns = rows.columns()
    parts = [{name: of[i] for name, of in columns.items()} for i in range(len(columns["target"]))]
    collection = collect_in_memory(Arrays.in_memory(head, parts))
    solved = solve_collection(collection, ONE_PROCESS)
    options = FitOptions().resolved()
    procedures = list_procedures(solved, options)
    fitted = fit_rules(solved, procedures, options, can_have_slope(solved))
    rules = {
        name: FittedRule(name, list(rule.coefficients), list(rule.domain))
        for name, rule in fitted.items()
    }
    rules[ETS] = FittedRule(ETS, fit_ets(solved), [])
    rules[PAPER] = FittedRule(PAPER, list(paper().coefficients), list(paper().only.domain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit, refusal = fit_even_if_refused(solved, options, head)
    kinds = {record["kind"]: record["nll"] for record in fit.evidence.get("kinds", [])}
    ordered = {name: rules[name] for name in RULES if name in rules}
    return Calibration(ordered, fit.verdict, refusal, kinds)


def ets_beta(coefficients: list[float], H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """(rows,) beta = 1 / softplus(a + b log(H / log n)), within the bounds of `calibrate.fit`."""
    a, b = coefficients
    theta = np.logaddexp(0, a + b * log_share(H, log_n))
    return np.clip(1 / np.maximum(theta, 1 / MAX_BETA), MIN_BETA, MAX_BETA)


def log_share(H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """(rows,) log(H / log n), H / log n being at least MIN_SHARE."""
    return np.log(np.clip(H / log_n, MIN_SHARE, 1))


def fit_ets(solved: SolvedInputs) -> list[float]:
    """The a and b of ETS of highest likelihood: BFGS from three starts at the best constant."""
    x = log_share(solved.entropy, np.log(solved.n))
    share = solved.weight / solved.weight.sum()

    def loss(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        u = coefficients[0] + coefficients[1] * x
        theta = np.maximum(np.logaddexp(0, u), 1 / MAX_BETA)
        value, slope, _ = solved.profile.derivatives(np.clip(1 / theta, MIN_BETA, MAX_BETA))
        is_inside = (theta > 1 / MAX_BETA) & (theta < 1 / MIN_BETA)
        of_u = np.where(is_inside, share * slope * -(theta**-2) * np.exp(u - np.logaddexp(0, u)), 0)
        return -float(share @ value), -np.array([of_u.sum(), of_u @ x])

    level = np.geomspace(MIN_BETA, MAX_BETA, 400)
    best = level[np.argmax(solved.profile.weighted_sum(share).log_p_at_each(level))]
    start = float(np.log(np.expm1(1 / best)))  # softplus of it is 1 / beta
    slopes = np.array(FIRST_SLOPES) * max(abs(start), 1)
    results = [
        minimize(loss, [start - b * (share @ x), b], jac=True, method="BFGS") for b in slopes
    ]
    return min(results, key=lambda result: result.fun).x.tolist()


class Scores(NamedTuple):
    """Scores of rules on rows; arrays are (rows,)."""

    entropy: np.ndarray
    right_on_top: np.ndarray  # the share of a tie
    one_right: np.ndarray  # bool, True for rows with one right item
    log_p: dict[str, np.ndarray]  # of the right items in total, by rule
    confidence: dict[str, np.ndarray]  # probability of the top item, by rule


def score(rows: HeadRows, rules: Mapping[str, FittedRule]) -> Scores:
    """Scores softmax and other rules on rows."""
    names = [BASELINE, *rules]
    shape = len(names), len(rows)
    of_right, of_top = np.empty(shape), np.empty(shape)
    entropy, on_top = np.empty(len(rows)), np.empty(len(rows))
    one_right = np.empty(len(rows), bool)
    for numbers, logits, right in rows.parts():
        H, log_n = row_entropy(logits).astype(float), np.log(rows.lengths[numbers])
        betas = np.stack([np.ones(len(H)), *(rule.beta(H, log_n) for rule in rules.values())], 1)
        of_right[:, numbers] = log_p(logits, right, betas).T
        of_top[:, numbers] = np.exp(log_p(logits, logits.argmax(axis=1), betas)).T
        entropy[numbers], on_top[numbers] = H, ranked_first(logits, right)
        one_right[numbers] = right.sum(axis=1) == 1
    return Scores(
        entropy, on_top, one_right, dict(zip(names, of_right, strict=True)),
        dict(zip(names, of_top, strict=True)),
    )  # fmt: skip


def bootstrap(
    values: np.ndarray, group: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED
) -> list[float]:
    """[mean, low, high]: the mean of (rows,) values, with a 95 % interval by a bootstrap.

    Groups are drawn with replacement, as many as there are; the ends are percentiles.
    """
    _, index = np.unique(group, return_inverse=True)
    total, count = np.bincount(index, values), np.bincount(index)
    rng = np.random.default_rng(seed)
    n = len(count)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=resamples)
    low, high = np.quantile((drawn @ total) / (drawn @ count), (0.025, 0.975))
    return [float(values.mean()), float(low), float(high)]


def diagram_of(confidence: np.ndarray, right: np.ndarray) -> Reliability:
    """The reliability diagram of rows of equal weight."""
    return reliability(confidence, right, np.ones(len(right)))


def calibration_error(diagram: Reliability) -> dict[str, float]:
    """The ECE, and its chance level: its expectation if every confidence were true."""
    return {"ece": expected_calibration_error(diagram), "chance": diagram.chance}


def choose_threshold(score: np.ndarray, right: np.ndarray, precision: float) -> float:
    """The lowest threshold whose accepted items, score >= it, have at least this precision.

    Without one, the threshold of the highest precision.
    """
    order = np.argsort(-score, kind="stable")
    accepted = np.arange(1, len(order) + 1)
    shares = np.cumsum(right[order]) / accepted
    is_last = np.append(np.diff(score[order]) < 0, True)  # equal scores are accepted together
    enough = np.flatnonzero(is_last & (shares >= precision))
    place = enough[-1] if len(enough) else np.flatnonzero(is_last)[shares[is_last].argmax()]
    return float(score[order][place])
