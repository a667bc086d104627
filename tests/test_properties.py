"""Properties of every fit of rows: what may not change it, and what changes it in a known way."""

import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import calibrate
from calibrate.core.rule import horner
from calibrate.rows.collect import collect_arrays
from calibrate.rows.logits_files import Arrays


def fit_constant(columns):
    return calibrate.fit(**columns, kind="constant").coefficients


def fit_estimator(columns):
    given = dict(columns)
    arrays = given.pop("logits"), given.pop("target"), given.pop("group")
    estimator = calibrate.SoftmaxCalibrator(kind="constant")
    return estimator.fit(*arrays, sample_weight=given.pop("weight")).coefficients_.coefficients


def fit_polynomial(columns):
    """beta at ten entropies of the domain."""
    collection = collect_arrays(Arrays.in_memory("rows", columns))
    fit = calibrate.fit_polynomial(calibrate.solve(collection))
    return [*horner(np.linspace(*fit.only.domain, 10), fit.coefficients), *fit.only.domain]


DOORS = [fit_constant, fit_estimator, fit_polynomial]


def planted(seed, n, beta, group_size=3):
    """Columns of 120 rows in groups, whose targets are drawn at a beta."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(120, n)) * rng.uniform(1, 4, (120, 1))
    target = (beta * logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return {"logits": logits, "target": target, "group": np.arange(120) // group_size,
            "weight": rng.choice([1.0, 2.0], 120)}  # fmt: skip


def permuted_rows(columns, rng):
    order = rng.permutation(len(columns["target"]))
    return {name: column[order] for name, column in columns.items()}


def rows_twice_at_half_the_weight(columns, rng):
    twice = {name: np.repeat(column, 2, axis=0) for name, column in columns.items()}
    return {**twice, "weight": twice["weight"] / 2}


def permuted_items(columns, rng):
    order = rng.permutation(columns["logits"].shape[1])
    place = np.argsort(order)
    return {**columns, "logits": columns["logits"][:, order], "target": place[columns["target"]]}


def shifted_rows(columns, rng):
    shift = rng.integers(-8, 9, (len(columns["target"]), 1))
    return {**columns, "logits": columns["logits"] + shift}


def other_numbers_of_groups(columns, rng):
    return {**columns, "group": rng.permutation(1_000)[columns["group"]]}


CHANGES = [
    permuted_rows, rows_twice_at_half_the_weight, permuted_items, shifted_rows,
    other_numbers_of_groups,
]  # fmt: skip
# Without the phase that makes a failing example smaller: a fit takes half a second.
quick = partial(settings, deadline=None, derandomize=True, phases=[Phase.generate])
some_rows = partial(
    given, seed=st.integers(0, 2**32), n=st.integers(3, 12), beta=st.sampled_from([0.5, 1.0, 4.0])
)


@pytest.mark.parametrize("fit", DOORS)
@quick(max_examples=2)
@some_rows()
@pytest.mark.slow
def test_what_says_the_same_gives_the_same_fit(fit, seed, n, beta):
    columns = planted(seed, n, beta)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows without a gain
        expected = fit(columns)
        for change in CHANGES:
            actual = fit(change(columns, np.random.default_rng(seed)))
            np.testing.assert_allclose(
                actual, expected, rtol=1e-4, atol=1e-6, err_msg=change.__name__
            )


@pytest.mark.parametrize("fit", [fit_constant, fit_estimator])
@quick(max_examples=3)
@some_rows(power=st.integers(-5, 5))
def test_a_constant_is_in_the_unit_of_the_logits(fit, seed, n, beta, power):
    columns = planted(seed, n, beta, group_size=8)  # too few groups for a slope: quick
    scaled = {**columns, "logits": columns["logits"] * 2.0**power}
    np.testing.assert_allclose(fit(scaled), np.array(fit(columns)) / 2.0**power, rtol=1e-5)
