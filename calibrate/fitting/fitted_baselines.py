"""Baselines that are fitted to the same rows as a fit: every kind, and the paper's procedure."""

from contextlib import suppress
from dataclasses import replace

from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import OF_LEAST_SQUARES
from calibrate.errors import QualityError
from calibrate.evidence.baselines import EXTRAPOLATED_FROM, one_constant
from calibrate.evidence.evidence import OWN
from calibrate.fitting.cross_validate import Candidate
from calibrate.fitting.fit_rule import fit_kind, fit_rule
from calibrate.fitting.groups import deal_into_blocks
from calibrate.fitting.options import LogLikelihood, Options
from calibrate.fitting.select import Selection
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients


def fitted_baselines(
    rows: Rows, selection: Selection, polynomial: Coefficients | None = None
) -> dict[str, Coefficients]:
    """The rule selected for these rows, every kind fitted to them, and the paper's procedure.

    The last, and the selected kind fitted to sizes up to 512, are left out where rows are too few.

    Args:
      rows: solved.
      selection: of a kind of rule.
      polynomial: what the paper's procedure made of the same rows; None fits it.
    """
    rules = {OWN: selection.published.coefficients}
    for candidate in selection.candidates:
        quality = {"q": candidate.q}
        rules[_score_name(candidate)] = replace(candidate.coefficients, quality=quality)
    rules |= _procedure(rows, polynomial)
    small = rows.size <= EXTRAPOLATED_FROM
    with suppress(QualityError):  # too few rows; the others can still be compared
        if not small.all():
            kind, loss = selection.published.fitted.kind, LogLikelihood(selection.published.q)
            small_rows = deal_into_blocks(rows.take(small))
            fitted = fit_rule(small_rows, kind, loss, selection.published.options)
            rules["own-512"] = fitted.coefficients
    return {name: replace(rule, name=name) for name, rule in rules.items()}


def _score_name(candidate: Candidate) -> str:
    return candidate.fitted.kind.score_name


def smaller_q_rules(selection: Selection | None) -> dict[str, Coefficients]:
    """The selected kind fitted with each smaller q that was tried for its accuracy, by name."""
    smaller = [c for c in selection.by_q if 0 < c.q < selection.published.q] if selection else []
    return {f"q = {c.q:g}": replace(c.coefficients, quality={"q": c.q}) for c in smaller}


def _procedure(rows: Rows, polynomial: Coefficients | None) -> dict[str, Coefficients]:
    """The bare rule that the paper's procedure makes of rows; nothing where they are too few."""
    if polynomial is None:
        try:
            polynomial = fit_kind(rows, OF_LEAST_SQUARES.name, Options.of_the_paper())
        except QualityError:  # the others can still be compared
            return {}
    return {"procedure": Coefficients(polynomial.rule, polynomial.entries)}


def baselines_on_logits(
    rows: Rows | None, selection: Selection | None, polynomial: Coefficients | None = None
) -> dict[str, Coefficients]:
    """The other kinds fitted to the same rows, if known, the paper's procedure, and beta = 64.

    The largest beta stands for argmax, whose log-likelihood is -inf in every row where it is wrong.
    Arguments are those of `fitted_baselines`.
    """
    candidates = selection.candidates if selection else []
    others = [c for c in candidates if selection and c.kind != selection.published.kind]
    kinds = {_score_name(c): c.coefficients for c in others}
    procedure = {} if rows is None else _procedure(rows, polynomial)
    return {**kinds, **procedure, "beta-64": one_constant(Rule().max_beta)}
