"""Rows added up by block and cell, which fits read in place of the rows.

A cell is a range of entropies of one set size: its rows are treated as alike, and a rule gives them
one beta. So the sum of their likelihood profiles loses nothing, and every kind of rule reads the
same cells. Weights of blocks make a fold, a resample or a share of the rows.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.evidence import Stratum
from calibrate.evidence.non_inferiority import NonInferiority
from calibrate.evidence.prior import prior_of_fit, prior_share
from calibrate.fitting.constrained_newton import Constraint, Objective
from calibrate.fitting.fit_polynomial import DOMAIN_PERCENTILES
from calibrate.fitting.groups import N_BLOCKS, require_groups, require_rows
from calibrate.fitting.options import Options
from calibrate.solver.likelihood_profile import Profile, plain_power
from calibrate.solver.solved_rows import Rows

NO_ENTROPY = 1e-6  # nats: less is noise of float32
N_CELLS = 512
MAX_SIZES = 64  # more are put together with their neighbours
MIN_CELLS_PER_SIZE = 8
ROUNDING_OF_LOG_N = 1e-9


class Cells(NamedTuple):
    """Ranges of entropies of each set size, none of them empty."""

    entropy: np.ndarray  # (cells,) mean of its rows' entropies, clipped to the domain
    log_n: np.ndarray  # (cells,) mean of its rows'
    size: np.ndarray  # (cells,) number of its set size, rising from 0


def assign_cells(
    entropy: np.ndarray, log_n: np.ndarray, domain: tuple[float, float]
) -> tuple[Cells, np.ndarray]:
    """Cells, and that of each row; entropies beyond the domain are with those at its end."""
    sizes, size = np.unique(log_n, return_inverse=True)
    if len(sizes) > MAX_SIZES:
        size = _even_bins(log_n, np.zeros(len(log_n), int), MAX_SIZES)
        size = np.unique(size, return_inverse=True)[1]
    n_bins = max(MIN_CELLS_PER_SIZE, N_CELLS // (size.max() + 1))
    clipped = np.clip(entropy, *domain)
    bin_index = size * n_bins + _even_bins(clipped, size, n_bins)
    occupied, cell = np.unique(bin_index, return_inverse=True)
    count = np.bincount(cell)
    entropies, sizes = (np.bincount(cell, x) / count for x in (clipped, log_n))
    return Cells(entropies, sizes, occupied // n_bins), cell


def _even_bins(x: np.ndarray, part: np.ndarray, n_bins: int) -> np.ndarray:
    """(rows,) number of each row's bin, of equal widths between the ends of x in its part."""
    lo, hi = np.full(part.max() + 1, np.inf), np.full(part.max() + 1, -np.inf)
    np.minimum.at(lo, part, x)
    np.maximum.at(hi, part, x)
    width = np.where(hi > lo, hi - lo, 1)
    position = (x - lo[part]) / width[part]
    return np.asarray(np.minimum((position * n_bins).astype(int), n_bins - 1))


