"""A check which of several models an engine runs, by its log p of the next tokens.

For prompts of growing length, e is the engine's log p of tokens that it lists, f the model's as
stated, and p that of an alternative: another model, which the engine might run. Of an exported fit,
f is under the fit and p under plain softmax; of a stock model see `attention_scales`. The share of
the way from the alternative to the stated model is

    s = sum (e - p)(f - p) / sum (f - p)^2,

1 if the stated model runs, 0 if the alternative; its error is from prompt to prompt. Prompts of one
token, whose attention no rule changes, give the engine's noise, v: the most that e is off from the
nearest prediction. Let r be three errors of s, widened by Student's t, or 1/4 if that is more, and
d what f and p differ.

- Cannot tell: d is v or less.
- Something else: e is off from f and from p by more than 5 v and a tenth of d (half if no text is
  one token, so that v is not known); or by more than 3 v, and s from 1 and 0 by r.
- The stated model, or the alternative: s is within r of 1, or of 0. Cannot tell: of both, or of
  neither.

Of several alternatives, those for which it cannot be told are left out, unless it is so for all.
The one nearest to e decides, if it is nearer than f. If not, it is something else if it is so for
one of them, and else the stated model. Differences are root mean squares, in nats.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrate.datasets.examples import Example
from calibrate.errors import CalibrateError
from calibrate.evidence.estimate import t_quantile
from calibrate.export.configuration import require_original_folder
from calibrate.export.engine import Engine
from calibrate.export.plan import ExportContents, ExportPlan
from calibrate.prompts.make_examples import ExampleSpec, make_examples
from calibrate.prompts.prompts_file import read_prompts
from calibrate.storage.gguf_header import read_gguf
from calibrate.transformers.answer_logits import answer_logits
from calibrate.transformers.betas import HeadBetas, head_betas
from calibrate.transformers.folders import ModelFolder

FIT = "fit"
BASELINE = "plain"
CONSTANTS = "constants"  # a log-size rule without its term of log n
OTHER = "something else"
UNKNOWN = "cannot tell"
STATED = "stated"  # of a pair
ALTERNATIVE = "alternative"
_ROPE_SCALING = ".rope.scaling.type"  # a key of .gguf files
_NEAR = 1 / 4
_OFF = 1 / 10
ERRORS = 3
NOISES = 3
_MANY_NOISES = 5


class EngineCheck(NamedTuple):
    """The model that an engine runs; see above."""

    engine: str
    applies: str  # the stated model, an alternative, OTHER or UNKNOWN
    share: float
    error: float
    noise: float  # nats; 0 if it is not known
    effect: float  # nats: what the stated model and the alternative differ
    off: dict[str, float]  # nats: what the engine is off from each prediction
    off_from: int | None  # the tokens from which on it is off from the stated model
    prompts: list[tuple[int, dict[str, float]]]  # tokens and the same of each
    untold: tuple[str, ...] = ()  # the alternatives that cannot be told from the stated model


class Listing(NamedTuple):
    """A prompt, and log p by token id that an engine lists at each position after it."""

    ids: list[int]
    listed: list[dict[int, float]]

    @property
    def n_queries(self) -> int:
        """The tokens that a forward pass reads."""
        return len(self.ids) + len(self.listed) - 1

    def measured(self) -> list[float]:
        """The engine's log p of the listed tokens."""
        return [p for top in self.listed for p in top.values()]

    def predicted(self, model: Any) -> list[float]:
        """The same tokens' log p by a model in memory, as it is now."""
        chosen = [max(top, key=top.__getitem__) for top in self.listed]
        example = Example(np.array([*self.ids, *chosen], np.int32), len(self.ids), 0)
        (log_p,) = answer_logits(model, [example]).double().log_softmax(-1).tolist()
        return [row[i] for row, top in zip(log_p, self.listed, strict=True) for i in top]


