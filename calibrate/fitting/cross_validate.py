"""Cross-validation: every kind of rule, fitted to rows and scored on rows that folds leave out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from calibrate.core.rule_kinds import OF_LEAST_SQUARES, RuleKind
from calibrate.errors import QualityError
from calibrate.evidence.evidence import ENOUGH_ROWS, OWN, PLAIN, Evidence, Scored, Stratum
from calibrate.evidence.metrics import BETA, EXPECTED, LOG_P, Metric
from calibrate.evidence.prior import cautious_gain
from calibrate.evidence.selection_criterion import Gain
from calibrate.fitting.fit_polynomial import PolynomialFit, log_r_squared
from calibrate.fitting.fit_rule import FittedRule, applied_beta, fit_rule
from calibrate.fitting.groups import N_BLOCKS, N_FOLDS, deal_into_blocks
from calibrate.fitting.least_squares import LeastSquaresFit
from calibrate.fitting.maximum_likelihood import LikelihoodFit
from calibrate.fitting.options import LogLikelihood, Loss, Options
from calibrate.fitting.pooled_rows import Pool, pool_rows
from calibrate.solver.optimal_beta import INTERIOR
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

# Two splits of the blocks into folds, (N_BLOCKS,).
FOLDS = np.arange(N_BLOCKS) % N_FOLDS
OTHER_FOLDS = np.arange(N_BLOCKS) // N_FOLDS % N_FOLDS


@dataclass(frozen=True, eq=False)
class Candidate:
    """A rule, fitted to all rows, with its scores on rows that folds left out."""

    rows: Rows  # in blocks
    baseline: Evidence  # of these rows
    options: Options
    fitted: LikelihoodFit | LeastSquaresFit
    loss: Loss

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return self.fitted.kind.name

    @property
    def q(self) -> float:
        """The exponent of the loss that it was fitted with; 0 is maximum likelihood."""
        return self.loss.q if isinstance(self.loss, LogLikelihood) else 0.0

    @property
    def name(self) -> str:
        """Its name among other candidates."""
        return f"{self.kind}, q = {self.q:g}"

    @property
    def coefficients(self) -> Coefficients:
        """The rule as a file holds it."""
        return self.fitted.coefficients

    @property
    def powers(self) -> PolynomialFit:
        """A polynomial by least squares, and how well it describes the optimal betas."""
        assert isinstance(self.fitted, LeastSquaresFit)
        return self.fitted.powers

    @cached_property
    def held_out_scores(self) -> dict[Metric, np.ndarray]:
        """(rows,) of each metric, by fits to the other folds, which are made when first asked."""
        return scores_at(self.rows, held_out_beta(self.rows, self.fitted, FOLDS))

    @cached_property
    def scores_by_other_folds(self) -> dict[Metric, np.ndarray]:
        """The same by the second split into folds."""
        return scores_at(self.rows, held_out_beta(self.rows, self.fitted, OTHER_FOLDS))

    @property
    def evidence(self) -> Evidence:
        """The held-out rows under the baseline and, as OWN, this rule."""
        return self.baseline.with_rule(OWN, self.held_out_scores)

    @property
    def held_out_evidence(self) -> Evidence:
        """log p of the baseline and, as OWN, of this rule, held out."""
        log_p = [self.evidence.scores(name, LOG_P) for name in (PLAIN, OWN)]
        return self.evidence.with_only((PLAIN, OWN), {LOG_P: np.array(log_p, np.float32)})

    @cached_property
    def gain(self) -> Gain:
        """Its held-out gain of log p over the baseline."""
        return cautious_gain(self.evidence, OWN, PLAIN, self.options.prior_rows)

    @property
    def mean_log_p(self) -> float:
        """Held out, sizes equal, nats."""
        return float(self.baseline.design.item_weight @ self.held_out_scores[LOG_P])

    @property
    def mean_p(self) -> float:
        """Held out, sizes equal."""
        return float(self.baseline.design.item_weight @ np.exp(self.held_out_scores[LOG_P]))

    @property
    def log_beta_r_squared(self) -> float | None:
        """R^2 of its log beta on the fitted rows with a finite optimum; None of other kinds.

        It is below 0 where the mean of log beta is nearer to the optima.
        """
        if isinstance(self.fitted, LeastSquaresFit):
            return self.fitted.powers.r_squared
        rows = self.rows.take(self.options.usable(self.rows) & (self.rows.status == INTERIOR))
        if self.fitted.kind != OF_LEAST_SQUARES or not len(rows.size):
            return None
        rule = self.coefficients.rule
        beta = applied_beta(self.coefficients, rows)
        bounded = np.clip(rows.beta, rule.min_beta, rule.max_beta)
        return log_r_squared(beta, bounded, rows.weight.astype(float))

    def record(self) -> dict[str, Any]:
        """Its numbers, and its scores on rows that folds left out, as a file keeps them."""
        (mean, low, high, _), entry = self.gain, self.coefficients.only
        r_squared = self.log_beta_r_squared
        return {
            "kind": self.kind,
            "loss": self.options.loss,
            **({"q": self.q} if isinstance(self.loss, LogLikelihood) else {}),
            "log_p": self.mean_log_p,
            "p": self.mean_p,
            "gain": mean,
            "low": low,
            "high": high,
            "coefficients": list(entry.coefficients),
            "domain": list(entry.domain),
            **({} if r_squared is None else {"log_beta_r_squared": r_squared}),
        }

    def gain_over(self, other: "Candidate | None") -> Gain:
        """The held-out gain of log p over another candidate, or over the baseline.

        Of two splits into folds, that with the lower end of the interval: which folds a richer
        kind was fitted to must not decide.
        """
        if other is None:
            return self.gain
        first = self._paired_gain(self.held_out_scores, other.held_out_scores)
        if not first.is_at_least(0):
            return first
        second = self._paired_gain(self.scores_by_other_folds, other.scores_by_other_folds)
        return min(first, second, key=lambda gain: gain.low)

    def _paired_gain(self, own: dict[Metric, np.ndarray], others: dict[Metric, np.ndarray]) -> Gain:
        pair = self.baseline.with_rule("other", others).with_rule(OWN, own)
        return cautious_gain(pair, OWN, "other", self.options.prior_rows)


class RowsInFolds:
    """The rows of one head, to which rules are fitted, and scored where folds leave rows out.

    Attributes:
      rows: in blocks, of which folds are made.
      options: of the fits.
    """

    def __init__(self, rows: Rows, options: Options):
        """Deals rows into blocks; raises QualityError if there are some, and none has weight."""
        self.rows, self.options = deal_into_blocks(rows), options
        self._pools = dict[float, Pool]()  # by q

    @cached_property
    def baseline(self) -> Evidence:
        """The rows under the baseline, to which rules are added."""
        return baseline_evidence(self.rows)

    def pool(self, q: float) -> Pool:
        """The rows added up for a q, once for all kinds."""
        if q not in self._pools:
            self._pools[q] = pool_rows(self.rows, self.options, q)
        return self._pools[q]

    def fit(self, kind: RuleKind, loss: Loss) -> Candidate:
        """The best rule of its kind, scored on rows that folds leave out.

        Raises:
          QualityError: too few rows, rows that do not determine such a rule, or by a likelihood it
            costs more than the tolerance at a size that the head was trained on.
        """
        fitted = fit_rule(self.rows, kind, loss, self.options, self.pool)
        candidate = Candidate(self.rows, self.baseline, self.options, fitted, loss)
        if isinstance(loss, LogLikelihood):
            _require_non_inferior(candidate)
        return candidate


@dataclass(frozen=True, eq=False)
class CrossValidation:
    """Kinds of rule, each fitted to the rows of one head and scored where folds leave rows out."""

    folded: RowsInFolds
    kinds: Sequence[RuleKind]  # simplest first
    candidates: Sequence[Candidate]  # of the kinds that could be fitted
    left_out: Mapping[str, str]  # kind -> why it could not be fitted
    # By an option and its value, the same under that; see `with_option`.
    _others: "dict[tuple[str, Any], CrossValidation]" = field(default_factory=dict, repr=False)

    @property
    def options(self) -> Options:
        """The options of the fits."""
        return self.folded.options

    def of_kinds(self, names: Sequence[str]) -> tuple[list[Candidate], dict[str, str]]:
        """The candidates of some kinds; and of those that could not be fitted, why."""
        candidates = [c for c in self.candidates if c.kind in names]
        return candidates, {name: why for name, why in self.left_out.items() if name in names}

    def with_option(self, name: str, value: Any) -> "CrossValidation":
        """The same rows and kinds under another value of one option; each is made once."""
        if (name, value) not in self._others:
            options = self.options._replace(**{name: value})
            self._others[name, value] = cross_validate(self.folded.rows, self.kinds, options)
        return self._others[name, value]


def cross_validate(rows: Rows, kinds: Sequence[RuleKind], options: Options) -> CrossValidation:
    """Candidates of these kinds, simplest first; and of those that could not be fitted, why.

    Raises:
      QualityError: there are rows, and none has any weight.
    """
    folded, candidates, left_out = RowsInFolds(rows, options), list[Candidate](), dict[str, str]()
    for kind in kinds:
        try:
            candidates.append(folded.fit(kind, options.loss_of_fit()))
        except QualityError as failure:
            left_out[kind.name] = str(failure)
    return CrossValidation(folded, kinds, candidates, left_out)


def fit_candidate(rows: Rows, kind: RuleKind, options: Options) -> Candidate:
    """The best rule of one kind; see `RowsInFolds.fit`."""
    return RowsInFolds(rows, options).fit(kind, options.loss_of_fit())


def baseline_evidence(rows: Rows) -> Evidence:
    """Rows under the baseline, to which rules are added: see `scores_at`."""
    sizes, stratum = np.unique(rows.size, return_inverse=True)
    plain = scores_at(rows, np.ones(len(rows.size)))
    return Evidence(
        rules=(PLAIN,),
        values={metric: x[None] for metric, x in plain.items()},
        strata=tuple(Stratum(n) for n in sizes.tolist()),
        stratum=stratum,
        group=rows.group,
        weight=rows.weight,
        of=Scored(""),
        enough=ENOUGH_ROWS,
        variance=rows.variance,
    )


def scores_at(rows: Rows, beta: np.ndarray) -> dict[Metric, np.ndarray]:
    """(rows,) of each metric, at a beta of each row."""
    beta = rows.within(beta)
    return {LOG_P: rows.profile.log_p(beta), BETA: beta, EXPECTED: rows.plain_profile.log_p(beta)}


def held_out_beta(rows: Rows, fitted: FittedRule, fold_of_block: np.ndarray) -> np.ndarray:
    """(rows,) beta that a fit to the other folds gives to each row."""
    fold = fold_of_block[rows.block]
    others = fold_of_block != np.arange(N_FOLDS)[:, None]
    beta = np.empty(len(fold))
    for left_out, fit in enumerate(fitted.refit(others.astype(float))):
        in_fold = fold == left_out
        beta[in_fold] = applied_beta(fit, rows, in_fold)
    return beta


def _require_non_inferior(candidate: Candidate) -> None:
    """Raises QualityError if a rule costs more than the tolerance at a size of the training.

    The mean decides: the error of few rows allows for any loss. A row is of the training by its own
    number of items, though rows of more may share its size.
    """
    options, items = candidate.options, candidate.rows.items
    trained = candidate.evidence.where(items <= (options.trained_up_to or 0))
    result = options.trained_limit().check_items(trained, OWN)
    if result.size is not None:  # it exceeds the margin
        raise QualityError(
            f"it costs {result.loss.mean:.4f} ± {result.loss.error:.4f} nats at n = "
            f"{result.size:,}, where trained_up_to = {options.trained_up_to} has a tolerance of "
            f"{result.limit.margin:g}; give more rows of that size, a larger tolerance, or a lower "
            "trained_up_to"
        )
