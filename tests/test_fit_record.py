"""Fit: what it refuses, equality, its parts, how it prints, and its place in JAX."""

import subprocess
import sys

import numpy as np
import pytest

import calibrate
from calibrate.core import rule as rules
from calibrate.core.rule import CONSTANT, RuleForm
from calibrate.store.entries import Entry, make_check_pairs
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import loads

POLYNOMIAL = Entry((0.0, 0.0, 0.0, 0.5, 1.25), (0.5, 5.9))
RECORD = {"degrees_of_freedom": 3.5, "r_squared_log_beta": 0.28}
EVIDENCE = {
    "heads": [RECORD],
    "held_out": [{"n": 64, "inputs": 512, "nll_before": 0.5, "nll_after": 0.4, "se": 0.01}],
    "kinds": [
        {"kind": "baseline", "nll": 0.5},
        {"kind": "constant", "nll": 0.45, "gain": 0.05, "se": 0.02},
    ],
    "verdict": "use it",
}
FIT = Fit(RuleForm(), (POLYNOMIAL,), name="made", evidence=EVIDENCE)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RuleForm(0.0, 1.0, 1e39), r"max_beta=1e\+39"),
        (RuleForm(1e39, 1.0, 2.0), r"min_entropy=1e\+39"),
        (RuleForm(0.0, float("nan"), 2.0), "min_beta=nan"),
        (RuleForm(0.5, kind=CONSTANT), "min_entropy=0.5.* 0 <= min_entropy <= 0,"),
        (
            RuleForm(0.0, outside="identity", kind=CONSTANT),
            "outside='identity'",
        ),
        (RuleForm(kind="spline"), "kind='spline'"),
        (RuleForm.constant(), r"entries\[0\].coefficients are .* give the 1"),
        (RuleForm.log_size(), r"entries\[0\].coefficients are .* give the 2"),
    ],
)
def test_a_rule_has_the_guards_and_numbers_of_its_kind(rule, message):
    with pytest.raises(calibrate.CoefficientsError, match=message):
        Fit(rule, (POLYNOMIAL,))


def constants(*layers_and_heads):
    return tuple(Entry((1.5,), (), *which) for which in layers_and_heads)


def test_no_head_has_two_entries():
    every = (None, None)
    for heads in (
        [every, (0, 0)],
        [(0, 0), every],
        [(0, 0), (0, 0)],
        [(0, 1), (0, None)],
        [(None, 0), (1, 1), (1, 0)],
    ):
        with pytest.raises(
            calibrate.CoefficientsError, match=r"entries\[\d\] .*layer (None|\d), head (None|\d)"
        ):
            Fit(RuleForm.constant(), constants(*heads))
    apart = constants((0, 0), (0, 1), (1, None))
    assert Fit(RuleForm.constant(), apart).entries == apart


def test_fits_are_equal_by_their_rule_and_hashable(make_fit):
    one, same, other = make_fit(), make_fit(name="other-name"), make_fit(max_beta=3.0)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_a_kind_is_known_by_its_name_and_not_by_its_number_of_coefficients(monkeypatch):
    """A line in entropy has two coefficients, as a line in log n does."""
    kind, terms = "entropy-line", ("H", "1")
    monkeypatch.setitem(rules.TERMS, kind, terms)
    monkeypatch.setitem(rules.VARIABLES, kind, ("H",))
    monkeypatch.setitem(rules.N_COEFFICIENTS, kind, 2)
    monkeypatch.setitem(rules.N_DOMAIN, kind, 2)
    fit = Fit(RuleForm(0.0, kind=kind), (Entry((0.5, 1.25), (1.0, 3.0)),))
    assert make_check_pairs(fit.only, kind) == ((1.0, 1.75), (3.0, 2.75))
    assert rules.formula(kind, fit.coefficients) == "0.5 H + 1.25"
    assert fit.only.beta_at(np.array([1.0, 9.0]), None, fit.rule) == pytest.approx([1.75, 2.75])
    assert not fit.ignores_inputs


def test_the_identity_is_a_constant_of_1_and_the_fit_of_an_unnamed_layer():
    identity = calibrate.identity()
    assert (identity.rule, identity.coefficients) == (RuleForm.constant(1.0, 1.0), (1.0,))
    assert (identity.is_identity, identity.ignores_inputs) == (True, True)
    unnamed = Fit(RuleForm(), (Entry(POLYNOMIAL.coefficients, (0.5, 5.9), 0, 3),)).layer(7)
    assert unnamed == identity
    assert loads(dumps(unnamed).encode()) == unnamed


def test_layers_of_a_fit_have_numbers_of_one_shape():
    """So that they share a compiled graph, though the first names fewer heads."""
    fit = Fit(RuleForm.constant(), constants((0, 0), (1, 0), (1, 3)))
    assert fit.layer(0).numbers.shape == fit.layer(1).numbers.shape
    assert fit.layer(0).numbers.shape[1] == 4


def test_the_evidence_of_one_head_is_that_of_the_fit():
    assert (FIT.r_squared, FIT.effective_degrees, FIT.verdict) == (0.28, 3.5, "use it")
    assert FIT.coefficients == POLYNOMIAL.coefficients
    for evidence in ({"heads": [RECORD, RECORD]}, {}):
        fit = Fit(RuleForm.constant(), constants((0, 0), (1, 0)), evidence=evidence)
        assert (fit.r_squared, fit.effective_degrees, fit.verdict) == (None, None, "")
    with pytest.raises(calibrate.CoefficientsError, match="entries per layer"):
        _ = fit.coefficients


def test_a_fit_prints_in_ten_lines_and_its_table_in_two():
    lines = str(FIT).splitlines()
    assert len(lines) <= 10
    assert lines[0] == "made@1: polynomial"
    for part in ("beta = 0.5 H + 1.25", "constant +0.0500 ± 0.0200", "use it"):
        assert part in str(FIT)
    assert "beta = 1.25 (theta = 0.8)" in str(Fit(RuleForm.constant(), (Entry((1.25,)),)))
    rows = [line.split() for line in FIT.table.splitlines()]
    assert rows[1] == ["64", "512", "0.5000", "0.4000", "+0.1000", "±", "0.0100"]
    assert rows[-2:] == [["baseline", "0.5000"], ["constant", "0.4500", "+0.0500", "±", "0.0200"]]
    assert calibrate.identity().table


CALL = "print(jax.jit(lambda x, f: calibrate.adaptive_softmax(x, f))(jax.numpy.zeros(4), fit))"


def test_a_fit_made_before_jax_is_loaded_is_static_in_jax():
    beginning = "import calibrate; fit = calibrate.identity(); import jax; import calibrate.jax"
    code = f"{beginning}\nassert jax.tree.leaves(fit) == []\n{CALL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "0.25" in done.stdout
