"""`calibrate.fit_model`: fits the heads of any model of Transformers by a measure of the user."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.defaults import MAX_KL, MAX_STEPS
from calibrate.errors import CalibrateError, install
from calibrate.evidence.evidence import Scored
from calibrate.evidence.metrics import BATCHES
from calibrate.prompts.examples import Cell, Example, ExampleSet, Scores
from calibrate.report.sentences import with_verdict
from calibrate.store.fit import Fit
from calibrate.store.references import check_name

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from calibrate.model.parameters import HeadId, Parameters
    from calibrate.model.runner import Loaded

MIN_BATCHES = 8  # of each template
_TYPICAL_SIZE = 128  # items that a typical query sees, unless `size` is given

Measure = Callable[[Any, Any], Any]  # (model, batch) -> (examples,) tensor


def fit_model(
    model: "PreTrainedModel",
    batches: Sequence[Any],
    log_p: Measure,
    *,
    protect: Sequence[Any] = (),
    log_probs: Measure | None = None,
    template: Sequence[str] | None = None,
    size: int = _TYPICAL_SIZE,
    kind: str = "constant",
    max_kl: float = MAX_KL,
    steps: int = MAX_STEPS,
    seed: int = 0,
    name: str = "model",
) -> Fit:
    """Fits the rules of a model's heads to a log-likelihood of your own, in memory.

    Maximises mean log_p(model, batch) over the rules beta(H, n) of all heads, as `calibrate model
    fit` does for causal language models: for encoders, vision models, sequence-to-sequence models
    and rankers. A batch is an item: half of the batches are for calibration, a quarter for
    validation and a quarter for test. If there are six templates or more, the last ones are held
    out as a whole.

    Args:
      model: of Transformers, in evaluation mode, with attention that `calibrate.transformers.apply`
        accepts.
      batches: passed to `log_p`; at least 8 of each template, and better some hundred.
      log_p: called with the model and a batch; returns log p of the right answers in nats,
        (examples,), through which gradients flow.
      protect: batches whose predictions must stay; none, or at least 8.
      log_probs: called with the model and a batch of `protect`; returns log probabilities
        (..., classes).
      template: of each batch; all have the same weight in the steps of the fit.
      size: items that a typical query sees, the n of rules that depend on it.
      kind: of rule: "constant", "log-size", "polynomial" or "entropy-and-size".
      max_kl: the largest KL divergence of `protect` from the baseline, nats per prediction.
      steps: of the optimiser, at most.
      seed: of the order of the batches.
      name: of the fit.
    Returns:
      Fit, with .verdict, .evidence and .save(path).
    Raises:
      CalibrateError: too few batches, a model in training mode, an option out of range, or a log p
        that is not finite or has no gradient.
      CoefficientsError: the model's attention cannot be calibrated.
      QualityError: no significant gain on the test split.
    Reference: Velickovic et al. 2024 (arXiv 2410.01104), section 3, with coefficients by gradient.

    >>> import calibrate
    >>> import torch
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> _ = torch.manual_seed(0)
    >>> config = BertConfig(
    ...     vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...     intermediate_size=8,
    ... )
    >>> model = BertForSequenceClassification(config).eval()  # replace by your model and data
    >>> tokens = torch.randint(0, 9, (8, 4, 5))  # 8 batches of 4 texts
    >>> batches = [{"input_ids": x, "label": x[:, 0] % 2} for x in tokens]
    >>> def log_p(model, batch):  # of the right class
    ...     logits = model(batch["input_ids"]).logits
    ...     return logits.log_softmax(-1).gather(-1, batch["label"][:, None])[:, 0]
    >>> try:
    ...     fit = calibrate.fit_model(model, batches, log_p, steps=1)
    ...     _ = fit.save("mine.json")  # calibrate.load("./mine.json") reads it
    ... except calibrate.CalibrateError as error:  # a random model has no significant gain
    ...     print(type(error).__name__)
    QualityError
    """
    try:
        import calibrate.transformers.betas  # noqa: F401
    except ImportError as missing:
        raise CalibrateError(
            f"fit_model needs Transformers: {install('transformers')}"
        ) from missing
    from calibrate.model.fit import fit_head_rules
    from calibrate.model.objective import ModelObjective
    from calibrate.model.options import ModelOptions
    from calibrate.model.runner import Loaded
    from calibrate.transformers.betas import head_betas

    check_name(name)
    _check_arguments(model, size, bool(protect), log_probs)
    names = _template_names(batches, template)
    examples = _make_examples([*names, *["protected"] * len(protect)], len(batches), size)
    options = ModelOptions(kind=kind, max_kl=max_kl, max_steps=steps, seed=seed)
    with head_betas(model, partial(log_p, model, batches[0])) as betas:
        loaded = Loaded(model, betas)
        scorer = BatchScorer(loaded, [*batches, *protect], len(batches), log_p, log_probs)
        (baseline,) = scorer.score([None], range(len(examples.examples)))
        of = Scored("", items=BATCHES)
        objective = ModelObjective(examples, baseline, None, max_kl, of=of, exact_match=False)
        result = fit_head_rules(scorer, objective, name, {"head": type(model).__name__}, options)
    return with_verdict(result.coefficients, result.evidence)


def _check_arguments(
    model: "PreTrainedModel", size: int, protects: bool, log_probs: Measure | None
) -> None:
    """Raises CalibrateError if the model or an argument cannot be used."""
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


def _make_examples(names: Sequence[str], n_answers: int, size: int) -> ExampleSet:
    """An example of one token for each batch.

    Args:
      names: the template of each batch.
      n_answers: the number of batches that are not protected.
      size: the length of an example.
    """
    cells = list(dict.fromkeys((name, i >= n_answers) for i, name in enumerate(names)))
    cell_of_batch = [cells.index((name, i >= n_answers)) for i, name in enumerate(names)]
    for cell, (name, _) in enumerate(cells):
        if (count := cell_of_batch.count(cell)) < MIN_BATCHES:
            raise CalibrateError(
                f"{count} batches are {name!r}; give {MIN_BATCHES} or more, in smaller batches"
            )
    tokens = np.zeros(size, np.int32)
    return ExampleSet(
        tuple(Cell(name, size, protected) for name, protected in cells),
        tuple(Example(tokens, len(tokens) - 1, cell) for cell in cell_of_batch),
    )


@dataclass(frozen=True, eq=False)
class BatchScorer:
    """A `ModelScorer` of batches: their mean log p, and the mean KL of protected ones."""

    loaded: "Loaded"
    batches: Sequence[Any]
    n_answers: int  # the batches after these are protected
    log_p: Measure
    log_probs: Measure | None

    @property
    def heads(self) -> "list[HeadId]":
        """(layer, head) of all heads of the model."""
        return self.loaded.heads.heads

    def score(self, rules: Sequence[Fit | None], indices: Sequence[int]) -> list[Scores]:
        """The scores of some batches under each rule; None is the baseline."""
        import torch

        from calibrate.model.scoring import apply_fit

        n = len(indices)
        scores = [Scores.baseline(np.zeros(n), np.zeros(n, np.int32)) for _ in rules]
        for place, i in enumerate(indices):
            with torch.no_grad():
                baseline = self._predict(i) if any(rules) else None
                for fit, of_rule in zip(rules, scores, strict=True):
                    with apply_fit(fit, self.loaded) if fit else nullcontext():
                        log_p, kl = self._score_batch(i, baseline)
                    of_rule.log_p[place], of_rule.kl[place] = log_p, kl
        for of_rule in scores:
            _require_finite("log_p", of_rule.log_p)
            _require_finite("log_probs", of_rule.kl)
        return scores

    def gradient(
        self, parameters: "Parameters", indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """See `ModelScorer`."""
        measures = [partial(self._mean_log_p, i) for i in indices]
        return np.array(np.tensordot(weights, self._gradients("log_p", parameters, measures), 1))

    def fisher_scores(self, parameters: "Parameters", indices: Sequence[int]) -> np.ndarray:
        """See `ModelScorer`."""
        from calibrate.model.transformers_scorer import log_p_of_draws

        n_predictions = 0

        def draw_log_p(i: int) -> "Tensor":
            nonlocal n_predictions
            predicted = self._predict(i)
            assert predicted is not None
            _require_finite("log_probs", predicted.detach().exp().cpu().numpy())
            n_predictions += len(predicted)
            return log_p_of_draws(predicted, i)

        gradients = self._gradients(
            "log_probs", parameters, [partial(draw_log_p, i) for i in indices]
        )
        return np.array(gradients / np.sqrt(n_predictions))

    def _gradients(
        self, name: str, parameters: "Parameters", measures: "Sequence[Callable[[], Tensor]]"
    ) -> np.ndarray:
        """(measures, rows, columns) the gradients of measures; 0 for one without a gradient.

        Raises:
          CalibrateError: no measure has a gradient.
        """
        from calibrate.model.transformers_scorer import gradient_of_measure

        gradients = [gradient_of_measure(self.loaded, parameters, x) for x in measures]
        if all(gradient is None for gradient in gradients):
            raise CalibrateError(
                f"{name} has no gradient by the model's heads; compute it without torch.no_grad, "
                "detach or .numpy()"
            )
        zero = np.zeros_like(parameters.numbers)
        return np.array([zero if gradient is None else gradient for gradient in gradients])

    def _mean_log_p(self, i: int) -> "Tensor":
        log_p: Tensor = self.log_p(self.loaded.model, self.batches[i])
        return log_p.mean()

    def _predict(self, i: int) -> "Tensor | None":
        """(predictions, classes) log probabilities of a protected batch; None for others."""
        if i < self.n_answers:
            return None
        assert self.log_probs is not None
        predicted: Tensor = self.log_probs(self.loaded.model, self.batches[i])
        return predicted.flatten(0, -2)

    def _score_batch(self, i: int, baseline: "Tensor | None") -> tuple[float, float]:
        """The mean log p of a batch, and its mean KL from the baseline; one of them is 0."""
        from calibrate.model.scoring import kl_divergence

        if i < self.n_answers:
            return float(self._mean_log_p(i)), 0.0
        if baseline is None:
            return 0.0, 0.0
        predicted = self._predict(i)
        assert predicted is not None
        return 0.0, float(kl_divergence(baseline, predicted).mean())


def _require_finite(name: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise CalibrateError(
            f"what {name} gives for a batch is not finite; let it return finite nats"
        )
