"""Selection of the rule of a head: its kind, and q, by scores on held-out rows.

The kind is selected by `evidence/selection_criterion.py`. q is the exponent of generalised
cross-entropy: a fit maximises the mean of p^q, and of log p at q = 0, maximum likelihood. Rows show
the probability of the target alone, for which q = 0 is best. A head that can be scored may have a
higher accuracy with a larger q, which is selected by that.

Least squares fit one kind, the polynomial, and nothing is selected: it stands beside a constant.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from calibrate.core.rule_kinds import KINDS, OF_LEAST_SQUARES, SIMPLEST, RuleKind
from calibrate.errors import QualityError
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import RIGHT
from calibrate.evidence.publish_threshold import min_improvement
from calibrate.evidence.selection_criterion import Gain, simplest_unbeaten
from calibrate.fitting.cross_validate import (
    Candidate,
    CrossValidation,
    cross_validate,
    fit_candidate,
)
from calibrate.fitting.options import LIKELIHOOD, LogLikelihood, Options
from calibrate.fitting.refusal import REFUSAL_PARAMETERS, cause_of_refusal, refusal
from calibrate.fitting.verdict_of_fit import (
    bound_note,
    verdict_of_polynomial,
    verdict_of_selection,
)
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

LARGER_Q = (0.25, 0.5, 0.75, 1.0)  # values of q that are tried beyond 0
STEP_OF_Q = 1 / 32  # to which the largest q that costs no log p is found

# Scores rules, by name, on validation sets: Evidence with RIGHT.
ScoreOnSets = Callable[[Mapping[str, Coefficients]], Evidence]


@dataclass(frozen=True, eq=False)
class Selection:
    """The rule to publish, and why."""

    published: Candidate
    candidates: list[Candidate]  # of each kind, simplest first
    by_q: list[Candidate]  # of the published kind, smallest q first
    verdict: str
    validation: Evidence | None = None  # of `by_q`, by name, on the sets that selected q

    @property
    def held_out_evidence(self) -> Evidence:
        """log p of the baseline and, as OWN, of the published rule, held out."""
        return self.published.held_out_evidence

    @property
    def is_of_likelihood(self) -> bool:
        """True if the published rule is fitted by likelihood, False by least squares."""
        return isinstance(self.published.loss, LogLikelihood)

    @property
    def bound_note(self) -> str:
        """Advice where most rows have a beta at a bound; "" elsewhere."""
        return bound_note(self.published.rows, self.published.coefficients)

    @property
    def held_out_by_q(self) -> Evidence:
        """The rows that folds left out, under the baseline and each of `by_q`, by name."""
        evidence = self.published.baseline
        for candidate in self.by_q:
            evidence = evidence.with_rule(candidate.name, candidate.held_out_scores)
        return evidence


def fit_and_select(
    rows: Rows,
    options: Options,
    score_on_sets: ScoreOnSets | None = None,
    misranked_only: bool = False,
) -> Selection:
    """Fits every kind of rule that the loss can fit to the rows of a head, and selects one.

    Args:
      rows: solved, all of the head.
      options: of the fit.
      score_on_sets: scores rules on validation sets, which select q; None: q = 0.
      misranked_only: whether the collection keeps no other rows.
    Raises:
      QualityError: see `select_rule` and `polynomial_beside_constant`.
    """
    if options.loss != LIKELIHOOD:
        return polynomial_beside_constant(rows, options, misranked_only)
    validation = cross_validate(rows, tuple(KINDS.values()), options)
    return select_rule(validation, tuple(KINDS), score_on_sets)


def polynomial_beside_constant(
    rows: Rows, options: Options, misranked_only: bool = False
) -> Selection:
    """The polynomial of the optimal betas, and a constant by maximum likelihood on all rows.

    Arguments are those of `fit_and_select`.

    Raises:
      QualityError: fewer than 100 rows with a finite optimum.
    """
    polynomial, constant = fit_candidate(rows, OF_LEAST_SQUARES, options), None
    with suppress(QualityError):  # too few rows
        constant = fit_candidate(rows, SIMPLEST, Options(min_beta=options.min_beta))
    candidates = [polynomial] if constant is None else [constant, polynomial]
    verdict = verdict_of_polynomial(polynomial, constant, misranked_only)
    return Selection(polynomial, candidates, [polynomial], verdict)


def select_rule(
    validation: CrossValidation, kinds: Sequence[str], score_on_sets: ScoreOnSets | None = None
) -> Selection:
    """Selects the simplest rule that no other is significantly better than, and its q.

    The kind is selected at q = 0, or the q of the options. Where they leave q open and the head can
    be scored, q is the one of highest accuracy, of those that cost no held-out log p.
    A kind that the options name is published whatever its scores; the verdict says what they are.

    Raises:
      QualityError: too few rows for any fit, or for the kind named; or none is named, and none is
        significantly better than the baseline.
    """
    candidates, left_out = validation.of_kinds(kinds)
    named = validation.options.kind
    if named in left_out or not candidates:
        # Without candidates every kind is left out, the first among them.
        reason = left_out[named if named in left_out else kinds[0]]
        tried = kinds if named is None else [named]
        cause = cause_of_refusal(validation, tried, select_simplest)
        raise QualityError(f"{reason}; {cause}" if cause else reason, parameter=REFUSAL_PARAMETERS)
    selected = select_simplest(candidates)
    published = next((c for c in candidates if c.kind == named), selected)
    if published is None:
        message = refusal(validation, candidates, select_simplest)
        raise QualityError(message, parameter=REFUSAL_PARAMETERS)
    by_q, validation_sets = [published], None
    if validation.options.q is None and score_on_sets is not None:
        by_q = _fit_larger_q(published, validation)
        fits = {c.name: replace(c.coefficients, quality={"q": c.q}) for c in by_q}
        validation_sets = score_on_sets(fits)
        best = validation_sets.best(RIGHT, list(fits))
        published = next(c for c in by_q if c.name == best)
    verdict = verdict_of_selection(published, selected, left_out)
    return Selection(published, candidates, by_q, verdict, validation_sets)


def select_simplest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The simplest rule that no other is significantly better than; None for the baseline."""

    def gain(candidate: Candidate, other: Candidate | None) -> Gain:
        return candidate.gain_over(other)

    def min_lead(candidate: Candidate) -> float:
        return min_improvement(candidate.fitted.kind.depends_on_both)

    return simplest_unbeaten(candidates, gain, min_lead)


