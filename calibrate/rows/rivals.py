"""Rivals: rules fitted to the same rows as a fit, and the paper's procedure, which is one."""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.baselines import EXTRAPOLATED_FROM, one_constant
from calibrate.evidence.evidence import OWN
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import Rule
from calibrate.maths.rule_forms import DEGREE
from calibrate.rows import rule_fitting
from calibrate.rows.choose_rule import Choice, choose
from calibrate.rows.row_problem import fit_rule
from calibrate.rows.solved_rows import Rows

_NAMES = {name: name for name in rule_fitting.KINDS} | {"log-size": "kappa-log-n"}


def fitted_rules(rows: Rows, choice: Choice | None = None) -> dict[str, Coefficients]:
    """The rule chosen for these rows, every kind fitted to them, and the paper's procedure.

    The last, and the chosen kind fitted to sizes up to 512, are left out where rows are too few.
    Without a choice, that with default options is made; its QualityError is raised.
    """
    choice = choice or choose(rows, rule_fitting.Options())
    rules = {OWN: choice.chosen.fit}
    rules |= {_NAMES[candidate.kind]: candidate.fit for candidate in choice.candidates}
    small = rows.size <= EXTRAPOLATED_FROM
    with suppress(QualityError):  # too few rows; the others can still be compared
        rules["procedure"] = fit_as_in_the_paper(rows)
    with suppress(QualityError):
        if not small.all():
            options = choice.problem.options._replace(q=choice.chosen.q)
            rules["own-512"] = fit_rule(rows.take(small), choice.chosen.kind, options)
    return {name: replace(rule, name=name) for name, rule in rules.items()}


def rivals_on_logits(choice: Choice | None) -> dict[str, Coefficients]:
    """The other kinds fitted to the same rows, if known, and the largest beta, which is finite.

    Hard attention itself has log p = -inf in every row where it is wrong.
    """
    candidates = choice.candidates if choice else []
    kinds = {_NAMES[c.kind]: c.fit for c in candidates if choice and c.kind != choice.chosen.kind}
    return {**kinds, "beta-64": one_constant(Rule().max_beta)}


def fit_as_in_the_paper(rows: Rows) -> Coefficients:
    """The paper's procedure: least squares on p(H) - beta* of interior rows, p without bounds.

    Raises QualityError for fewer than 100 of them, or a rank-deficient fit.
    """
    used = rows.interior()
    return Coefficients(Rule(), (Entry(*fit_polynomial(used.entropy, used.beta)),))


def fit_polynomial(
    entropy: np.ndarray, beta: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Degree-4 polynomial p with p(H) close to optimal beta, and its domain.

    The design matrix is that of the standardised entropy, or the powers of H would be nearly
    collinear; the result is exported in plain powers, highest first.
    """
    rule_fitting.require_rows(len(entropy), "interior")
    mean, deviation = float(entropy.mean()), float(entropy.std())
    deviation = deviation if deviation > rule_fitting.RANK_TOLERANCE * abs(mean) else 1.0
    powers = np.polynomial.polynomial.polyvander((entropy - mean) / deviation, DEGREE)[:, 1:]
    centre = powers.mean(axis=0)
    slopes, _, rank, _ = np.linalg.lstsq(
        powers - centre, beta - beta.mean(), rcond=rule_fitting.RANK_TOLERANCE
    )
    if rank < DEGREE:
        raise QualityError(
            f"the rows' entropies determine only {rank + 1} of the {DEGREE + 1} coefficients; "
            f"{rule_fitting.ADVICE}"
        )
    ascending = [beta.mean() - centre @ slopes, *slopes]
    standardised = np.polynomial.Polynomial([-mean / deviation, 1 / deviation])
    plain = np.polynomial.Polynomial(ascending)(standardised).coef[::-1]
    lo, hi = (float(h) for h in np.percentile(entropy, rule_fitting.DOMAIN_PERCENTILES))
    return tuple(plain.tolist()), (lo, hi)


def refuse_negative(entry: Entry) -> None:
    """Raises QualityError if the polynomial is not positive on its domain; guards would hide it."""
    lo, hi = entry.domain
    roots = np.roots(np.polyder(entry.coefficients))
    inside = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > lo) & (roots.real < hi)]
    lowest = float(np.polyval(entry.coefficients, [lo, hi, *inside]).min())
    if lowest <= 0:
        raise QualityError(
            f"the polynomial falls to {lowest:.3g} on its domain [{lo:.3f}, {hi:.3f}] nats, and "
            f"beta must be positive; {rule_fitting.ADVICE}"
        )
