"""Rules of the study of deployed heads, and their scores on held-out rows.

The rules are those of `calibrate.fit`, the paper's published polynomial, and Entropy-based
Temperature Scaling (ETS): T = softplus(a + b log(H / log n)), with a and b of maximum likelihood.

Reference: Balanya, Maronas and Ramos 2022, "Adaptive temperature scaling for robust calibration of
deep neural networks", arXiv 2208.00461.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from deployed_rows import HeadRows
from scipy.optimize import minimize
from study import fit_even_if_refused

import calibrate
from calibrate.core.row_batches import row_entropy
from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, LOG_SIZE, POLYNOMIAL
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.evidence.baselines import PAPER, paper
from calibrate.evidence.calibration_error import (
    Reliability,
    expected_calibration_error,
    ranked_first,
    reliability,
)
from calibrate.evidence.evidence import BASELINE
from calibrate.fitting.fit_rule import can_have_slope, fit_rule
from calibrate.fitting.held_out import list_procedures
from calibrate.fitting.options import LEAST_SQUARES, FitOptions
from calibrate.parallel import ONE_PROCESS
from calibrate.rows.collect import collect_arrays
from calibrate.rows.likelihood_profile import log_p
from calibrate.rows.logits_files import Arrays
from calibrate.rows.solve import SolvedInputs, solve_collection
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

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


class Ets(NamedTuple):
    """Entropy-based Temperature Scaling: a and b."""

    coefficients: tuple[float, ...]

    def beta_at(self, H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
        """(rows,) beta = 1 / softplus(a + b log(H / log n)), as bounded as that of a fit."""
        a, b = self.coefficients
        theta = np.logaddexp(0, a + b * log_share(H, log_n))
        return np.clip(1 / np.maximum(theta, 1 / MAX_BETA), MIN_BETA, MAX_BETA)


Rules = Mapping[str, Fit | Ets]


def beta_of(rule: Fit | Ets, H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """(rows,) beta at (rows,) entropies and log n."""
    if isinstance(rule, Ets):
        return rule.beta_at(H, log_n)
    return np.broadcast_to(rule.only.beta_at(H, log_n, rule.rule), H.shape)


def rules_of(fits: Mapping[str, Mapping[str, Any]]) -> dict[str, Fit | Ets]:
    """The rules of a record, from their coefficients and domains."""
    return {name: rule_of(name, fit["coefficients"], fit["domain"]) for name, fit in fits.items()}


def rule_of(name: str, coefficients: Sequence[float], domain: Sequence[float]) -> Fit | Ets:
    if name == ETS:
        return Ets(tuple(coefficients))
    if name == PAPER:
        return paper()
    procedure = {"loss": LEAST_SQUARES} if name == LEAST_SQUARES else {"kind": name}
    options = FitOptions(**procedure).resolved()
    return Fit(options.form(options.rule_kind), (Entry(tuple(coefficients), tuple(domain)),))


def record_of_rules(rules: Rules) -> dict[str, dict[str, Any]]:
    """Coefficients and domains, which `rules_of` reads."""
    return {
        name: {
            "coefficients": list(rule.coefficients),
            "domain": [] if isinstance(rule, Ets) else list(rule.only.domain),
        }
        for name, rule in rules.items()
    }


class Calibration(NamedTuple):
    """The rules that are fitted to the calibration split, by name, and the default's verdict."""

    rules: dict[str, Fit | Ets]
    verdict: str
    refusal: str  # of the default; "" where it is saved
    kinds: dict[str, float]  # NLL held out by folds of the calibration split


def fit_all(rows: HeadRows, head: str) -> Calibration:
    """Fits every rule to rows of the calibration split."""
    collection = collect_arrays(Arrays.in_memory(head, rows.arrays()))
    solved = solve_collection(collection, ONE_PROCESS)
    options = FitOptions().resolved()
    procedures = list_procedures(solved, options)
    rules = {ETS: fit_ets(solved), PAPER: paper()}
    for name in procedures:
        rule = fit_rule(solved, name, options, can_have_slope(solved))
        rules[name] = rule_of(name, rule.coefficients, rule.domain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit, refusal = fit_even_if_refused(solved, options, head)
    kinds = {record["kind"]: record["nll"] for record in fit.evidence.get("kinds", [])}
    ordered = {name: rules[name] for name in RULES if name in rules}
    return Calibration(ordered, fit.verdict, refusal, kinds)


def log_share(H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """(rows,) log(H / log n), H / log n being at least MIN_SHARE."""
    return np.log(np.clip(H / log_n, MIN_SHARE, 1))


def fit_ets(solved: SolvedInputs) -> Ets:
    """ETS of highest likelihood, by BFGS from three starts at the best constant."""
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
    return Ets(tuple(min(results, key=lambda result: result.fun).x.tolist()))


class Scores(NamedTuple):
    """Scores of rules on rows; arrays are (rows,)."""

    right_on_top: np.ndarray  # the share of a tie
    one_right: np.ndarray  # bool, True for rows with one right item
    log_p: dict[str, np.ndarray]  # of the right items in total, by rule
    confidence: dict[str, np.ndarray]  # probability of the top item, by rule


def score(rows: HeadRows, rules: Rules) -> Scores:
    """Scores softmax and other rules on rows."""
    rules = {BASELINE: calibrate.identity(), **rules}
    of_right, of_top = np.empty((2, len(rules), len(rows)))
    on_top, one_right = np.empty(len(rows)), np.empty(len(rows), bool)
    for numbers, logits, right in rows.parts():
        H, log_n = row_entropy(logits).astype(float), np.log(rows.lengths[numbers])
        betas = np.stack([beta_of(rule, H, log_n) for rule in rules.values()], axis=1)
        of_right[:, numbers] = log_p(logits, right, betas).T
        of_top[:, numbers] = np.exp(log_p(logits, logits.argmax(axis=1), betas)).T
        on_top[numbers], one_right[numbers] = ranked_first(logits, right), right.sum(axis=1) == 1
    by_rule = (dict(zip(rules, values, strict=True)) for values in (of_right, of_top))
    return Scores(on_top, one_right, *by_rule)


def bootstrap(values: np.ndarray, group: np.ndarray) -> list[float]:
    """[mean, low, high]: the mean of (rows,) values, with a 95 % interval by a bootstrap.

    Groups are drawn with replacement, as many as there are; the ends are percentiles.
    """
    _, index = np.unique(group, return_inverse=True)
    total, count = np.bincount(index, values), np.bincount(index)
    rng = np.random.default_rng(SEED)
    n = len(count)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    low, high = np.quantile((drawn @ total) / (drawn @ count), (0.025, 0.975))
    return [float(values.mean()), float(low), float(high)]


def diagram_of(confidence: np.ndarray, right: np.ndarray) -> Reliability:
    """The reliability diagram of rows of equal weight."""
    return reliability(confidence, right, np.ones(len(right)))


def calibration_error(diagram: Reliability) -> dict[str, float]:
    """The ECE, and its chance level: its expectation if every confidence were true."""
    return {"ece": expected_calibration_error(diagram), "chance": diagram.chance}
