"""The verdict of a fit of one head, as its file has it: the rule, its gain, and what limits it."""

from collections.abc import Mapping

from calibrate.core.rule_kinds import kind_label
from calibrate.defaults import MIN_BETA_LIMIT
from calibrate.evidence.evidence import OWN
from calibrate.fitting.cross_validate import Candidate
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.verdict_clauses import margin_clause, without_gain
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

AT_BOUND = 0.95  # of a bound: a rule within the solver's tolerance of the best may stop short
RESCALE = 64  # of the logits, where beta is at a bound


def verdict_of_selection(
    published: Candidate, selected: Candidate | None, left_out: Mapping[str, str]
) -> str:
    """The rule, its gain over the baseline and at trained sizes, and the kinds left out.

    Args:
      published: the rule.
      selected: the rule that would be published if no kind were named; None: the baseline.
      left_out: kind -> why it could not be fitted.
    """
    mean, low, high, _ = published.gain
    clauses = [
        f"{kind_label(published.kind)} gains {mean:.4f} nats of log-likelihood over the baseline "
        f"(95 % interval {low:.4f} to {high:.4f}), fitted with q = {published.q:.3g}"
    ]
    if not published.gain.significant:
        # Without a name, the kind is significantly better at q = 0; a larger q is for accuracy.
        why = "published on request" if published.options.kind else "tuned for accuracy"
        no_gain = without_gain(published.gain, than=" than the baseline's")
        clauses.append(f"{why}: log-likelihood {no_gain}")
    elif selected is not None and published.kind != selected.kind:
        difference = published.gain_over(selected)
        clauses.append(
            f"published on request: not significantly better than {kind_label(selected.kind)} "
            f"({difference.mean:+.4f} nats, p-value {difference.p:.2g})"
        )
    clauses += [*_at_trained_sizes(published), *_at_bound(published)]
    for reason in dict.fromkeys(left_out.values()):
        kinds = [kind_label(kind) for kind, why in left_out.items() if why == reason]
        clauses.append(f"without {' and '.join(kinds)}: {reason}")
    return "; ".join(clauses)


def verdict_of_polynomial(
    polynomial: Candidate, constant: Candidate | None, misranked_only: bool
) -> str:
    """The gain of a polynomial by least squares, also at trained sizes, and what H explains.

    Args:
      polynomial: the rule.
      constant: by maximum likelihood, of the same head; None: too few rows.
      misranked_only: whether the collection keeps no other rows.
    """
    gain, powers = polynomial.gain, polynomial.powers
    where = "on misranked rows, the only ones kept: " if misranked_only else ""
    clauses = [
        f"{where}{polynomial.kind} gains {gain.mean:.4f} nats of log-likelihood over the "
        f"baseline (95 % interval {gain.low:.4f} to {gain.high:.4f})"
        + ("" if gain.significant else f", {without_gain(gain)}"),
        *_at_trained_sizes(polynomial),
        f"{explained(powers.r_squared)} of log beta in {powers.n_rows:,} rows",
    ]
    if constant is not None:
        beta = constant.coefficients.only.coefficients[-1]
        which = " of the same rows" if misranked_only else ""
        clauses.append(
            f"a constant (maximum likelihood{which}, beta = {beta:.3g}) gains "
            f"{constant.gain.mean:.4f} nats"
        )
    return "; ".join([*clauses, *_at_bound(polynomial)])


def explained(r_squared: float) -> str:
    """The share that the entropy explains; below 0 a constant would be nearer to the optima."""
    if r_squared < 0:
        return f"entropy explains nothing (R^2 {r_squared:.2f})"
    return f"entropy explains {r_squared:.0%}"


def _at_trained_sizes(candidate: Candidate) -> list[str]:
    """The loss at sizes that the head was trained on, if rows have them."""
    trained = candidate.options.trained_limit().check(candidate.held_out_evidence, OWN)
    return [margin_clause(trained)] if trained.n else []


def _at_bound(candidate: Candidate) -> list[str]:
    """Advice where beta is at a bound, if it is."""
    return list(filter(None, [bound_note(candidate.rows, candidate.coefficients)]))


def bound_note(rows: Rows, fit: Coefficients) -> str:
    """Advice where most rows have a beta at a bound that no option moves; "" elsewhere."""
    beta, weight, rule = applied_beta(fit, rows), rows.shares(), fit.rule
    if weight @ (beta >= AT_BOUND * rule.max_beta) > 1 / 2:
        return (
            f"beta is at its upper bound {rule.max_beta:g} on most rows: multiply the logits by "
            f"{RESCALE} and fit again"
        )
    if rule.min_beta == MIN_BETA_LIMIT and weight @ (beta <= rule.min_beta / AT_BOUND) > 1 / 2:
        return (
            f"beta is at its lower bound 1/{1 / rule.min_beta:g} on most rows: divide the logits "
            f"by {RESCALE} and fit again"
        )
    return ""
