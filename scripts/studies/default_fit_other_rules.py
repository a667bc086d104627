"""Rules beyond the file format: gains of other degrees, other variables and two variables.

Used by default_fit.py. Every rule is a polynomial fitted by likelihood to all rows above the
entropy threshold, and scored by mean log p_t on the rows of another collection.
"""

import itertools
from collections.abc import Callable

import numpy as np
from scipy.special import entr, softmax

from calibrate.core.row_batches import row_entropy
from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import Form
from calibrate.fitting.constrained_newton import Objective
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.multistart import maximise
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.solver.likelihood_profile import from_nodes, nodes
from calibrate.solver.solved_rows import Rows, concatenate_rows, solve_rows

LOW, HIGH = Rule().min_beta, Rule().max_beta
N_CONSTRAINTS = 600  # rows at which a rule keeps the bounds, beside the ends of its variables
TOLERANCE = 0.1  # nats: where rows without a constraint are clipped, the bound is far from exact
DIFFUSE_SCALES = (0.05, 0.5)  # standard deviations of logits of diffuse rows
Features = Callable[[Rows, np.ndarray], np.ndarray]

VARIABLES: dict[str, tuple[Features, int]] = {
    **{
        f"H, degree {d}": (lambda rows, gap: rows.entropy[:, None], d) for d in (1, 4, 6)
    },
    "log n, degree 1": (lambda rows, gap: np.log(rows.items)[:, None], 1),
    "commitment, degree 4": (lambda rows, gap: commitment(rows)[:, None], 4),
    "top-two gap, degree 4": (lambda rows, gap: gap[:, None], 4),
    "H and log n, degree 3": (
        lambda rows, gap: np.column_stack([rows.entropy, np.log(rows.items)]), 3
    ),
    "H and top-two gap, degree 3": (lambda rows, gap: np.column_stack([rows.entropy, gap]), 3),
}  # fmt: skip
MIXED = ("H, degree 4", "log n, degree 1", "commitment, degree 4", "H and log n, degree 3")


def commitment(rows: Rows) -> np.ndarray:
    """log n - H, nats."""
    return np.log(rows.items) - rows.entropy


def scores_beyond(
    fitted: Rows, fitted_gap: np.ndarray, held_out: Rows, held_out_gap: np.ndarray
) -> dict[str, float]:
    """Held-out mean log p_t of each rule above the gate, sizes equal; and on a mixture."""
    train, test = (_above_gate(*rows) for rows in ((fitted, fitted_gap), (held_out, held_out_gap)))
    scores = {"plain": test[0].shares() @ test[0].log_p(np.ones(len(test[1])))}
    scores |= {name: _score(train, test, *VARIABLES[name]) for name in VARIABLES}
    mixed_train, mixed_test = (
        _with_diffuse(*rows, seed) for seed, rows in enumerate((train, test))
    )
    plain = mixed_test[0].log_p(np.ones(len(mixed_test[1])))
    scores["mixture: plain"] = mixed_test[0].shares() @ plain
    for name in MIXED:
        scores[f"mixture: {name}"] = _score(mixed_train, mixed_test, *VARIABLES[name])
    rows = concatenate_rows([fitted, diffuse_rows(fitted)])
    log_p = mixed_test[0].log_p(
        applied_beta(fit_and_select(rows, Options()).published.coefficients, mixed_test[0])
    )
    return scores | {"mixture: calibrate fit": mixed_test[0].shares() @ log_p}


def diffuse_rows(rows: Rows) -> Rows:
    """As many rows of the same sizes, whose target is any of the items, as a user would have them.

    Fits see one target of each; the scores of a mixture are expected over all of them.
    """
    rng, parts = np.random.default_rng(2), []
    for n, count in zip(*np.unique(rows.size, return_counts=True), strict=True):
        scale = rng.uniform(*DIFFUSE_SCALES, (count, 1))
        z = (scale * rng.standard_normal((count, n))).astype(np.float32)
        parts.append(solve_rows(z, rng.integers(0, n, count), row_entropy(z), int(n)))
    return concatenate_rows(parts)


def _above_gate(rows: Rows, gap: np.ndarray) -> tuple[Rows, np.ndarray]:
    above = rows.entropy > Rule().min_entropy
    return rows.take(above), gap[above]


def _score(
    train: tuple[Rows, np.ndarray], test: tuple[Rows, np.ndarray], features: Features, degree: int
) -> float:
    x, x_test = features(*train), features(*test)
    lo, hi = np.percentile(x, (0.5, 99.5), axis=0)
    design, design_test = (_products(_normalise(v, lo, hi), degree) for v in (x, x_test))
    rng = np.random.default_rng(0)
    some = rng.choice(len(design), min(N_CONSTRAINTS, len(design)), replace=False)
    matrix = design[np.concatenate([some, x.argmin(axis=0), x.argmax(axis=0)])]
    ones = np.eye(design.shape[1])[0]
    form = Form(design, matrix, np.full(len(matrix), LOW), np.full(len(matrix), HIGH), ones)
    weight = _equal_sizes(train[0])
    objective = Objective(train[0].profile, weight)
    c = maximise([objective], form, LOW, HIGH, tolerance=TOLERANCE)[0].coefficients
    beta = np.clip(design_test @ c, LOW, HIGH)
    return float(test[0].shares() @ test[0].log_p(beta))


def _normalise(x: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """x clipped to [lo, hi], mapped to [-1, 1]."""
    return 2 * (np.clip(x, lo, hi) - lo) / (hi - lo) - 1


def _products(x: np.ndarray, degree: int) -> np.ndarray:
    """Products of Chebyshev polynomials up to the total degree, the constant first."""
    single = np.polynomial.chebyshev.chebvander(x, degree)  # (rows, variables, degree + 1)
    powers = itertools.product(range(degree + 1), repeat=x.shape[1])
    exponents = sorted((p for p in powers if sum(p) <= degree), key=sum)
    variables = np.arange(x.shape[1])
    return np.column_stack([single[:, variables, p].prod(axis=1) for p in exponents])


def _equal_sizes(rows: Rows) -> np.ndarray:
    sizes, index, count = np.unique(rows.size, return_inverse=True, return_counts=True)
    return 1 / (len(sizes) * count[index])


def _with_diffuse(rows: Rows, gap: np.ndarray, seed: int) -> tuple[Rows, np.ndarray]:
    """The rows, and as many whose target is every item equally: their score is -KL(uniform, p)."""
    rng = np.random.default_rng(seed)
    betas = nodes(LOW, HIGH)
    H, second = np.empty(len(gap)), np.empty(len(gap))
    values, slopes = (np.empty((len(gap), len(betas))) for _ in range(2))
    for i, n in enumerate(rows.items):
        z = rng.uniform(*DIFFUSE_SCALES) * rng.standard_normal(n)
        H[i] = entr(softmax(z)).sum()
        top = np.partition(z, -2)[-2:]
        second[i] = top[1] - top[0]
        spread = z - z.max()
        weights = np.exp(betas[:, None] * spread)
        mass = weights.sum(axis=1)
        values[i] = betas * spread.mean() - np.log(mass) + np.log(n)
        slopes[i] = spread.mean() - weights @ spread / mass
    series = np.concatenate([rows.profile.series, from_nodes(values, slopes, LOW, HIGH).series])
    profile = rows.profile._replace(series=series)
    doubled = rows.take(np.tile(np.arange(len(gap)), 2))
    mixed = doubled._replace(entropy=np.concatenate([rows.entropy, H]), profile=profile)
    return mixed, np.concatenate([gap, second])
