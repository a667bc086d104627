"""Rows added up by block and cell, which fits read in place of the rows.

A cell is a range of entropies of one set size: its rows are treated as alike, and a rule gives them
one beta. So the sum of their likelihood profiles loses nothing, and every kind of rule reads the
same cells. Weights of blocks make a fold, a resample or a share of the rows.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.fitting.gain import prior_share
from calibrate.fitting.solved_rows import Rows
from calibrate.fitting.weighting import N_BLOCKS, group_weights, row_weights
from calibrate.maths.likelihood import Held, Objective, likelihood
from calibrate.maths.likelihood_profile import Profile, plain_power

N_CELLS = 512
MOST_SIZES = 64  # more are put together with their neighbours
FEWEST_PER_SIZE = 8
HARM = 0.005  # nats of log p that a rule may cost at a size that the head was trained on
TOO_FEW = "the usable rows come from too few groups to hold some out"


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
    if len(sizes) > MOST_SIZES:
        size = _even_bins(log_n, np.zeros(len(log_n), int), MOST_SIZES)
        size = np.unique(size, return_inverse=True)[1]
    n_bins = max(FEWEST_PER_SIZE, N_CELLS // (size.max() + 1))
    clipped = np.clip(entropy, *domain)
    place = size * n_bins + _even_bins(clipped, size, n_bins)
    places, cell = np.unique(place, return_inverse=True)
    count = np.bincount(cell)
    entropies, sizes = (np.bincount(cell, x) / count for x in (clipped, log_n))
    return Cells(entropies, sizes, places // n_bins), cell


def _even_bins(x: np.ndarray, part: np.ndarray, n_bins: int) -> np.ndarray:
    """(rows,) number of each row's bin, of equal widths between the ends of x in its part."""
    lo, hi = np.full(part.max() + 1, np.inf), np.full(part.max() + 1, -np.inf)
    np.minimum.at(lo, part, x)
    np.maximum.at(hi, part, x)
    width = np.where(hi > lo, hi - lo, 1)
    place = (x - lo[part]) / width[part]
    bins: np.ndarray = np.minimum((place * n_bins).astype(int), n_bins - 1)
    return bins


@dataclass(frozen=True, eq=False)
class Pool:
    """Scores of rows, added up by block and cell."""

    cells: Cells
    series: np.ndarray  # (blocks, cells, columns of a profile), of the score
    weight: np.ndarray  # (blocks, cells)
    profile: Profile  # of no rows
    held: np.ndarray  # (held sizes, cells) bool: those at which log p must be kept
    held_series: np.ndarray  # (blocks, held cells, columns of a profile), of log p

    @property
    def blocks(self) -> np.ndarray:
        """Those that have rows."""
        return np.flatnonzero(self.weight.sum(axis=1))

    def by_size(self) -> "Pool":
        """With one cell for each set size: for rules that do not look at entropy."""
        return self._merged(self.cells.size)

    def at_once(self) -> "Pool":
        """With one cell, unless sizes are held: for rules that look at nothing."""
        return self.by_size() if len(self.held) else self._merged(np.zeros_like(self.cells.size))

    def _merged(self, key: np.ndarray) -> "Pool":
        """Cells with the same key together; those of a key are neighbours."""

        def added(x: np.ndarray, key: np.ndarray = key) -> np.ndarray:
            starts = np.flatnonzero(np.diff(key, prepend=-1))
            sums: np.ndarray = np.add.reduceat(x, starts, axis=-1) if len(starts) else x
            return sums

        entropy, log_n = (added(x) / added(np.ones(len(x))) for x in self.cells[:2])
        first = np.flatnonzero(np.diff(key, prepend=-1))
        return replace(
            self,
            cells=Cells(entropy, log_n, key[first]),
            series=added(self.series.swapaxes(1, 2)).swapaxes(1, 2),
            weight=added(self.weight),
            held=self.held[:, first],
            held_series=added(self.held_series.swapaxes(1, 2), key[self.held.any(axis=0)]).swapaxes(
                1, 2
            ),
        )

    def objective(self, block_weights: np.ndarray) -> Objective:
        """The objective of (cells,) beta, with a weight for each block.

        Raises:
          QualityError: no row is left.
        """
        total = block_weights @ self.weight.sum(axis=1)
        if not total > 0:
            raise QualityError(TOO_FEW)
        cells = self.profile._replace(series=np.tensordot(block_weights, self.series, 1) / total)
        return likelihood(cells, np.ones(self.series.shape[1]))

    def held_scores(self, block_weights: np.ndarray) -> Held | None:
        """The mean log p of each held size, and the least that it may be; None without any."""
        weight = self.held @ (block_weights @ self.weight)
        held, weight = self.held[weight > 0], weight[weight > 0]
        if not len(held):
            return None
        where = np.flatnonzero(self.held.any(axis=0))
        share = held[:, where] / weight[:, None]
        series = np.tensordot(block_weights, self.held_series, 1)
        cells = self.profile._replace(series=series)

        def of_rows(beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            value, slope, _ = cells.derivatives(beta[where])
            slopes = np.zeros(held.shape)
            slopes[:, where] = share * slope
            return share @ value, slopes

        plain, _ = of_rows(np.full(held.shape[1], cells.low))
        return Held(of_rows, plain - HARM)


def pool(
    rows: Rows,
    block: np.ndarray,
    domain: tuple[float, float],
    q: float,
    prior_rows: float,
    trained_up_to: int,
) -> Pool:
    """Adds rows up.

    Args:
      rows: to fit.
      block: (rows,) of each.
      domain: of entropies.
      q: of the score (p^q - 1) / q; 0 is log p.
      prior_rows: see calibrate/fitting/gain.py.
      trained_up_to: set sizes up to this are held, those of one octave together; 0 holds none.
    """
    cells, cell = assign_cells(rows.entropy, np.log(rows.items), domain)
    weight, n_cells = row_weights(rows), len(cells.entropy)
    share, _ = prior_share(group_weights(rows), prior_rows)
    place = block * n_cells + cell
    octave = np.floor(cells.log_n / np.log(2) + 1e-9)
    is_held = cells.log_n <= np.log(max(trained_up_to, 0.5)) + 1e-9
    held = np.array([is_held & (octave == o) for o in np.unique(octave[is_held])], bool)

    def added_up(score: Profile) -> np.ndarray:
        pooled = score.pool(place, weight, N_BLOCKS * n_cells).series
        return pooled.reshape(N_BLOCKS, n_cells, -1)

    def score(q: float) -> Profile:
        expected = plain_power(rows.plain_profile, rows.mean, q)
        return rows.profile.power(q).mix(expected, share)

    fitted = score(q)
    series = added_up(fitted)
    log_p = series if q == 0 or not is_held.any() else added_up(score(0))
    return Pool(
        cells,
        series,
        np.bincount(place, weight, N_BLOCKS * n_cells).reshape(N_BLOCKS, n_cells),
        fitted.take(np.empty(0, int)),
        held.reshape(-1, n_cells),
        log_p[:, is_held],
    )