class Question(NamedTuple):
    """What an engine is asked."""

    address: str
    served: str | None  # the model's name there
    prompts: Path | None  # None: those of the built-in task
    templates: tuple[str, ...] = ("numbers", "towns")
    lengths: tuple[int, ...] = (128, 512, 1024)  # tokens
    n_single: int = 4  # prompts of one token
    n_positions: int = 2

    def ask(self, folder: ModelFolder) -> tuple[str, list[Listing]]:
        """The address of an engine, and what it lists after prompts for the model of a folder."""
        lengths = tuple(
            sorted({min(n, (folder.context or n) - self.n_positions + 1) for n in self.lengths})
        )
        examples = self._examples(folder, lengths)
        contexts = dict.fromkeys(tuple(x.tokens[: x.start].tolist()) for x in examples)
        longest = max(contexts, key=len)
        single = [(i,) for i in dict.fromkeys(longest[:: -(-len(longest) // self.n_single)])]
        tokenizer = None
        with suppress(CalibrateError):  # prompts may be token ids
            tokenizer = folder.tokenizer()
        vocabulary, n_positions = folder.vocabulary, self.n_positions
        server = Engine(self.address, tokenizer, vocabulary, self.served, n_positions=n_positions)
        listings = [Listing(ids, server.ask(ids)) for ids in map(list, [*single, *contexts])]
        listings = [listing for listing in listings if listing.listed]
        server.require_prompts(len(listing.ids) for listing in listings)
        # After a prompt of one token, the next position has two items.
        return server.url, [
            Listing(x.ids, x.listed[: 1 if len(x.ids) == 1 else None]) for x in listings
        ]

    def _examples(self, folder: ModelFolder, lengths: tuple[int, ...]) -> Sequence[Example]:
        """Examples whose prompts are sent."""
        if self.prompts:
            return make_examples(ExampleSpec(self.prompts), folder)[0].examples
        spec = ExampleSpec(templates=self.templates, lengths=lengths, count=1)
        try:
            return make_examples(spec, folder)[0].examples
        except CalibrateError as failure:  # its remedy is an option of other commands
            cause = str(failure).rpartition("; ")[0] or str(failure)
            raise CalibrateError(f"{cause}; give prompts=", parameter="prompts") from failure


def check_engine(carried: ExportContents, model: Path | None, question: Question) -> EngineCheck:
    """Asks an engine that should serve an export; f and p are those of its model.

    That is the export, with the fit undone for p, or the original, `model`, with the fit for f.
    """
    if model is None and carried.model_type == "mistral3":  # a .gguf file; folders say ministral3
        raise CalibrateError(
            f"Transformers does not load {carried.path}; give model=, its original",
            parameter="model",
        )
    if question.prompts:
        read_prompts(question.prompts)  # before a model is read
    folder, plan = ModelFolder(model or carried.path), carried.plan
    if model:
        require_original_folder(folder)
    assert plan is not None
    _require_read(folder)
    url, listings = question.ask(folder)
    loaded = folder.load(folder.dtype(), allow_unexpected=bool(carried.metadata.get("unexpected")))
    answers = []
    with torch.no_grad(), head_betas(loaded) as heads:
        if not set(heads.heads) <= plan.factors.keys():
            raise CalibrateError(f"{model} has other heads than {carried.path}; give its original")
        for listing in listings:
            rows = [listing.measured()]
            for betas in _betas(heads, plan, model is None, listing.n_queries):
                heads.betas = betas
                rows.append(listing.predicted(loaded))
            answers.append((len(listing.ids), np.array(rows)))
    return judged(url, answers)


def _require_read(folder: ModelFolder) -> None:
    """Raises CalibrateError for a .gguf file whose scaling of positions Transformers drops."""
    if not folder.is_gguf:
        return
    path = folder.files[0]
    for name, key in read_gguf(path).keys.items():
        if name.endswith(_ROPE_SCALING) and key.value != b"none":
            raise CalibrateError(
                f"{path} has {name}, which Transformers does not read of such files; give the "
                "original's folder with model=",
                parameter="model",
            )


def _betas(
    heads: HeadBetas, plan: ExportPlan, exported: bool, n_queries: int
) -> list[torch.Tensor]:
    """(1, heads, n_queries) the betas of f, of p, and of CONSTANTS where that is another rule.

    An exported model has the fit's betas already, by which they are divided.
    """
    factors = torch.tensor([plan.factors[head] for head in heads.heads])[None, :, None]
    fit = factors * (1 + plan.ratio * torch.arange(1, n_queries + 1).log())
    betas = [fit, torch.ones_like(fit)] + ([factors + 0 * fit] if plan.ratio else [])
    return [beta / fit if exported else beta for beta in betas]


def judged(
    engine: str,
    answers: Sequence[tuple[int, np.ndarray]],
    names: Sequence[str] = (FIT, BASELINE, CONSTANTS),
    alternatives: Sequence[str] = (BASELINE,),
    least_noise: float = 0.0,
) -> EngineCheck:
    """The check of an engine by its answers.

    Args:
      answers: the tokens of prompts, and rows of log p of the tokens listed after each: the
        engine's, the stated model's, and those of other models.
      names: of the models, the stated one first; the last ones may have no rows.
      alternatives: the names of models that the engine is checked for. Others are described alone.
      least_noise: nats; what the engine is allowed anyway.
    """
    longer = sorted((x for x in answers if x[0] > 1), key=lambda x: x[0])
    names = names[: len(longer[0][1]) - 1]
    single = [min(_off(x, names).values()) for n, x in answers if n == 1]
    noise, part = max([least_noise, *single]), _OFF if single else 1 / 2
    prompts = [(n, _off(x, names)) for n, x in longer]
    off = _off(np.hstack([x for _, x in longer]), names)
    of_alternatives = {
        alternative: _pair(
            [x[[0, 1, 1 + names.index(alternative)]] for _, x in longer], noise, part
        )
        for alternative in sorted(alternatives, key=off.__getitem__)
    }
    alternative, stated = _deciding(of_alternatives, off, names[0]), names[0]
    pair = of_alternatives[alternative]
    applies = {STATED: stated, ALTERNATIVE: alternative}.get(pair.applies, pair.applies)
    off_least = max(NOISES * noise, _OFF * pair.effect)
    start = next((n for n, of in prompts if of[stated] > off_least), None)
    untold = tuple(x for x, of in of_alternatives.items() if of.applies == UNKNOWN)
    return EngineCheck(
        engine, applies, pair.share, pair.error, noise, pair.effect, off, start, prompts, untold
    )


class _Pair(NamedTuple):
    """What tells an alternative from the stated model; see above."""

    applies: str  # STATED, ALTERNATIVE, OTHER or UNKNOWN
    share: float
    error: float
    effect: float


def _deciding(of_alternatives: dict[str, _Pair], off: dict[str, float], stated: str) -> str:
    """The alternative whose pair decides; they are in the order of the engine's distance."""
    known = [name for name, pair in of_alternatives.items() if pair.applies != UNKNOWN]
    if not known or off[known[0]] < off[stated]:
        return known[0] if known else next(iter(of_alternatives))
    for applies in (OTHER, STATED):
        for name in known:
            if of_alternatives[name].applies == applies:
                return name
    return known[0]


def _pair(longer: Sequence[np.ndarray], noise: float, part: float) -> _Pair:
    """The decision on rows (e, f, p) of each prompt."""
    together = np.hstack(longer)
    effect = _rms(together[1] - together[2])
    pulls = np.array([[(e - p) @ (f - p), (f - p) @ (f - p)] for e, f, p in longer])
    n, (pull, total) = len(longer), pulls.sum(0)
    share = float(pull / total) if total else 0.0
    spread = n / max(n - 1, 1) * ((pulls @ (1, -share)) ** 2).sum()
    error = float(np.sqrt(spread) / total) if total and n > 1 else np.inf
    within = max(_NEAR, ERRORS * error * few_groups(n))
    near = [name for name, x in ((STATED, 1), (ALTERNATIVE, 0)) if abs(share - x) <= within]
    far = min(_rms(together[0] - row) for row in together[1:])
    applies = near[0] if len(near) == 1 else UNKNOWN
    if effect <= noise:
        applies = UNKNOWN
    elif far > max(_MANY_NOISES * noise, part * effect) or (far > NOISES * noise and not near):
        applies = OTHER
    return _Pair(applies, share, error, effect)


def few_groups(n: int) -> float:
    """What errors of means over n groups are widened by."""
    return float(np.nan_to_num(t_quantile(n - 1) / t_quantile(np.inf), nan=1.0))


def _off(x: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    return {name: _rms(x[0] - row) for name, row in zip(names, x[1:], strict=True)}


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))
