"""Fitting one head: its rule, fitted to all inputs, and its held-out scores by folds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from calibrate.core.rule import CONSTANT
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.significance import MIN_GAIN
from calibrate.fitting.fit_rule import fit_rule
from calibrate.fitting.fitted_rule import FittedRule
from calibrate.fitting.held_out import HeldOut, procedures, score_held_out
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, MIN_GROUPS, MIN_INPUTS, FitOptions
from calibrate.fitting.smoothed_fit import can_have_slope
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.solver.solved_rows import Rows, known_index

REMEDY = "collect more inputs, or larger ones; of arrays, give more rows"


@dataclass(frozen=True)
class HeadFit:
    """The fit of one head.

    Attributes:
      layer, head: None where unknown.
      inputs: that were fitted or could have been.
      misranked: their share that is misranked.
      rule: None: the head keeps softmax.
      refusal: why it does; "" where it has a rule.
      constant: the constant of highest likelihood; None where it was not fitted.
      fitted: number of inputs that the rule was fitted to.
      r_squared: of log beta, see `FittedRule.r_squared`.
      bound: of likelihood, that beta is at in most inputs, "min" or "max"; else "".
      ranked_right: no input is misranked.
      near_ties: misranked inputs whose optimal beta is above the rule's bound.
      held_out: scores by folds; None where only misranked inputs were kept, or too few inputs.
    """

    layer: int | None
    head: int | None
    inputs: int
    misranked: float
    rule: FittedRule | None = None
    refusal: str = ""
    constant: float | None = None
    fitted: int = 0
    r_squared: float | None = None
    bound: str = ""
    ranked_right: bool = False
    near_ties: int = 0
    held_out: HeldOut | None = field(default=None, compare=False, repr=False)

    def gain(self, procedure: str) -> Estimate | None:
        """The held-out gain of the rule over softmax, nats; None: not known."""
        return None if self.held_out is None else self.held_out.gain(procedure)

    def without_rule(self, refusal: str) -> "HeadFit":
        """The head at softmax, and why."""
        return replace(self, rule=None, refusal=refusal)


def fit_head(
    rows: Rows,
    options: FitOptions,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
    misranked_only: bool = False,
    names: Sequence[str] | None = None,
) -> HeadFit:
    """Fits the rule of a head, and scores it and its rivals on held-out folds.

    Args:
      rows: solved, of one head.
      options: resolved.
      jobs: where the folds run.
      progress: of the folds.
      misranked_only: the collection keeps no other inputs: there are no held-out scores.
      names: procedures to compare; None: all that can be fitted.
    Raises:
      QualityError: too few inputs or groups, with their numbers.
      CalibrateError: misranked inputs alone, and maximum likelihood.
    """
    rows = rows.take(rows.weight > 0)
    require_inputs(rows, options, misranked_only)
    has_slope = can_have_slope(rows)
    rule = fit_rule(rows, options.procedure, options, has_slope)
    constant = held_out = None
    if not misranked_only:
        constant = fit_rule(rows, CONSTANT, options, has_slope).coefficients[0]
        names = procedures(rows, options) if names is None else names
        held_out = score_held_out(rows, names, options, jobs, progress)
    used = rows.fitted_by_least_squares()
    is_fitted = used if options.loss == LEAST_SQUARES else rows.entropy > rule.rule.min_entropy
    has_threshold = rule.rule.min_entropy > 0 or options.loss == LEAST_SQUARES
    return HeadFit(
        known_index(rows.layer[0]),
        known_index(rows.head[0]),
        len(rows.beta),
        float(np.average(rows.misranked, weights=rows.weight)),
        rule,
        constant=constant,
        fitted=int(is_fitted.sum()) if has_threshold else len(rows.beta),
        r_squared=rule.r_squared(rows),
        bound=rule.bound_reached(rows) if options.loss == LIKELIHOOD else "",
        ranked_right=not rows.misranked.any(),
        near_ties=int((used & (rows.beta > rule.rule.max_beta)).sum()),
        held_out=held_out,
    )


def require_inputs(rows: Rows, options: FitOptions, misranked_only: bool = False) -> None:
    """Raises QualityError for too few inputs or groups.

    And CalibrateError for misranked inputs alone, on which maximum likelihood is biased.
    """
    if options.loss == LIKELIHOOD and misranked_only:
        raise CalibrateError(
            "the collection keeps misranked inputs only, on which maximum likelihood is biased; "
            'collect all inputs, or fit with loss="least-squares"',
            parameter="loss",
        )
    if options.loss == LEAST_SQUARES:
        count, what = int(rows.fitted_by_least_squares().sum()), "misranked inputs"
    else:
        count, what = len(rows.beta), "inputs of positive weight"
    if count < MIN_INPUTS:
        raise QualityError(f"{count} {what}, fewer than the {MIN_INPUTS} of a fit; {REMEDY}")
    n_groups = rows.n_groups()
    if n_groups < MIN_GROUPS and options.loss == LIKELIHOOD:
        raise QualityError(
            f"the inputs come from {n_groups} groups (prompts), fewer than the {MIN_GROUPS} that "
            "folds of whole groups need; collect inputs of more prompts"
        )


def find_refusal(head: HeadFit, options: FitOptions, is_significant: bool) -> str:
    """The reason why the rule of a head is not saved; "" if it is.

    Args:
      head: with its rule.
      options: resolved.
      is_significant: the held-out gain differs from 0, corrected for the number of heads.
    """
    held_out, name = head.held_out, options.procedure
    if held_out is None:
        return ""
    if not tells_something(held_out, name):
        return (
            "these logits tell nothing of the targets: the held-out NLL is not significantly below "
            "that of the uniform distribution; check that target holds the positions of the right "
            "items"
        )
    gain = held_out.gain(name)
    if options.loss == LEAST_SQUARES and is_significant and gain.mean < 0:
        return (
            f"the paper's procedure is significantly worse than softmax ({nats(gain)} of "
            f"log-likelihood; {head.near_ties:,} near ties have an optimal beta above "
            f'{options.bounds[1]:g}); use the default, loss="{LIKELIHOOD}"'
        )
    if options.is_named or options.loss == LEAST_SQUARES:
        return ""
    if not is_significant or gain.mean < MIN_GAIN:
        return (
            f"no significant gain over softmax of {MIN_GAIN} nats or more: {nats(gain)} of "
            f"held-out log-likelihood (p-value {gain.p_value:.2g}); keep softmax, or name a kind "
            "to save it anyway"
        )
    trained = trained_gain(held_out, name, options.trained_up_to)
    if trained is not None and -trained.mean > options.tolerance:
        return (
            f"in distribution (n <= {options.trained_up_to:,}) the rule loses "
            f"{nats(-trained, '')}, more than tolerance={options.tolerance:g}; name a kind to save "
            "it anyway"
        )
    return ""


def tells_something(held_out: HeldOut, name: str) -> bool:
    """True if the rule, or a constant without bounds, is better than the uniform distribution."""
    rivals = (held_out.log_p[name], held_out.unbounded)
    return any(held_out.estimate(log_p - held_out.uniform).sign > 0 for log_p in rivals)


def trained_gain(held_out: HeldOut, name: str, up_to: int | None) -> Estimate | None:
    """The gain at the sizes of the training data; None without such inputs."""
    trained = held_out.size <= (up_to or 0)
    return held_out.gain(name, some=trained) if trained.any() else None


def nats(estimate: Estimate, sign: str = "+") -> str:
    """An estimate as text, "+0.120 ± 0.004 nats"."""
    return f"{estimate.shown(f'{sign}.3f')} nats"