def _fit_larger_q(published: Candidate, validation: CrossValidation) -> list[Candidate]:
    """Rules of the same kind with larger q, up to where log p is that of the baseline."""
    kind, accepted = published.fitted.kind, [published]
    for q in LARGER_Q:
        candidate = _fit_if_not_below_baseline(kind, q, validation)
        if candidate is None:
            return _bisect_q(accepted, q, validation)
        accepted.append(candidate)
    return accepted


def _bisect_q(
    accepted: list[Candidate], rejected: float, validation: CrossValidation
) -> list[Candidate]:
    """More rules between the last accepted q and one that was rejected, STEP_OF_Q apart."""
    accepted = list(accepted)
    while rejected - accepted[-1].q > STEP_OF_Q:
        q = (accepted[-1].q + rejected) / 2
        candidate = _fit_if_not_below_baseline(accepted[-1].fitted.kind, q, validation)
        if candidate is None:
            rejected = q
        else:
            accepted.append(candidate)
    return accepted


def _fit_if_not_below_baseline(
    kind: RuleKind, q: float, validation: CrossValidation
) -> Candidate | None:
    """The rule of a kind with this q; None if held-out log p falls below the baseline's."""
    try:
        candidate = validation.folded.fit(kind, LogLikelihood(q))
    except QualityError:  # too much at sizes that the head was trained on
        return None
    return candidate if candidate.gain.mean >= 0 else None
