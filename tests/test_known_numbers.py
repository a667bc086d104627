"""Numbers that pencil and paper give: each row is a value of ours and the formula that it must be.

Rows of two kinds of items keep every formula short: k items of one logit beside one or two others.
At the end are numbers by mpmath, at 50 digits. Least squares by NumPy are in test_least_squares.py,
one constant by scikit-learn in test_sklearn.py.
"""

from math import exp, inf, log

import numpy as np
import pytest

import calibrate

LN2, LN3 = log(2), log(3)
PAPER = (-0.037, 0.481, -2.3, 4.917, -1.791)  # section 3 of the paper, from H^4 to 1


def with_copies(logits, copies):
    """A row: the logits, then `copies` items of logit 0."""
    return np.array([*logits, *[0.0] * copies], np.float32)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([5.0], 0),
        ([0.0, 0.0], LN2),
        (np.zeros(64), 6 * LN2),
        (np.zeros(4096), 12 * LN2),
        ([0.0, LN3], 2 * LN2 - 0.75 * LN3),  # p = 1/4, 3/4
        ([LN2, 0.0, 0.0], 1.5 * LN2),  # p = 1/2, 1/4, 1/4
        ([7 + LN2, 7.0, 7.0], 1.5 * LN2),  # logits that move together
        ([LN2, 0.0, 0.0, -inf], 1.5 * LN2),  # a masked item
        (with_copies([log(12)], 12), LN2 + log(12) / 2),  # half on one item, half on twelve
        ([1e4, 0.0, -1e4], 0),
    ],
)
def test_entropy(logits, expected):
    entropy = float(calibrate.entropy(np.array(logits, np.float32)))
    assert entropy == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("logits", "target", "beta"),
    [
        # One item at 1 + a, the target at 1 and k at 0 have a exp((1 + a) beta) = k.
        (with_copies([2, 1], 2), 1, LN2 / 2),
        (with_copies([2, 1], 4), 1, LN2),
        (with_copies([2, 1], 100), 1, log(10)),
        (with_copies([1.5, 1], 100), 1, log(200) / 1.5),
        (with_copies([3, 1], 100), 1, log(50) / 3),
        (with_copies([4, 2], 4), 1, LN2 / 2),  # logits in other units
        (with_copies([12, 11], 4) - [0, 0, -10, -10, -10, -10], 1, LN2),  # and with another zero
        ([2.0, 1.0, 0.0], 1, 0),  # the target is at the mean
        ([2.0, 1.0, 0.0], 2, 0),
        ([2.0, 1.0, 0.0], 0, inf),  # and at the top
    ],
)
def test_optimal_beta(logits, target, beta):
    found = calibrate.optimal_beta(np.array(logits, np.float32), target).beta
    assert float(found) == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize(
    ("entropy", "beta"),
    # -0.037 H^4 + 0.481 H^3 - 2.3 H^2 + 4.917 H - 1.791, where H > 1/2 and beta > 1
    [(0.5, 1), (1.0, 1.27), (1.5, 1.8455625), (2.0, 2.099), (4.0, 2.389), (5.0, 2.294), (6.0, 1)],
)
def test_beta_of_the_paper(entropy, beta, paper):
    found = calibrate.inverse_temperature(np.float32(entropy), paper)
    assert float(found) == pytest.approx(beta, rel=2e-6)


@pytest.mark.parametrize("copies", [1, 7, 63])
def test_probabilities_of_the_paper(copies, paper):
    """The item at ln 2 beside k at 0 has p = 2^beta / (2^beta + k)."""
    p = 2 / (2 + copies)
    entropy = -p * log(p) - (1 - p) * log((1 - p) / copies)
    beta = 1.0
    if entropy > 0.5:
        beta = max(1, sum(c * entropy**k for c, k in zip(PAPER, (4, 3, 2, 1, 0), strict=True)))
    found = calibrate.adaptive_softmax(with_copies([LN2], copies), paper)
    expected = exp(beta * LN2) / (exp(beta * LN2) + copies)
    assert float(found[0]) == pytest.approx(expected, rel=2e-6)


ROW = [0.25, 3.5, -1.75, 2.0, 0.0, 3.0, 1.125, -4.0]  # exact in float32


def test_a_row_at_fifty_digits(paper):
    """Entropy, beta and probabilities of the paper's rule, and the optimal beta of item 3."""
    mpmath = pytest.importorskip("mpmath", reason="comes with the extra torch")
    with mpmath.workdps(50):
        z = [mpmath.mpf(x) for x in ROW]

        def softmax(beta):
            weights = [mpmath.exp(beta * x) for x in z]
            return [w / mpmath.fsum(weights) for w in weights]

        def excess(beta):  # E[z] - z_3, which is 0 at the optimal beta of item 3
            return mpmath.fsum(p * x for p, x in zip(softmax(beta), z, strict=True)) - z[3]

        entropy = -mpmath.fsum(p * mpmath.log(p) for p in softmax(1))
        beta = mpmath.fsum(mpmath.mpf(str(c)) * entropy ** (4 - k) for k, c in enumerate(PAPER))
        probs = [float(p) for p in softmax(beta)]
        optimal = float(mpmath.findroot(excess, (0.1, 1), solver="anderson"))
    row = np.array(ROW, np.float32)
    assert float(calibrate.entropy(row)) == pytest.approx(float(entropy), rel=3e-7)
    np.testing.assert_allclose(calibrate.adaptive_softmax(row, paper), probs, rtol=1e-5)
    assert float(calibrate.optimal_beta(row, 3).beta) == pytest.approx(optimal, rel=1e-6)
    assert float(calibrate.commitment(row)) == pytest.approx(log(8) - float(entropy), rel=1e-6)
