"""Wording of messages about models, and about attention of PyTorch."""

import numpy as np
import pytest
import torch
from messages import says
from test_batch_fit import OPTIONS, batches_of, log_p, log_probs
from test_transformers import IDS, make_model, run_captured
from tiny_causal import planted_model

import calibrate
from calibrate.errors import CalibrateError
from calibrate.torch import scaled_dot_product_attention as attend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"key": torch.zeros(2, 4, 11, 7)},
            ValueError,
            (
                "query is (2, 4, 11, 8), key (2, 4, 11, 7) and value (2, 4, 11, 8); give (..., "
                "N, T, W), (..., K, S, W) and (..., K, S, any), K = N or with enable_gqa=True a "
                "divisor of N"
            ),
        ),
        (
            {"value": torch.zeros(2, 4, 10, 8)},
            ValueError,
            (
                "query is (2, 4, 11, 8), key (2, 4, 11, 8) and value (2, 4, 10, 8); give (..., "
                "N, T, W), (..., K, S, W) and (..., K, S, any), K = N or with enable_gqa=True a "
                "divisor of N"
            ),
        ),
        (
            {"key": torch.zeros(2, 2, 11, 8)},
            ValueError,
            (
                "query is (2, 4, 11, 8), key (2, 2, 11, 8) and value (2, 4, 11, 8); give (..., "
                "N, T, W), (..., K, S, W) and (..., K, S, any), K = N or with enable_gqa=True a "
                "divisor of N"
            ),
        ),
        (
            {
                "key": torch.zeros(2, 3, 11, 8),
                "value": torch.zeros(2, 3, 11, 8),
                "enable_gqa": True,
            },
            ValueError,
            (
                "query is (2, 4, 11, 8), key (2, 3, 11, 8) and value (2, 3, 11, 8); give (..., "
                "N, T, W), (..., K, S, W) and (..., K, S, any), K = N or with enable_gqa=True a "
                "divisor of N"
            ),
        ),
        (
            {
                "key": torch.zeros(2, 0, 11, 8),
                "value": torch.zeros(2, 0, 11, 8),
                "enable_gqa": True,
            },
            ValueError,
            (
                "query is (2, 4, 11, 8), key (2, 0, 11, 8) and value (2, 0, 11, 8); give (..., "
                "N, T, W), (..., K, S, W) and (..., K, S, any), K = N or with enable_gqa=True a "
                "divisor of N"
            ),
        ),
        (
            {"value": torch.zeros(2, 4, 11, 8).half()},
            ValueError,
            "query, key, value are torch.float32, torch.float32, torch.float16; give one float",
        ),
        (
            {"attn_mask": torch.ones(3, 1, 11, 11, dtype=bool)},
            ValueError,
            "attn_mask is (3, 1, 11, 11); give what broadcasts to (2, 4, 11, 11)",
        ),
        (
            {"attn_mask": torch.ones(11, 11, dtype=int)},
            TypeError,
            "attn_mask is torch.int64; give bool, True for real keys, or floats",
        ),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap is 0.0; give c > 0, or None"),
        (
            {"sinks": torch.zeros(3)},
            ValueError,
            "sinks is (3, 1, 1); give what broadcasts to (2, 4, 11, 1)",
        ),
        ({"query": torch.zeros(8)}, ValueError, "query is (8,); give (..., heads, queries, width)"),
        (
            {"coefficients": "paper"},
            calibrate.CoefficientsError,
            "coefficients is 'paper'; give a fit, such as calibrate.load('max-retrieval')",
        ),
    ],
)
def test_attention_of_torch(change, error, message, paper):
    arguments = {name: torch.zeros(2, 4, 11, 8) for name in ("query", "key", "value")}
    with says(error, message):
        attend(**(arguments | {"coefficients": paper} | change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": batches_of(8)}, "4 batches are 'batches'; give 8 or more, in smaller batches"),
        (
            {"protect": batches_of(8)},
            "protect= needs log_probs=, which gives what the model predicts",
        ),
        ({"template": ["a"]}, "template has 1 names for 32 batches"),
        (
            {"log_p": lambda *of: log_p(*of) * np.nan},
            "what log_p gives for a batch is not finite; let it return finite nats",
        ),
        (
            {"log_p": lambda *of: log_p(*of).detach()},
            (
                "log_p has no gradient by the model's heads; compute it without torch.no_grad, "
                "detach or .numpy()"
            ),
        ),
        (
            {"protect": batches_of(32), "log_probs": lambda *_: torch.full((4, 9), np.nan)},
            "what log_probs gives for a batch is not finite; let it return finite nats",
        ),
        (
            {"protect": batches_of(32), "log_probs": lambda *of: log_probs(*of).detach()},
            (
                "log_probs has no gradient by the model's heads; compute it without "
                "torch.no_grad, detach or .numpy()"
            ),
        ),
        ({"interpolation": 0}, "interpolation is 0; give a number from 0.01 to 1"),
        (
            {"kind": "quartic"},
            "kind is 'quartic'; give one of constant, log-size, polynomial, entropy-and-size",
        ),
        ({"max_kl": -1}, "max_kl is -1; give a number from 0 to inf"),
        ({"steps": 0}, "steps is 0; give a number from 1 to 1e+06"),
        ({"size": 1}, "size is 1; give 2 or more"),
    ],
)
def test_a_fit_by_a_measure(changes, message):
    arguments = {"batches": batches_of(), "log_p": log_p, **OPTIONS} | changes
    with says(CalibrateError, message):
        calibrate.fit_model(planted_model(), **arguments)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({"query": 99, "target": 0}, "query is 99; give a position in [-40, 40)"),
        (
            {"query": [1], "target": 0},
            (
                "query has 1 values for the 2 sequences of the forward pass; give one for each "
                "sequence, or one for all"
            ),
        ),
        (None, "nothing was recorded; call recorder.next(query, target) before each forward pass"),
        (
            {"query": 3, "target": 9},
            "nothing was recorded; in all 16 rows the target is one that the query cannot see",
        ),
    ],
)
def test_positions_of_queries(positions, message, here):
    with says(calibrate.CalibrateError, message):
        run_captured(make_model("llama"), here, IDS, positions)
