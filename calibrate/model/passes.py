"""Passes through a frozen model with rules on its heads: scores, and gradients by their numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError
from calibrate.files.examples import ExampleSet, Scores
from calibrate.model.answering import (
    answer,
    batch_tokens,
    batches,
    checked,
    room_for,
    score,
)
from calibrate.model.derivatives import keeps_much
from calibrate.model.memo import Arrays, Memo
from calibrate.model.rule_parameters import Form
from calibrate.transformers.betas import HeadBetas, HeadRules, checkpointed

# Tokens of a batch, and whether it was passed before; one that is not needed took no time.
Report = Callable[[int, bool], None]


class Passes:
    """What the model says under rules whose numbers are the caller's.

    Args:
      heads: of the model, inside `head_betas`.
      memo: of results.
      report: called after each batch.
    """

    def __init__(
        self, model: PreTrainedModel, heads: HeadBetas, examples: ExampleSet, memo: Memo,
        report: Report = lambda tokens, resumed: None,
    ):  # fmt: skip
        self.model, self.heads, self.examples = model, heads, examples
        self._memo, self._report = memo, report

    def scores(self, form: Form, numbers: np.ndarray, which: Sequence[int]) -> Scores:
        """Scores of some examples.

        Raises:
          CalibrateError: a log p is not finite, or memory runs out.
        """

        def make() -> Arrays:
            given = torch.from_numpy(numbers).to(self.model.device)
            with torch.no_grad(), self._rules(form, given):
                return score(self.model, self.examples, which, self._batch_done)._asdict()

        return Scores(**self._get("scores", form, numbers, which, None, make))

    def gradient(
        self, form: Form, numbers: np.ndarray, which: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers.

        Raises:
          CalibrateError: it or a log p is not finite, or memory runs out.
        """

        def make() -> Arrays:
            return self._gradient(form, numbers, which, weights)

        return self._get("gradient", form, numbers, which, weights, make)["gradient"]

    def _get(
        self, what: str, form: Form, numbers: np.ndarray, which: Sequence[int],
        weights: np.ndarray | None, make: Callable[[], Arrays],
    ) -> Arrays:  # fmt: skip
        parts = [what.encode(), repr(form).encode(), numbers.tobytes(), np.array(which).tobytes()]
        if weights is not None:
            parts.append(weights.tobytes())
        made, resumed = self._memo.get(b"\0".join(parts), make)
        if resumed:
            self.skip(which, resumed)
        return made

    def skip(self, which: Sequence[int], resumed: bool = False) -> None:
        """Reports a pass over some examples that is not needed, or was made before."""
        for tokens in batch_tokens(self.examples.examples, which):
            self._report(tokens, resumed)

    def _gradient(
        self, form: Form, numbers: np.ndarray, which: Sequence[int], weights: np.ndarray
    ) -> Arrays:
        place = {example: at for at, example in enumerate(which)}
        given = torch.from_numpy(numbers).to(self.model.device).requires_grad_()
        for batch in batches(self.examples.examples, which):
            chosen, at = [self.examples.examples[i] for i in batch], [place[i] for i in batch]
            with ExitStack() as stack:
                stack.enter_context(room_for(chosen))
                stack.enter_context(self._rules(form, given))
                if keeps_much(self.model, chosen):
                    stack.enter_context(checkpointed(self.model))
                answers = answer(self.model, chosen)
                checked(answers, chosen, self.examples.cells)
                weight = torch.from_numpy(weights[at]).to(answers.log_p.device)
                (weight * answers.log_p).sum().backward()
            self._batch_done(sum(len(example.tokens) for example in chosen))
        assert given.grad is not None
        gradient = given.grad.double().cpu().numpy()
        if not np.isfinite(gradient).all():
            raise CalibrateError(
                "a derivative by a head's beta is not finite; load the model with --dtype float32"
            )
        return {"gradient": gradient}

    def _batch_done(self, tokens: int) -> None:
        self._report(tokens, False)

    @contextmanager
    def _rules(self, form: Form, numbers: torch.Tensor) -> Iterator[None]:
        columns = form.columns(self.heads.heads)
        coefficients = torch.stack([x[columns] for x in form.coefficients(list(numbers))])
        self.heads.rules = HeadRules(form.rule, coefficients, form.domain)
        try:
            yield
        finally:
            self.heads.rules = None
