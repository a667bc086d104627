"""`calibrate.fit_model`: a fit of any model of Transformers by a measure of the user's own."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.datasets.examples import Cell, Example, ExampleSet, Scores
from calibrate.defaults import MAX_KL, MAX_STEPS
from calibrate.errors import CalibrateError, install
from calibrate.evidence.evidence import Scored
from calibrate.evidence.metrics import BATCHES
from calibrate.report.sentences import with_verdict
from calibrate.store.fit import Fit
from calibrate.store.publishing import check_name

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from calibrate.model.parameters import HeadId, Parameters
    from calibrate.model.runner import Loaded

MIN_BATCHES = 8
_SIZE = 128  # items that a typical query sees, where that is not told

Measure = Callable[[Any, Any], Any]  # (model, batch) -> (examples,) tensor


def fit_model(
    model: "PreTrainedModel",
    batches: Sequence[Any],
    log_p: Measure,
    *,
    protect: Sequence[Any] = (),
    log_probs: Measure | None = None,
    template: Sequence[str] | None = None,
    size: int = _SIZE,
    kind: str = "constant",
    max_kl: float = MAX_KL,
    interpolation: float | None = None,
    steps: int = MAX_STEPS,
    seed: int = 0,
    name: str = "model",
) -> Fit:
    """Fits the rules of a model's heads to a log-likelihood of your own.

        import calibrate
        import torch
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=48,
        )
        model = BertForSequenceClassification(config).eval()  # replace by your model and data
        tokens = torch.randint(0, 99, (16, 4, 20))  # 16 batches of 4 texts
        batches = [{"input_ids": x, "label": x[:, 0] % 2} for x in tokens]

        def log_p(model, batch):  # of the right class
            logits = model(batch["input_ids"]).logits
            return logits.log_softmax(-1).gather(-1, batch["label"][:, None])[:, 0]

        try:
            fit = calibrate.fit_model(model, batches, log_p, steps=2)
            print(fit.verdict)
            fit.save("mine.json")  # calibrate.load("./mine.json") reads it
        except calibrate.CalibrateError as refusal:  # a random model has no significant gain
            print(refusal)

    As `calibrate model fit`, for encoders, vision, sequence to sequence, rankers, and in memory.
    A batch is an item: half of them fit the rules, a quarter chooses the interpolation weight, and
    a quarter is the test split; of six templates or more the last ones are held out as a whole.

    Args:
      model: of Transformers, whose attention `calibrate.transformers.apply` accepts.
      batches: whatever `log_p` takes; eight or more, and better some hundred, of each template.
      log_p: log p of the right answers of a batch, nats, (examples,); gradients flow through it.
      protect: batches of what must not change, eight or more.
      log_probs: of a protected batch, (..., classes): what the model predicts; its KL counts.
      template: what each batch is of; in the steps of the fit, templates have equal weight.
      size: how many items a typical query sees.
      kind: of rule; see `calibrate model fit --help`.
      max_kl: KL divergence of protected batches from the baseline, nats a prediction, at most.
      interpolation: weight s of the fit, above 0 and up to 1: beta(s) = 1 + s (beta - 1); the
        largest within `max_kl` if None.
      steps: of the optimiser, at most.
      seed: of the order of the batches.
      name: of the fit.
    Returns:
      Fit: with .verdict, .evidence and .save(path).
    Raises:
      CalibrateError: too few batches, a model in training, an option out of range, or a log p
        that is not finite or has no gradient.
      CoefficientsError: a model whose attention cannot be calibrated.
      QualityError: no rule gains significantly on the test split.
    Reference: Velickovic et al. 2024, section 3, with coefficients by gradient.
    """
    _require_transformers()
    from calibrate.model.fit import fit_head_rules
    from calibrate.model.objective import ModelObjective
    from calibrate.model.options import ModelOptions
    from calibrate.model.runner import Loaded
    from calibrate.transformers.betas import head_betas

    check_name(name)
    _check_given(model, size, bool(protect), log_probs)
    names = _template_names(batches, template)
    examples = _examples([*names, *["protected"] * len(protect)], len(batches), size)
    options = ModelOptions(
        kind=kind, max_kl=max_kl, interpolation=interpolation, max_steps=steps, seed=seed
    )
    with head_betas(model, partial(log_p, model, batches[0])) as betas:
        loaded = Loaded(model, betas)
        scorer = BatchScorer(loaded, [*batches, *protect], len(batches), log_p, log_probs)
        (plain,) = scorer.score_under([None], range(len(examples.examples)))
        of = Scored("", items=BATCHES)
        objective = ModelObjective(examples, plain, None, max_kl, of=of, exact_match=False)
        result = fit_head_rules(scorer, objective, name, {"head": type(model).__name__}, options)
    return with_verdict(result.coefficients, result.evidence)


def _require_transformers() -> None:
    """Raises CalibrateError if the extra is not installed."""
    try:
        import calibrate.transformers.betas  # noqa: F401
    except ImportError as missing:
        raise CalibrateError(
            f"fit_model needs Transformers: {install('transformers')}"
        ) from missing


def _check_given(
    model: "PreTrainedModel", size: int, protects: bool, log_probs: Measure | None
) -> None:
    """Raises CalibrateError for a model or arguments that cannot be used."""
    if model.training:
        raise CalibrateError("the model is in training mode, where dropout is random; call .eval()")
    if size < 2:
        raise CalibrateError(f"size is {size}; give 2 or more")
    if protects and log_probs is None:
        raise CalibrateError("protect= needs log_probs=, which gives what the model predicts")


def _template_names(batches: Sequence[Any], template: Sequence[str] | None) -> list[str]:
    """The template of each batch."""
    names = ["batches"] * len(batches) if template is None else list(template)
    if len(names) != len(batches):
        raise CalibrateError(f"template has {len(names)} names for {len(batches)} batches")
    return names


def _examples(names: Sequence[str], n_answers: int, size: int) -> ExampleSet:
    """A batch is an example of one answer."""
    cells = list(dict.fromkeys((name, i >= n_answers) for i, name in enumerate(names)))
    of_batch = [cells.index((name, i >= n_answers)) for i, name in enumerate(names)]
    for cell, (name, _) in enumerate(cells):
        if (count := of_batch.count(cell)) < MIN_BATCHES:
            raise CalibrateError(
                f"{count} batches are {name!r}; give {MIN_BATCHES} or more, in smaller batches"
            )
    tokens = np.zeros(size, np.int32)
    return ExampleSet(
        tuple(Cell(name, size, protected) for name, protected in cells),
        tuple(Example(tokens, len(tokens) - 1, cell) for cell in of_batch),
    )


@dataclass(frozen=True, eq=False)
class BatchScorer:
    """A `ModelScorer` of batches: log p is the mean of a batch; KL that of its predictions."""

    loaded: "Loaded"
    batches: Sequence[Any]
    n_answers: int  # the others are protected
    log_p: Measure
    log_probs: Measure | None

    @property
    def heads(self) -> "list[HeadId]":
        """The heads of the model."""
        return self.loaded.heads.heads

    def score(self, rules: Sequence[Fit], indices: Sequence[int]) -> list[Scores]:
        """Scores of some batches under rules."""
        from calibrate.model.scoring import under_fit

        return self.score_under([partial(under_fit, fit, self.loaded) for fit in rules], indices)

    def score_under(
        self,
        contexts: "Sequence[Callable[[], AbstractContextManager[None]] | None]",
        indices: Sequence[int],
    ) -> list[Scores]:
        """Scores of some batches in contexts, which give the model rules; None is the baseline."""
        import torch

        n = len(indices)
        of_contexts = [Scores.of_plain(np.zeros(n), np.zeros(n, np.int32)) for _ in contexts]
        for place, i in enumerate(indices):
            with torch.no_grad():
                plain = self._predicted(i) if any(contexts) else None
                for context, scores in zip(contexts, of_contexts, strict=True):
                    with (context or nullcontext)():
                        log_p, kl = self._values(i, plain)
                    scores.log_p[place], scores.kl[place] = float(log_p), float(kl)
        for scores in of_contexts:
            _require_finite("log_p", scores.log_p)
            _require_finite("log_probs", scores.kl)
        return of_contexts

    def gradient(
        self, parameters: "Parameters", indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient of sum(weights * log p) by the numbers."""
        values = [partial(self._log_p, i) for i in indices]
        return np.array(np.tensordot(weights, self._derivatives("log_p", parameters, values), 1))

    def fisher_scores(self, parameters: "Parameters", indices: Sequence[int]) -> np.ndarray:
        """Derivatives of log p of what is drawn from the predictions of protected batches."""
        from calibrate.model.answers import log_p_of_draws

        n_predictions = 0

        def log_p(i: int) -> "Tensor":
            nonlocal n_predictions
            predicted = self._predicted(i)
            assert predicted is not None
            _require_finite("log_probs", predicted.detach().exp().cpu().numpy())
            n_predictions += len(predicted)
            return log_p_of_draws(predicted, i)

        values = [partial(log_p, i) for i in indices]
        derivatives = self._derivatives("log_probs", parameters, values)
        return np.array(derivatives / np.sqrt(n_predictions))

    def _derivatives(
        self, name: str, parameters: "Parameters", values: "Sequence[Callable[[], Tensor]]"
    ) -> np.ndarray:
        """Derivatives of values of batches; 0 if one has none, CalibrateError if all have none."""
        from calibrate.model.transformers_scorer import derivative

        gradients = [derivative(self.loaded, parameters, value) for value in values]
        if all(gradient is None for gradient in gradients):
            raise CalibrateError(
                f"{name} has no gradient by the model's heads; compute it without torch.no_grad, "
                "detach or .numpy()"
            )
        zero = np.zeros_like(parameters.numbers)
        return np.array([zero if gradient is None else gradient for gradient in gradients])

    def _log_p(self, i: int) -> Any:
        return self.log_p(self.loaded.model, self.batches[i]).mean()

    def _predicted(self, i: int) -> "Tensor | None":
        if i < self.n_answers:
            return None
        assert self.log_probs is not None
        predicted: Tensor = self.log_probs(self.loaded.model, self.batches[i])
        return predicted.flatten(0, -2)

    def _values(self, i: int, plain: "Tensor | None") -> "tuple[Tensor, Tensor]":
        """Mean log p, of protected batches 0, and mean KL of a batch."""
        import torch

        from calibrate.model.answers import kl_divergence

        zero = torch.zeros((), device=self.loaded.model.device)
        if i < self.n_answers:
            return self._log_p(i), zero
        if plain is None:
            return zero, zero
        ours = self._predicted(i)
        assert ours is not None
        return zero, kl_divergence(plain, ours).mean()


def _require_finite(name: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise CalibrateError(
            f"what {name} gives for a batch is not finite; let it return finite nats"
        )
