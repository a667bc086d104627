"""The rows of one head to fit, in blocks, and what every kind of rule reads of them."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.metrics import BETA, EXPECTED, LOG_P, Metric
from calibrate.evidence.scores import ENOUGH_ROWS, PLAIN, Evidence, Scored, Stratum
from calibrate.fitting.groups import MIN_ROWS, assign_blocks, require_groups
from calibrate.fitting.options import Options
from calibrate.fitting.polynomial import DOMAIN_PERCENTILES
from calibrate.fitting.pooled_rows import Pool, pool
from calibrate.solver.solved_rows import Rows

NO_ENTROPY = 1e-6  # nats: less is noise of float32
ADVICE = "collect more sets, or larger sets; of arrays, give more rows"


@dataclass(frozen=True, eq=False)
class FitRows:
    """Solved rows of one head that have any weight and an optimum, in blocks.

    Folds and resamples are made of blocks: a fit with weights for the blocks is a fit to those.
    """

    rows: Rows
    block: np.ndarray  # (rows,)
    options: Options
    _pools: dict[float, Pool] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, rows: Rows, options: Options) -> "FitRows":
        """Raises QualityError if there are rows, and none has any weight."""
        if len(rows.weight) and not rows.weight.any():
            raise QualityError("no row has any weight: all of them are 0; give some")
        rows = rows.take(rows.has_optimum())
        return cls(rows, assign_blocks(rows), options)

    def with_options(self, options: Options) -> "FitRows":
        """The same rows under other options."""
        return FitRows(self.rows, self.block, options)

    @cached_property
    def baseline(self) -> Evidence:
        """The rows under the baseline, to which rules are added."""
        return evidence_of(self.rows)

    def pooled(self, q: float) -> Pool:
        """The usable rows, added up by the score (p^q - 1) / q; every kind reads the same pool.

        Raises:
          QualityError: too few rows, or groups of them.
        """
        if q not in self._pools:
            usable = self.options.usable(self.rows)
            rows = self.rows.take(usable)
            self._pools[q] = _pool_usable(rows, self.block[usable], self.options, q)
        return self._pools[q]


def _pool_usable(rows: Rows, block: np.ndarray, options: Options, q: float) -> Pool:
    misranked = options.rows == "misranked"
    require_rows(len(rows.size), "usable misranked" if misranked else "usable")
    require_groups(rows)
    ends = np.percentile(rows.entropy, DOMAIN_PERCENTILES)
    lo, hi = (float(end) if end > NO_ENTROPY else 0.0 for end in ends)
    return pool(rows, block, (lo, hi), q, options.prior_rows, options.trained_limit())


def require_rows(count: int, adjective: str) -> None:
    """Raises QualityError if a fit has too few rows."""
    if count < MIN_ROWS:
        raise QualityError(
            f"{count} {adjective} rows, fewer than the {MIN_ROWS} that a fit needs; {ADVICE}"
        )


def evidence_of(rows: Rows) -> Evidence:
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
