"""A check that an engine applies the fit of an export, by its log p of the next tokens.

For prompts of growing length, e is the engine's log p of tokens that it lists, f the model's under
the fit, and p under plain softmax. The share of the way from plain softmax to the fit is

    s = sum (e - p)(f - p) / sum (f - p)^2,

1 if the fit is applied, 0 if not; its error is from prompt to prompt. Prompts of one token, whose
attention no rule changes, give the engine's noise, v: the most that e is off from the nearer of the
two. Let r be three errors of s, widened by Student's t, or 1/4 if that is more, and d what f and p
differ.

- Cannot tell: d is v or less.
- Something else: e is off from f and from p by more than 5 v and a tenth of d (half if no text is
  one token, so that v is not known); or by more than 3 v, and s from 1 and 0 by r.
- The fit, or plain softmax: s is within r of 1, or of 0. Cannot tell: of both, or of neither.

Differences are root mean squares, in nats.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrate.datasets.examples import Example
from calibrate.errors import CalibrateError, parameter
from calibrate.evidence.estimate import t_quantile_ratio
from calibrate.export.engine import Engine
from calibrate.export.plan import ExportContents, Plan
from calibrate.prompts.make_examples import ExampleSpec, make_examples
from calibrate.prompts.prompts_file import read_prompts
from calibrate.transformers.answer_logits import answer_logits
from calibrate.transformers.betas import HeadBetas, head_betas
from calibrate.transformers.folders import ModelFolder

FIT = "fit"
PLAIN = "plain"
CONSTANTS = "constants"  # a log-size rule without its term of log n
OTHER = "something else"
UNKNOWN = "cannot tell"
_TEMPLATES = ("numbers", "towns")
_LENGTHS = (128, 512, 1024)
_N_SINGLE = 4
_NEAR = 1 / 4
_OFF = 1 / 10
_ERRORS = 3
_NOISES = 3
_MANY_NOISES = 5


class EngineCheck(NamedTuple):
    """The rule that an engine applies; see above."""

    engine: str
    applies: str  # FIT, PLAIN, OTHER or UNKNOWN
    share: float
    error: float
    noise: float  # nats; 0 if it is not known
    effect: float  # nats: what the fit changes
    off: dict[str, float]  # nats: what the engine is off from each prediction
    off_from: int | None  # the tokens from which on it is off from the fit
    prompts: list[tuple[int, dict[str, float]]]  # tokens and the same of each


def check_engine(
    carried: ExportContents,
    model: Path | None,
    engine: str,
    served: str | None,
    prompts: Path | None,
) -> EngineCheck:
    """Asks an engine that should serve an export; f and p are those of its model.

    That is the export, with the fit undone for p, or the original, `model`, with the fit for f.
    """
    if model is None and carried.model_type == "mistral3":  # a .gguf file; folders say ministral3
        raise CalibrateError(
            f"Transformers does not load {carried.path}; give {parameter('model')}, its original"
        )
    if prompts:
        read_prompts(prompts)  # before a model is read
    folder, plan = ModelFolder(model or carried.path), carried.plan
    assert plan is not None
    lengths = tuple(sorted({min(n, (folder.context or n) - 1) for n in _LENGTHS}))
    spec = ExampleSpec(prompts, () if prompts else _TEMPLATES, lengths=lengths, count=1)
    examples = make_examples(spec, folder)[0].examples
    contexts = dict.fromkeys(tuple(x.tokens[: x.start].tolist()) for x in examples)
    longest = max(contexts, key=len)
    single = [(i,) for i in dict.fromkeys(longest[:: -(-len(longest) // _N_SINGLE)])]
    tokenizer = None
    with suppress(CalibrateError):  # prompts may be token ids
        tokenizer = folder.tokenizer()
    server = Engine(engine, tokenizer, folder.vocabulary, served)
    listings = [(ids, server.ask(ids)) for ids in map(list, [*single, *contexts])]
    listings = [(ids, listed) for ids, listed in listings if listed]
    server.require_prompts(len(ids) for ids, _ in listings)
    loaded = folder.load(folder.dtype(), allow_unexpected=bool(carried.metadata.get("unexpected")))
    with torch.no_grad(), head_betas(loaded) as heads:
        if not set(heads.heads) <= plan.factors.keys():
            raise CalibrateError(f"{model} has other heads than {carried.path}; give its original")
        answers = [_answer(loaded, heads, plan, model is None, *listing) for listing in listings]
    return judged(server.url, answers)


def _betas(heads: HeadBetas, plan: Plan, exported: bool, n_items: int) -> list[torch.Tensor]:
    """(1, heads, n_items - 1) the betas of f, of p, and of CONSTANTS where that is another rule.

    An exported model has the fit's betas already, by which they are divided.
    """
    factors = torch.tensor([plan.factors[head] for head in heads.heads])[None, :, None]
    fit = factors * (1 + plan.ratio * torch.arange(1, n_items).log())
    betas = [fit, torch.ones_like(fit)] + ([factors + 0 * fit] if plan.ratio else [])
    return [beta / fit if exported else beta for beta in betas]


def _answer(
    model: Any,
    heads: HeadBetas,
    plan: Plan,
    exported: bool,
    ids: list[int],
    listed: list[dict[int, float]],
) -> tuple[int, np.ndarray]:
    """The tokens of a prompt, and log p of those listed after it; see `judged`."""
    listed = listed[: 1 if len(ids) == 1 else None]  # the next position has two items
    chosen = [max(top, key=top.__getitem__) for top in listed]
    rows = [[p for top in listed for p in top.values()]]
    for betas in _betas(heads, plan, exported, len(ids) + len(listed)):
        heads.betas = betas
        example = Example(np.array([*ids, *chosen], np.int32), len(ids), 0)
        (log_p,) = answer_logits(model, [example]).double().log_softmax(-1).tolist()
        rows.append([row[i] for row, top in zip(log_p, listed, strict=True) for i in top])
    return len(ids), np.array(rows)


def judged(engine: str, answers: Sequence[tuple[int, np.ndarray]]) -> EngineCheck:
    """The check of an engine by tokens of prompts, and (e, f, p, that of CONSTANTS) after each."""
    longer = sorted((x for x in answers if x[0] > 1), key=lambda x: x[0])
    single = [min(_off(x).values()) for n, x in answers if n == 1]
    noise, part = max(single, default=0.0), _OFF if single else 1 / 2
    prompts = [(n, _off(x)) for n, x in longer]
    together = np.hstack([x for _, x in longer])
    off, effect = _off(together), _rms(together[1] - together[2])
    pulls = np.array([[(e - p) @ (f - p), (f - p) @ (f - p)] for _, (e, f, p, *_) in longer])
    n, (pull, total) = len(longer), pulls.sum(0)
    share = float(pull / total) if total else 0.0
    spread = n / max(n - 1, 1) * ((pulls @ (1, -share)) ** 2).sum()
    error = float(np.sqrt(spread) / total) if total and n > 1 else np.inf
    within = max(_NEAR, _ERRORS * error * float(np.nan_to_num(t_quantile_ratio(n - 1), nan=1.0)))
    near = [name for name, x in ((FIT, 1), (PLAIN, 0)) if abs(share - x) <= within]
    least, far = _NOISES * noise, min(off[FIT], off[PLAIN])
    applies = near[0] if len(near) == 1 else UNKNOWN
    if effect <= noise:
        applies = UNKNOWN
    elif far > max(_MANY_NOISES * noise, part * effect) or (far > least and not near):
        applies = OTHER
    start = next((n for n, of in prompts if of[FIT] > max(least, _OFF * effect)), None)
    return EngineCheck(engine, applies, share, error, noise, effect, off, start, prompts)


def _off(x: np.ndarray) -> dict[str, float]:
    names = (FIT, PLAIN, CONSTANTS)[: len(x) - 1]
    return {name: _rms(x[0] - row) for name, row in zip(names, x[1:], strict=True)}


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))