class Pairs(NamedTuple):
    """The pairs of a cell and a block that have rows, and that of each row."""

    cell: np.ndarray  # (pairs,) rising
    block: np.ndarray  # (pairs,) rising within a cell
    of_row: np.ndarray  # (rows,) place among the pairs

    @classmethod
    def of(cls, cell: np.ndarray, block: np.ndarray) -> "Pairs":
        """Those of rows in these cells and blocks, (rows,) each."""
        number = cell * N_BLOCKS + block
        has_rows = np.bincount(number) > 0
        numbers = np.flatnonzero(has_rows)
        return cls(numbers // N_BLOCKS, numbers % N_BLOCKS, (np.cumsum(has_rows) - 1)[number])

    def total(self, weight: np.ndarray) -> np.ndarray:
        """(pairs,) sums of (rows,) weights."""
        return np.bincount(self.of_row, weight)

    def add_up(self, scores: Profile, weight: np.ndarray) -> Profile:
        """The sums of the scores of rows, each times its weight, (rows,)."""
        return scores.pool(self.of_row, weight, len(self.cell))


@dataclass(frozen=True, eq=False)
class Pool:
    """Scores of rows, added up by cell and block; a pair of them that has rows is one entry."""

    cells: Cells
    cell: np.ndarray  # (pairs,) rising
    block: np.ndarray  # (pairs,) rising within a cell
    scores: Profile  # of the pairs: sums of the score
    weight: np.ndarray  # (pairs,)
    trained: np.ndarray  # (octaves, cells) bool: trained sizes, where log p is bounded below
    trained_log_p: Profile  # of the pairs of these cells: sums of log p
    limit: NonInferiority  # on what rows may lose there
    domain: tuple[float, float]  # of entropies
    n_items: np.ndarray  # the numbers of items that rows have, rising

    @property
    def blocks(self) -> np.ndarray:
        """The blocks that have rows."""
        return np.unique(self.block)

    @property
    def cell_weight(self) -> np.ndarray:
        """(cells,)"""
        return np.bincount(self.cell, self.weight)

    def by_size(self) -> "Pool":
        """With one cell for each set size: for rules that do not depend on entropy."""
        return self._merged(self.cells.size)

    def at_once(self) -> "Pool":
        """With one cell, unless trained sizes are bounded: for constants."""
        return self.by_size() if len(self.trained) else self._merged(np.zeros_like(self.cells.size))

    def _merged(self, key: np.ndarray) -> "Pool":
        """Cells with the same key, from 0, together; those of a key are neighbours."""
        count = np.bincount(key)
        entropy, log_n = (np.bincount(key, x) / count for x in self.cells[:2])
        first = np.flatnonzero(np.diff(key, prepend=-1))
        cell, is_trained = key[self.cell], self._is_trained()
        pairs = Pairs.of(cell, self.block)
        of_trained = Pairs.of(cell[is_trained], self.block[is_trained])
        return replace(
            self,
            cells=Cells(entropy, log_n, key[first]),
            cell=pairs.cell,
            block=pairs.block,
            scores=pairs.add_up(self.scores, np.ones(len(cell))),
            weight=pairs.total(self.weight),
            trained=self.trained[:, first],
            trained_log_p=of_trained.add_up(self.trained_log_p, np.ones(is_trained.sum())),
        )

    def _is_trained(self) -> np.ndarray:
        """(pairs,) bool: True where the cell is of a trained size."""
        is_trained: np.ndarray = np.asarray(self.trained.any(axis=0))[self.cell]
        return is_trained

    def objective(self, block_weights: np.ndarray) -> Objective:
        """The objective of (cells,) beta, with a weight for each block."""
        of_pair = block_weights[self.block]
        total = of_pair @ self.weight
        if not total > 0:
            raise QualityError("the usable rows come from too few groups to hold some out")
        cells = self.scores.pool(self.cell, of_pair / total, len(self.cells.size))
        return Objective(cells, np.ones(len(cells.series)))

    def constraint(self, block_weights: np.ndarray) -> Constraint | None:
        """Lower bounds of mean log p at each trained size; None without any."""
        of_pair, is_trained = block_weights[self.block], self._is_trained()
        weight = self.trained @ np.bincount(self.cell, of_pair * self.weight)
        trained, weight = self.trained[weight > 0], weight[weight > 0]
        if not len(trained):
            return None
        where = np.flatnonzero(self.trained.any(axis=0))
        of_octave = trained[:, where] / weight[:, None]
        _, place = np.unique(self.cell[is_trained], return_inverse=True)  # within `where`
        cells = self.trained_log_p.pool(place, of_pair[is_trained], len(where))
        unbounded = Constraint(cells, where, of_octave, np.zeros(len(trained)))
        plain, _ = unbounded.of_rows(np.ones(trained.shape[1]))
        margin = self.limit.safety_factor * self.limit.margin
        return unbounded._replace(least=plain - margin)


def pool_rows(rows: Rows, options: Options, q: float) -> Pool:
    """The usable ones of rows in blocks, added up by the score (p^q - 1) / q; 0 is log p.

    Log p is bounded below at the set sizes that a limit applies to, by octaves: a fit may use the
    limit's share of its margin.

    Raises:
      QualityError: too few rows, or groups of them.
    """
    rows = rows.take(options.usable(rows))
    require_rows(len(rows.size), "usable misranked" if options.rows == "misranked" else "usable")
    require_groups(rows)
    domain, limit = _domain(rows), options.trained_limit()
    cells, cell = assign_cells(rows.entropy, np.log(rows.items), domain)
    weight, pairs = rows.shares(), Pairs.of(cell, rows.block)
    of_prior = _share_of_prior(rows, weight, options.prior_rows)
    trained = _trained_cells(cells, limit)
    is_trained = np.asarray(trained.any(axis=0))[cell]
    of_trained = Pairs.of(cell[is_trained], rows.block[is_trained])

    def scores(q: float, some: np.ndarray | slice) -> Profile:
        """Of some rows, beside those of the prior's."""
        plain, mean = rows.plain_profile.take(some), rows.mean[some]
        return rows.profile.take(some).power(q).mix(plain_power(plain, mean, q), of_prior)

    return Pool(
        cells=cells,
        cell=pairs.cell,
        block=pairs.block,
        scores=pairs.add_up(scores(q, slice(None)), weight),
        weight=pairs.total(weight),
        trained=trained,
        trained_log_p=of_trained.add_up(scores(0, is_trained), weight[is_trained]),
        limit=limit,
        domain=domain,
        n_items=np.unique(rows.items),
    )


def _domain(rows: Rows) -> tuple[float, float]:
    """The entropies of all rows but the lowest and the highest, nats."""
    ends = np.percentile(rows.entropy, DOMAIN_PERCENTILES)
    lo, hi = (float(end) if end > NO_ENTROPY else 0.0 for end in ends)
    return lo, hi


def _share_of_prior(rows: Rows, weight: np.ndarray, prior_rows: float) -> float:
    """The share of a fit's pseudo-observations beside rows of these weights, (rows,)."""
    of_group = np.bincount(rows.group_index(), weight)
    n_groups = float(1 / (of_group @ of_group))
    failures = n_groups * float(weight @ rows.misranked)
    return prior_share(n_groups, prior_of_fit(prior_rows, failures))[0]


def _trained_cells(cells: Cells, limit: NonInferiority) -> np.ndarray:
    """(octaves, cells) bool: the cells of set sizes under a limit, those of an octave together.

    Sizes that were put together count as their mean, rounded up.
    """
    log_n = np.bincount(cells.size, cells.log_n) / np.bincount(cells.size)
    n = np.ceil(np.exp(log_n - ROUNDING_OF_LOG_N)).astype(int)
    is_trained = np.array([limit.applies_to(Stratum(size)) for size in n.tolist()], bool)
    octave = np.floor(log_n / np.log(2) + ROUNDING_OF_LOG_N)
    trained = [is_trained & (octave == o) for o in np.unique(octave[is_trained])]
    return np.array(trained, bool).reshape(-1, len(log_n))[:, cells.size]
