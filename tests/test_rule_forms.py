"""Forms of rules: designs and constraints; Bernstein form, the same polynomial in every dress."""

import numpy as np
import pytest

from calibrate.maths.rule_forms import (
    basis,
    elevation,
    plain_powers,
    polynomial_form,
)


@pytest.mark.parametrize("to", [4, 9, 24])
def test_elevation_writes_the_same_polynomial(to):
    c = np.array([1.0, -2.0, 5.0, 0.5, 3.0])
    t = np.linspace(0, 1, 101)
    higher = elevation(4, to) @ c
    np.testing.assert_allclose(basis(t, to) @ higher, basis(t, 4) @ c, atol=1e-12)
    value = basis(t, 4) @ c
    assert higher.min() <= value.min()
    assert higher.max() >= value.max()
    if to == 24:  # and comes close to its range
        assert value.min() - higher.min() < 0.2
        assert higher.max() - value.max() < 0.2


def test_plain_powers_are_the_same_polynomial():
    c, domain = np.array([1.0, -2.0, 5.0, 0.5, 3.0]), (0.6, 5.2)
    H = np.linspace(*domain, 101)
    t = (H - 0.6) / 4.6
    np.testing.assert_allclose(
        np.polyval(plain_powers(c, domain), H), basis(t, 4) @ c, rtol=0, atol=1e-11
    )
    constant = plain_powers(np.full(5, 2.5), domain)
    np.testing.assert_allclose(np.polyval(constant, H), 2.5, atol=1e-12)


def test_rows_beyond_the_domain_count_as_at_its_ends():
    """As the runtime has it, which clamps their entropy."""
    design = polynomial_form(np.array([-0.5, 0.5, 4.5, 5.5]), (0.5, 4.5), 1.0, 64.0).design
    np.testing.assert_array_equal(design[[0, 3]], design[[1, 2]])
