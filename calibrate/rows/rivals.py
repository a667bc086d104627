"""Rivals: rules fitted to the same rows as a fit, to compare it with."""

import warnings
from collections.abc import Callable
from dataclasses import replace

from calibrate.errors import QualityError
from calibrate.evidence.baselines import EXTRAPOLATED_FROM, LABELS, one_constant
from calibrate.evidence.evidence import OWN
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import Rule
from calibrate.rows.choose_rule import Choice, choose
from calibrate.rows.paper_procedure import fit_as_in_the_paper
from calibrate.rows.row_problem import fit_rule
from calibrate.rows.rule_fitting import KINDS, Options
from calibrate.rows.solved_rows import Rows

_NAMES = {name: name for name in KINDS} | {"log-size": "kappa-log-n"}


def fitted_rules(rows: Rows, choice: Choice | None = None) -> dict[str, Coefficients]:
    """The rule chosen for these rows, every kind fitted to them, and the paper's procedure.

    Args:
      rows: of a collection.
      choice: the result of `choose` for these rows; None is that with default options.
    Raises:
      QualityError: no rule "own": too few rows, or no rule beats plain softmax.
    Warns:
      UserWarning: a rule is left out, as it has too few rows.
    """
    choice = choice or choose(rows, Options())
    rules = {OWN: choice.chosen.fit}
    rules |= {_NAMES[candidate.kind]: candidate.fit for candidate in choice.candidates}
    small = rows.size <= EXTRAPOLATED_FROM
    optional: dict[str, Callable[[], Coefficients]] = {
        "procedure": lambda: fit_as_in_the_paper(rows)
    }
    if not small.all():
        optional["own-512"] = lambda: fit_rule(
            rows.take(small), choice.chosen.kind, choice.problem.options._replace(q=choice.chosen.q)
        )
    for name, fit in optional.items():
        try:
            rules[name] = fit()
        except QualityError as failure:  # the others can still be compared
            warnings.warn(f"{LABELS[name]!r} is left out: {failure}", stacklevel=2)
    return {name: replace(rule, name=name) for name, rule in rules.items()}


def by_sharpness(choice: Choice) -> dict[str, Coefficients]:
    """The rules of the chosen kind with each q that was tried, named "q-0.25" and the like."""
    tried = {f"q-{candidate.q:g}": candidate.fit for candidate in choice.trade}
    return {name: replace(fit, name=name) for name, fit in tried.items()}


def rivals_on_logits(choice: Choice | None) -> dict[str, Coefficients]:
    """The other kinds fitted to the same rows, if known, and, as "hard", the largest beta."""
    candidates = choice.candidates if choice else []
    kinds = {_NAMES[c.kind]: c.fit for c in candidates if choice and c.kind != choice.chosen.kind}
    return {**kinds, "hard": one_constant(Rule().max_beta)}
