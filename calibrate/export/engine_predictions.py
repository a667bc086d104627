"""The prompts that a check sends to a server, its answers, and predictions of a model in memory."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrate.errors import CalibrateError
from calibrate.export.engine import Engine
from calibrate.prompts.examples import Example
from calibrate.prompts.make_examples import ExampleSpec, make_examples
from calibrate.prompts.prompts_file import read_prompts
from calibrate.transformers.betas import HeadBetas, answer_logits, head_betas
from calibrate.transformers.folders import ModelFolder

LogP = list[np.ndarray]  # of the listed tokens of each prompt, in nats
_TEMPLATE = "numbers"  # of the built-in task
_LENGTHS = (80, 128, 192, 320, 512)  # of its prompts, tokens
_N_SINGLE = 8  # prompts of one token
_N_POSITIONS = 4  # after each prompt


class Question(NamedTuple):
    """The server to ask, and the prompts to send."""

    address: str
    served: str | None = None  # name of the model on the server
    prompts: Path | None = None  # file of prompts; None: the built-in task


class Listing(NamedTuple):
    """A prompt, and the server's log p by token id at each position after it."""

    ids: list[int]
    positions: list[dict[int, float]]

    @property
    def n_queries(self) -> int:
        """The number of tokens that a forward pass reads."""
        return len(self.ids) + len(self.positions) - 1

    def measured(self) -> np.ndarray:
        """Returns the server's log p of the listed tokens."""
        return np.array([p for listed in self.positions for p in listed.values()])

    def predict(self, model: Any) -> np.ndarray:
        """Returns log p of the same tokens by a model in memory, in its present state."""
        chosen = [max(listed, key=listed.__getitem__) for listed in self.positions]
        example = Example(np.array([*self.ids, *chosen], np.int32), len(self.ids), 0)
        (log_p,) = answer_logits(model, [example]).double().log_softmax(-1).tolist()
        rows = zip(log_p, self.positions, strict=True)
        return np.array([row[i] for row, listed in rows for i in listed])


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model in memory, and its log p of the tokens that a server listed."""

    model: Any
    heads: HeadBetas
    url: str  # of the server
    listings: list[Listing]

    @property
    def n(self) -> np.ndarray:
        """1, 2, ... up to the longest prompt with its answer."""
        return np.arange(1, max(x.n_queries for x in self.listings) + 1)

    def under_betas(self, betas: np.ndarray) -> LogP:
        """Returns log p with logits times betas (heads, n), after a soft-cap and with sinks."""
        return self._predict("betas", betas)

    def under_scale(self, scale: np.ndarray) -> LogP:
        """Returns log p with queries times a scale (heads, n), before a soft-cap, without sinks."""
        return self._predict("query_factors", scale)

    def _predict(self, attribute: str, factors: np.ndarray) -> LogP:
        factors = np.broadcast_to(factors, (len(self.heads.heads), len(self.n)))
        log_p = []
        for listing in self.listings:
            of_prompt = torch.tensor(factors[None, :, : listing.n_queries], dtype=torch.float32)
            setattr(self.heads, attribute, of_prompt)
            log_p.append(listing.predict(self.model))
        return log_p


@contextmanager
def ask_engine(folder: ModelFolder, question: Question, dtype: str) -> Iterator[Predictions]:
    """Loads a model, asks the server, and yields predictions of the model in memory.

    Raises:
      CalibrateError: the prompts or the model cannot be used, or the server gives no usable answer.
    """
    if question.prompts:
        read_prompts(question.prompts)  # a damaged file is refused before the model is loaded
    model = folder.load(dtype)
    with torch.no_grad(), head_betas(model) as heads:
        url, listings = _ask_prompts(folder, question)
        yield Predictions(model, heads, url, listings)


def _ask_prompts(folder: ModelFolder, question: Question) -> tuple[str, list[Listing]]:
    """Returns the address of the server, and its listings after the prompts that it answered."""
    contexts = _make_prompts(folder, question)
    longest = max(contexts, key=len)
    single = [(i,) for i in dict.fromkeys(longest[:: -(-len(longest) // _N_SINGLE)])]
    tokenizer = None
    with suppress(CalibrateError):  # prompts may be token ids
        tokenizer = folder.tokenizer()
    address, served = question.address, question.served
    server = Engine(address, tokenizer, folder.vocabulary, served, n_positions=_N_POSITIONS)
    listings = [Listing(ids, server.ask(ids)) for ids in map(list, [*single, *contexts])]
    listings = [listing for listing in listings if listing.positions]
    if all(len(listing.ids) == 1 for listing in listings):
        raise server.failure()
    # After a prompt of one token, the second position attends to two tokens.
    return server.url, [
        Listing(x.ids, x.positions[: 1 if len(x.ids) == 1 else None]) for x in listings
    ]


def _make_prompts(folder: ModelFolder, question: Question) -> list[tuple[int, ...]]:
    """Returns the distinct prompts to send, as token ids."""
    if question.prompts:
        spec = ExampleSpec(question.prompts)
    else:
        n_added = _N_POSITIONS - 1  # tokens after a prompt, which the context holds too
        lengths = {min(n, (folder.context or n) - n_added) for n in _LENGTHS}
        spec = ExampleSpec(templates=(_TEMPLATE,), lengths=tuple(sorted(lengths)), count=1)
    try:
        examples = make_examples(spec, folder)[0].examples
    except CalibrateError as failure:
        if question.prompts:
            raise
        cause = str(failure).rpartition("; ")[0]  # the remedy names options of `model collect`
        raise CalibrateError(f"{cause}; give prompts=", parameter="prompts") from failure
    return list(dict.fromkeys(tuple(x.tokens[: x.start].tolist()) for x in examples))


def root_mean_square(x: np.ndarray) -> float:
    """Returns the root mean square of differences of log p, in nats."""
    return float(np.sqrt(np.mean(x**2)))
