"""Wording of messages about models, and about attention of PyTorch."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from messages import says
from test_batch_fit import OPTIONS, batches_of, log_p, log_probs
from test_encoding import around, encoder, of_bytes, rendered
from test_model_fit import judged, require_improvement
from test_retention_text import windows
from test_transformers import IDS, make_model, run_captured
from test_vllm import FITS, plugged, started  # noqa: F401
from tiny_causal import causal_model, planted_examples, planted_model, runner_of, some_examples
from tiny_models import tiny_model

import calibrate
from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import Rule
from calibrate.datasets.examples import ExampleSet
from calibrate.errors import CalibrateError, CoefficientsError, QualityError
from calibrate.export.architectures import require_supported
from calibrate.export.plan import Exportable
from calibrate.model.candidates import ModelOptions
from calibrate.model.fit import fit_examples
from calibrate.model.scoring import score_fits
from calibrate.model.sensitivity import derivatives
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry
from calibrate.torch import scaled_dot_product_attention as attend
from calibrate.transformers import register, verify
from calibrate.vllm.backend import QueryBeta

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


BY_SIZE = Coefficients(Rule.log_size(), (Entry((0.3, 1.0), (0.0, 6.0)),), name="by-size")
ALIKE = Coefficients(Rule.log_size(), (Entry((0.0, 1.3), (0.0, 6.0)),), name="mine")


def scored(**entry):
    fit = replace(ALIKE, entries=(replace(ALIKE.only, **entry),))
    score_fits(runner_of(causal_model()), some_examples(), [0], {"mine": fit})


def verified(model, fit=ALIKE, part=None):
    """A model with a fit under a name of its own."""
    register("of-messages", fit, part=part)
    model.config._attn_implementation = "of-messages"
    verify(model)


def few_examples(n):
    found = planted_examples(count=16)
    found = ExampleSet(found.cells, found.examples[:n])
    fit_examples(None, SimpleNamespace(set=found, folder="run"), "few", ModelOptions())


def without_finite_logits():
    broken = causal_model()
    broken.model.layers[1].self_attn.q_proj.weight[0, 0] = float("inf")
    derivatives(runner_of(broken), some_examples())


# How to provoke it, what is raised, and its text.
MESSAGES = {
    "training": (
        lambda: calibrate.fit_model(planted_model().train(), batches_of(), log_p, **OPTIONS),
        CalibrateError,
        "the model is in training mode, where dropout is random; call .eval()",
    ),
    "absent-layers": (
        partial(scored, layer=2),
        CoefficientsError,
        (
            "mine@1 has entries for layers [2], which LlamaForCausalLM does not have; load the "
            "fit of this model"
        ),
    ),
    "absent-head": (
        partial(scored, layer=0, head=4),
        CoefficientsError,
        "mine@1 has an entry for head 4, and there are 4 heads; load the fit of this model",
    ),
    "no-look-up": (
        lambda: verified(causal_model("bloom")),
        CoefficientsError,
        (
            "BloomForCausalLM does not look attention up by name: it continues with plain "
            "softmax; give a model that does, such as a Llama"
        ),
    ),
    "absent-layers-of-a-model": (
        lambda: verified(
            make_model("llama"), replace(ALIKE, entries=(replace(ALIKE.only, layer=2),))
        ),
        CoefficientsError,
        (
            "mine@1 has entries for layers [2], which LlamaForCausalLM does not have; load the "
            "fit of this model"
        ),
    ),
    "not-causal-mask": (
        lambda: run_captured(
            make_model("llama"),
            Path(),
            IDS,
            {"query": 1, "target": 0},
            attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.long),
        ),
        TypeError,
        "attn_mask is torch.int64; give bool, True for real keys, or floats",
    ),
    "few-examples": (
        partial(few_examples, 8),
        QualityError,
        (
            "template marked at 24 tokens has 0 examples; collect 8 at least, and better 100, of "
            "each"
        ),
    ),
    "retention-text-moves": (
        lambda: require_improvement(judged(text=0.29), []),
        QualityError,
        (
            "retention text moves by a KL of 0.0150 ± 0.0023 nats per token, and 0.005 is "
            "allowed; collect more of it, or allow more with max_kl="
        ),
    ),
    "trained-lengths-lose": (
        lambda: require_improvement(judged(trained=-0.02, gain=1.0), []),
        QualityError,
        (
            "answers of trained lengths lose 0.0100 ± 0.1824 nats per token, and 0.005 is "
            "allowed; collect more of them (lengths up to trained_up_to=), or allow more with "
            "tolerance="
        ),
    ),
    "no-gain": (
        lambda: require_improvement(judged(0.0, 0.0), []),
        QualityError,
        (
            "not for this model: log p changes by +0.000 ± 0.165 nats on 16 held-out answers; "
            "collect more examples, or see `calibrate model diagnose`"
        ),
    ),
    "word-in-two": (
        lambda: encoder("words").pair("code Xy", "z 12"),
        CalibrateError,
        (
            "the tokenizer does not know the word that the prompt ends in and the answer goes on "
            "with; put the space that belongs between them into the answer, or give other text"
        ),
    ),
    "no-chat-template": (
        lambda: rendered(of_bytes(trims=True, post=around()), [{"role": "user", "content": "x"}]),
        CalibrateError,
        (
            "the model's tokenizer has no chat template for messages; give as prompt what "
            "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) "
            "returns of a tokenizer that has one"
        ),
    ),
    "short-text": (
        lambda: windows(50, [8, 64], 3),
        CalibrateError,
        (
            "text.txt has 50 tokens, too few for a window of 64; give a longer text, or shorter "
            "lengths"
        ),
    ),
    "layers-of-several-parts": (
        lambda: verified(
            tiny_model("bart"), replace(ALIKE, entries=(replace(ALIKE.only, layer=0),))
        ),
        CoefficientsError,
        (
            "layer 0 is each of decoder.layers.*.encoder_attn, decoder.layers.*.self_attn, "
            "encoder.layers.*.self_attn; give part= of one of them"
        ),
    ),
    "positions-for-vllm": (
        lambda: QueryBeta(BY_SIZE, 4, slice(0, 4), None)(
            torch.zeros(1, 4, 9, 8), torch.zeros(3, 1, 9)
        ),
        CalibrateError,
        (
            "the model does not tell its attention the position of each token, which a rule of "
            "log n needs; serve a fit of constants"
        ),
    ),
    "text-model": (
        lambda: require_supported(transformers.LlavaConfig()),
        CalibrateError,
        (
            "a model of type 'llava' cannot be exported: it holds several models; its text model "
            "is of type llama; serve it with calibrate.transformers, or give one of <*>"
        ),
    ),
    "logits-not-finite": (
        without_finite_logits,
        CalibrateError,
        (
            "log p of an answer of 20 tokens is nan: the model's logits are not finite; load it "
            "in float32, or restore its weights"
        ),
    ),
    "token-unknown": (
        lambda: derivatives(runner_of(causal_model(vocab_size=9)), some_examples()),
        CalibrateError,
        (
            "an example has token 498, and this model knows 0 to 8; give the model that the "
            "examples were made for"
        ),
    ),
    "heads-per-layer": (
        lambda: ModelOptions("constant", engines=Exportable(Sharing.PER_LAYER), heads_per_layer=2),
        CalibrateError,
        "heads of this model share their constants in engines; leave heads_per_layer= out",
    ),
    "one-slope": (
        lambda: ModelOptions("log-size", engines=Exportable(Sharing.PER_HEAD), heads_per_layer=2),
        CalibrateError,
        "engines have one slope by log n for all heads; leave heads_per_layer= out",
    ),
    "no-model-to-capture": (
        lambda: calibrate.capture("model", Path("run")).__enter__(),
        CalibrateError,
        (
            "model is a str; give a model of Transformers or Flax nnx, or save its logits for "
            "`calibrate collect`"
        ),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_names_the_fault_and_the_remedy(name):
    fails, kind, text = MESSAGES[name]
    with says(kind, text):
        fails()


# What vLLM asks for, and the reason why a fit cannot be applied exactly.
NOT_EXACT = (
    "vLLM cannot apply a fit to this model exactly: <*>; serve it with calibrate.transformers"
)
OF_VLLM = {
    "ranks": (
        {"n_ranks": 3},
        NOT_EXACT.replace("<*>", "4 heads are not divided evenly among 3 ranks"),
    ),
    "encoder": (
        {"is_causal": False},
        NOT_EXACT.replace("<*>", "a query sees later keys too, so that n is not its position"),
    ),
    "own implementation": (
        {"architecture": "LlamaForCausalLM"},
        "vLLM would run LlamaForCausalLM by LlamaForCausalLM, where mine@1 is not applied; start "
        "it with --model-impl transformers",
    ),
}


@pytest.mark.parametrize("name", OF_VLLM)
def test_a_start_of_vllm(name, plugged):  # noqa: F811
    options, text = OF_VLLM[name]
    with says(CalibrateError, text):
        started(plugged(FITS["log n"]), causal_model().config, **options)


def test_a_soft_cap_in_vllm(plugged):  # noqa: F811
    reason = "attn_logit_softcapping is 2.0, and would have to grow with beta"
    with says(CalibrateError, NOT_EXACT.replace("<*>", reason)):
        started(plugged(FITS["alike"]), causal_model("gemma2").config)


def test_the_id_of_a_fit_in_vllm(plugged):  # noqa: F811
    text = (
        "CALIBRATE_VLLM_FIT is unnamed@1, whose id is sha256:<*>, and CALIBRATE_VLLM_FIT_ID is "
        "'sha256:0'; set it to the id of the fit that you mean"
    )
    with says(CoefficientsError, text):
        plugged(FITS["alike"], "sha256:0")
