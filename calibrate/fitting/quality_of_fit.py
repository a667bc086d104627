"""The evidence that a coefficient file keeps of a fit of one head, beside its rule."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibrate.datasets.row_collection import RowCollection
from calibrate.fitting.bootstrap import bootstrap
from calibrate.fitting.cross_validate import Candidate
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.maximum_likelihood import LikelihoodFit
from calibrate.fitting.select import Selection
from calibrate.parallel import Jobs
from calibrate.solver.solved_rows import Rows


def quality_of_fit(
    collection: RowCollection, rows: Rows, selection: Selection, jobs: Jobs
) -> dict[str, Any]:
    """Counts of rows, the certainty of the rule, its scores held out, candidates, and the verdict.

    Args:
      collection: whose rows these are.
      rows: all that it has, solved.
      selection: of the rule.
      jobs: where the bootstrap runs; the result does not depend on it.
    """
    published = selection.published
    if isinstance(published.fitted, LikelihoodFit):
        counts, certainty = _of_likelihood(rows, published, published.fitted, jobs)
    else:
        counts, certainty = _of_least_squares(rows, published)
    return {
        "rows": row_counts(collection, rows.count_by_status()) | counts,
        **certainty,
        "held_out": selection.held_out_evidence.gain_records(),
        "candidates": [c.record() for c in [*selection.candidates, *selection.by_q[1:]]],
        "verdict": selection.verdict,
    }


def row_counts(collection: RowCollection, statuses: Mapping[str, int]) -> dict[str, int]:
    """The rows of a collection by what they are, of all sizes, and by status of the solver."""
    sizes = collection.manifest["sizes"]
    totals = {key: sum(size[key] for size in sizes) for key in sizes[0] if key != "size"}
    return {**totals, **statuses}


def _of_likelihood(
    rows: Rows, published: Candidate, fitted: LikelihoodFit, jobs: Jobs
) -> tuple[dict[str, int], dict[str, Any]]:
    """The rows that were used, and the uncertainty of the coefficients."""
    errors, band = bootstrap(fitted, jobs)
    least = published.coefficients.rule.min_entropy
    counts = {
        "used": int(published.options.usable(rows).sum()),
        "gated": int((least > 0) * (rows.entropy <= least).sum()),
    }
    certainty = {
        "standard_errors": [errors],
        "condition": fitted.regression.condition,
        "q": published.q,
        **({} if band is None else {"band": band.tolist()}),
    }
    return counts, certainty


def _of_least_squares(rows: Rows, polynomial: Candidate) -> tuple[dict[str, int], dict[str, Any]]:
    """The rows that were used, and the errors on those with a finite optimum.

    Theta is as it is applied, at most 1.
    """
    powers, solved = polynomial.powers, rows.interior()
    applied = applied_beta(polynomial.coefficients, solved)
    theta = np.minimum(1 / solved.beta, 1)
    residuals = {
        "beta_rms": float(np.sqrt(np.mean((applied - solved.beta) ** 2))),
        "theta_rms": float(np.sqrt(np.mean((1 / applied - theta) ** 2))),
        "log_beta_r_squared": powers.r_squared,
    }
    return {"used": powers.n_rows, "at_bound": powers.n_at_bound}, {"residuals": residuals}
