"""Wording of messages about arrays: in fits, in the solver, in softmax and attention of JAX."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import qkv
from cases import per_head
from messages import says

import calibrate
from calibrate.attention import dot_product_attention
from calibrate.core.rule import Rule
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(40, 16))
T = Z.argmax(1)
FALSE_TRUE = np.array([False, True])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (Z[0], T),
            {},
            (
                "logits are float64(16,); give floats (rows, n), n at least 2, or (heads, rows, "
                "n) with the number of each head as head (heads,)"
            ),
        ),
        (
            ([[1.0, 2.0], [[1.0]]], T),
            {},
            "logits is a list that NumPy cannot read (<*>); give an array",
        ),
        (([[1.0, 2.0], [1.0]], T), {}, "target is int64(40,); give integers (2,), or bool (2, 2)"),
        (
            ([[1.0, 2.0], [1.0]], [0, 1]),
            {"mask": [[True], [True, False]]},
            "rows of mask have other lengths than those of logits",
        ),
        ((Z, None), {}, "target is object(); give integers (40,), or bool (40, 16)"),
        (
            (Z, T, np.ones(15, bool)),
            {},
            "mask is bool(15,); give bool (40, 16) or (16,), True for real items",
        ),
        (([Z, Z], [T]), {}, "target is not a list of 2 arrays, as logits is"),
        (
            ([Z, Z], [T, T[1:]]),
            {},
            "part 1: target is int64(39,); give integers (40,), or bool (40, 16)",
        ),
        ((Z, T), {"q": 2}, "q is 2; give a number from 0 to 1"),
        ((Z, T), {"held_out": 1}, "held_out is 1; give a share of the rows between 0 and 1"),
        ((Z, T), {"seed": -1}, "seed is -1; give an integer from 0 to 2^64 - 1"),
        ((Z, T), {"trained_up_to": 16.5}, "trained_up_to is 16.5; give an integer"),
        ((Z, T), {"tolerance": -0.1}, "tolerance is -0.1; give a number from 0 to inf"),
        ((Z, T), {"seed": 0.5}, "seed is 0.5; give an integer from 0 to 2^64 - 1"),
    ],
)
def test_arrays_and_options_of_a_fit(arguments, options, message):
    with says(CalibrateError, message):
        calibrate.fit(*arguments, **options)


@pytest.mark.parametrize(
    ("logits", "target", "where", "message"),
    [
        (
            np.zeros((2, 3)),
            np.array([0]),
            None,
            (
                "target is int64 of shape (1,), logits have (2, 3); give an integer position for "
                "each row, or bools, True at each target"
            ),
        ),
        (
            np.zeros((2, 3)),
            np.array([0, 3]),
            None,
            "target of row (1,) is not a position in [0, 3)",
        ),
        (
            np.zeros((2, 3)),
            np.array([0, -1]),
            None,
            "target of row (1,) is not a position in [0, 3)",
        ),
        (
            np.zeros((2, 3)),
            np.array([0.0, 1.0]),
            None,
            (
                "target is float64 of shape (2,), logits have (2, 3); give an integer position "
                "for each row, or bools, True at each target"
            ),
        ),
        (
            np.array([[1.0, np.nan]]),
            np.array([0]),
            None,
            "logits of row (0,) hold NaN or +inf; leave such rows out",
        ),
        (
            np.array([[1.0, -np.inf]]),
            np.array([1]),
            None,
            "target of row (0,) is no unmasked item; choose real items",
        ),
        (
            np.ones((1, 2)),
            np.array([1]),
            ~FALSE_TRUE[None],
            "target of row (0,) is no unmasked item; choose real items",
        ),
        (np.ones((1, 2)), np.array([1]), ~FALSE_TRUE, "where has shape (2,), logits (1, 2)"),
        (
            np.zeros((2, 3)),
            np.ones(2, bool),
            None,
            (
                "target is bool of shape (2,), logits have (2, 3); give an integer position for "
                "each row, or bools, True at each target"
            ),
        ),
        (
            np.zeros((2, 3)),
            np.ones((2, 3), int),
            None,
            (
                "target is int64 of shape (2, 3), logits have (2, 3); give an integer position "
                "for each row, or bools, True at each target"
            ),
        ),
        (
            np.zeros(()),
            np.ones((), bool),
            None,
            (
                "target is bool of shape (), logits have (); give an integer position for each "
                "row, or bools, True at each target"
            ),
        ),
        (
            np.zeros((2, 3)),
            np.eye(2, 3, 1) > 2,
            None,
            "target of row (0,) is no unmasked item; choose real items",
        ),
        (
            np.array([0, -np.inf]),
            FALSE_TRUE,
            None,
            "target of row () is no unmasked item; choose real items",
        ),
    ],
)
def test_rows_to_solve(logits, target, where, message):
    with says(ValueError, message):
        calibrate.optimal_beta(logits, target, where)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"implementation": "cudnn"},
            "only implementation='xla' without a residual can apply a fit",
        ),
        ({"return_residual": True}, "only implementation='xla' without a residual can apply a fit"),
        ({"mask": np.ones((2, 1, 11, 11))}, "mask is float32; give bool, or add it as a bias"),
        (
            {"mask": np.ones((3, 1, 1, 1), bool)},
            "mask is (3, 1, 1, 1); give what broadcasts to (2, 4, 11, 11)",
        ),
        (
            {"bias": np.ones((2, 3, 11, 11))},
            "bias is (2, 3, 11, 11); give what broadcasts to (2, 4, 11, 11)",
        ),
        (
            {"query_seq_lengths": np.ones(3, np.int32)},
            "query_seq_lengths is [1 1 1]; give 2 integers",
        ),
        (
            {"query_seq_lengths": np.ones(2, np.float32)},
            "query_seq_lengths is [1. 1.]; give 2 integers",
        ),
        ({"scale": np.ones(8)}, "scale has shape (8,); give one number"),
        (
            {"query": np.ones((2, 11, 3, 8), np.float32)},
            (
                "query, key, value are (2, 11, 3, 8), (2, 11, 2, 8), (2, 11, 2, 8); give (B, T, "
                "N, H), (B, S, K, H) and (B, S, K, H), with N a multiple of K"
            ),
        ),
        (
            {"value": np.ones((2, 10, 2, 8), np.float32)},
            (
                "query, key, value are (2, 11, 4, 8), (2, 11, 2, 8), (2, 10, 2, 8); give (B, T, "
                "N, H), (B, S, K, H) and (B, S, K, H), with N a multiple of K"
            ),
        ),
        (
            {"value": np.ones((2, 11, 2, 8), np.float16)},
            "query, key, value are float32, float32, float16; give one dtype",
        ),
        ({"query": np.ones((2, 11, 4, 8), np.complex64)}, "query is complex64; give real numbers"),
        (
            {"coefficients": "paper"},
            "coefficients is 'paper'; give a fit, such as calibrate.load('max-retrieval')",
        ),
    ],
)
def test_attention_of_jax(change, message, paper):
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | {"coefficients": paper}
    error = {"complex": TypeError, "give a": calibrate.CoefficientsError}
    kind = next((e for words, e in error.items() if words in message), ValueError)
    with says(kind, message):
        dot_product_attention(**arguments | change)


PAPER = calibrate.load("paper")
HEADS, _ = per_head("polynomial")
LAYERED = replace(PAPER, entries=(replace(PAPER.only, layer=3),))
BY_SIZE = Coefficients(Rule.log_size(), (Entry((0.5, 0.6), (2.7, 7.0)),), name="by-size")
beta, softmax = calibrate.inverse_temperature, calibrate.adaptive_softmax


def zeros(*shape):
    return np.zeros(shape, np.float32)


# How to provoke it, what is raised, and its text.
MESSAGES = {
    "no-fit": (
        lambda: beta(1.0, None),
        CoefficientsError,
        "coefficients is None; give a fit, such as calibrate.load('max-retrieval')",
    ),
    "no-axis-of-heads": (
        lambda: softmax(zeros(4), HEADS),
        CoefficientsError,
        (
            "unnamed@1 has an entry per head, and an array of shape (4,) has no axis of heads; "
            "give (..., heads, queries, items)"
        ),
    ),
    "axis-of-heads": (
        lambda: softmax(zeros(4, 4, 4), HEADS, 0),
        CoefficientsError,
        (
            "unnamed@1 has an entry per head, and axis is 0; give logits (..., heads, queries, "
            "items) and axis=-1"
        ),
    ),
    "other-heads": (
        lambda: softmax(zeros(2, 5, 9), HEADS),
        CoefficientsError,
        "unnamed@1 has an entry for head 2, and there are 2 heads; load the fit of this model",
    ),
    "no-n": (
        lambda: beta(2.0, BY_SIZE),
        CoefficientsError,
        "by-size@1 is of kind log-size; give n=, the number of unmasked items",
    ),
    "no-entropy": (
        lambda: beta(None, PAPER, n=3),
        CoefficientsError,
        "paper@1 is of kind entropy-polynomial; give H, the entropy of the items",
    ),
    "several-layers": (
        lambda: softmax(zeros(4, 4, 4), LAYERED),
        CoefficientsError,
        "paper@1 has entries per layer; choose one: coefficients.layer(i)",
    ),
    "complex": (
        lambda: softmax(zeros(4).astype(complex), PAPER),
        TypeError,
        "logits are complex64; give real ones",
    ),
    "bound": (
        lambda: calibrate.fit(zeros(40, 4), np.zeros(40, int), min_beta=1.5),
        CalibrateError,
        "min_beta is 1.5; give a number from 0.015625 to 1",
    ),
    "fingerprint-of-a-text": (
        lambda: calibrate.fingerprint({"name": "x"}),
        CalibrateError,
        "name is <U1; give arrays or numbers",
    ),
    "fingerprint-of-no-file": (
        lambda: calibrate.fingerprint("absent"),
        CalibrateError,
        "'absent' is not a file; give one, or arrays",
    ),
    "keyword-of-before": (
        lambda: calibrate.collect("max-retrieval", [16], 8, fresh=True),
        TypeError,
        "collect() has no fresh=; it is overwrite= now",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_softmax_and_other_functions(name):
    fails, kind, text = MESSAGES[name]
    with says(kind, text):
        fails()
