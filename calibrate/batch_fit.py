"""`calibrate.fit_model`: fits the heads of any model of Transformers by a measure of the user."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.defaults import MAX_STEPS
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
    template: Sequence[str] | None = None,
    size: int = _TYPICAL_SIZE,
    kind: str = "constant",
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
      template: of each batch; all have the same weight in the steps of the fit.
      size: items that a typical query sees, the n of rules that depend on it.
      kind: of rule: "constant", "log-size", "polynomial" or "entropy-and-size".
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
    if model.training:
        raise CalibrateError("the model is in training mode, where dropout is random; call .eval()")
    names = ["batches"] * len(batches) if template is None else list(template)
    examples = _make_examples(names, len(batches), size)
    options = ModelOptions(kind=kind, max_steps=steps, seed=seed)
    with head_betas(model, partial(log_p, model, batches[0])) as betas:
        loaded = Loaded(model, betas)
        scorer = BatchScorer(loaded, batches, log_p)
        (baseline,) = scorer.score([None], range(len(examples.examples)))
        of = Scored("", items=BATCHES)
        objective = ModelObjective(examples, baseline, of=of, exact_match=False)
        result = fit_head_rules(scorer, objective, name, {"head": type(model).__name__}, options)
    return with_verdict(result.coefficients, result.evidence)


def _make_examples(names: Sequence[str], n_batches: int, size: int) -> ExampleSet:
    """An example of one token for each batch.

    Args:
      names: the template of each batch.
      n_batches: their number.
      size: the length of an example.
    """
    if size < 2:
        raise CalibrateError(f"size is {size}; give 2 or more")
    if len(names) != n_batches:
        raise CalibrateError(f"template has {len(names)} names for {n_batches} batches")
    templates = list(dict.fromkeys(names))
    for template in templates:
        if (count := names.count(template)) < MIN_BATCHES:
            raise CalibrateError(
                f"{count} batches are {template!r}; give {MIN_BATCHES} or more, in smaller batches"
            )
    tokens = np.zeros(size, np.int32)
    return ExampleSet(
        tuple(Cell(template, size, text=False) for template in templates),
        tuple(Example(tokens, len(tokens) - 1, templates.index(name)) for name in names),
    )


@dataclass(frozen=True, eq=False)
class BatchScorer:
    """A `ModelScorer` of batches: their mean log p."""

    loaded: "Loaded"
    batches: Sequence[Any]
    log_p: Measure

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
            for fit, of_rule in zip(rules, scores, strict=True):
                with torch.no_grad(), apply_fit(fit, self.loaded) if fit else nullcontext():
                    of_rule.log_p[place] = float(self._mean_log_p(i))
        if not all(np.isfinite(of_rule.log_p).all() for of_rule in scores):
            raise CalibrateError("log_p gives a batch what is not finite; let it return nats")
        return scores

    def gradient(
        self, parameters: "Parameters", indices: Sequence[int], weights: np.ndarray
    ) -> np.ndarray:
        """See `ModelScorer`; a batch without a gradient counts as 0."""
        from calibrate.model.transformers_scorer import gradient_of_measure

        gradients = [
            gradient_of_measure(self.loaded, parameters, partial(self._mean_log_p, i))
            for i in indices
        ]
        if all(gradient is None for gradient in gradients):
            raise CalibrateError(
                "log_p has no gradient by the model's heads; compute it without torch.no_grad, "
                "detach or .numpy()"
            )
        zero = np.zeros_like(parameters.numbers)
        known = [zero if gradient is None else gradient for gradient in gradients]
        return np.array(np.tensordot(weights, np.array(known), 1))

    def fisher_scores(self, parameters: "Parameters", indices: Sequence[int]) -> np.ndarray:
        """Of retention text, which batches do not have."""
        raise NotImplementedError

    def _mean_log_p(self, i: int) -> "Tensor":
        log_p: Tensor = self.log_p(self.loaded.model, self.batches[i])
        return log_p.mean()
