"""Refusals of a fit through a model: too few examples, no gain, a loss beyond its margin."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.estimate import MIN_GAIN, Estimate
from calibrate.evidence.evidence import OWN, Evidence
from calibrate.evidence.harm_limits import NonInferiorityResult, check_limits
from calibrate.evidence.metrics import KL, LOG_P
from calibrate.evidence.significance import judge
from calibrate.model.scored_splits import ModelSolution
from calibrate.model.splits import assign_splits
from calibrate.prompts.examples import ExampleCollection, ExampleSet

MIN_EXAMPLES = 8  # of a template and length
_LIMIT_PARAMETERS = ("max_kl", "tolerance", "trained_up_to")  # that a message may name


def require_enough_examples(collection: ExampleCollection) -> None:
    """Raises QualityError if a collection has no answers, or too few examples to split."""
    examples = collection.set
    if all(cell.text for cell in examples.cells):
        raise QualityError(f"{collection.folder} has no answers; collect prompts or a task, too")
    if error := too_few_answers(examples):
        raise QualityError(error)
    is_text = np.array([examples.is_text(example) for example in examples.examples])
    if is_text.any() and len(np.unique(assign_splits(examples)[is_text])) < 2:
        raise QualityError(
            f"{is_text.sum()} window of plain text is too few for validation and test; collect a "
            "longer text, or shorter windows"
        )


def too_few_answers(examples: ExampleSet) -> str:
    """Describes a template and length that has too few answers for a fit; "" if none has."""
    groups = {
        (x.cell, x.group if x.group >= 0 else -1 - i) for i, x in enumerate(examples.examples)
    }
    counts = Counter(cell for cell, _ in groups)
    items = "examples" if len(groups) == len(examples.examples) else "prompts or groups of lines"
    for i, cell in enumerate(examples.cells):
        if not cell.text and counts[i] < MIN_EXAMPLES:
            return (
                f"template {cell.template} at {cell.length:,} tokens has {counts[i]} {items}; "
                f"a fit needs {MIN_EXAMPLES} of each at least, and better 100: collect them into "
                "a new folder"
            )
    return ""


def no_gain(solution: ModelSolution) -> QualityError:
    """The error for a fit whose rules gain nothing on the validation split."""
    return QualityError(
        f"not for this model: {solution.family.label} gains nothing on the validation split "
        f"({_describe_gain(solution.value.over())}); "
        f"give prompts that the model answers in part{_limits_remedy(solution.weight)}",
        parameter=_LIMIT_PARAMETERS,
    )


def _limits_remedy(weight: float) -> str:
    """A further remedy if limits keep the interpolation weight below 1; else ""."""
    if weight == 1:
        return ""
    return f", or allow more with max_kl= or tolerance=: the interpolation weight is {weight:.2g}"


def require_improvement(
    evidence: Evidence, results: Sequence[NonInferiorityResult], weight: float = 1.0
) -> None:
    """Raises QualityError unless the fit, OWN, gains on held-out answers within its margins.

    The mean loss of retention text, and of answers of trained lengths together, must be within the
    margins. The loss of a single cell, which has few examples and a large error, counts only if it
    is significant.

    Args:
      results: of each constraint.
      weight: interpolation weight of the fit.
    """
    answers, verdict = evidence.answers, judge(evidence, OWN)
    gain = answers.gain(OWN, LOG_P)
    if not verdict.use or gain.mean < MIN_GAIN:
        raise QualityError(
            f"not for this model: log p changes by {_describe_gain(gain)} on {answers.n:,} "
            f"held-out {evidence.of.items.name}; collect more examples"
            f"{_limits_remedy(weight)}",
            parameter=_LIMIT_PARAMETERS,
        )
    exceeded = [result for result in check_limits(evidence, OWN) if not result.passed]
    exceeded += [result for result in results if result.significantly_exceeded]
    if exceeded:
        worst = max(exceeded, key=lambda result: result.share)
        raise QualityError(_describe_exceeded(worst), parameter=_LIMIT_PARAMETERS)


def _describe_exceeded(result: NonInferiorityResult) -> str:
    loss, margin = result.loss, result.limit.margin
    lost = f"{loss.mean:.4f} ± {loss.error:.4f} nats per token"
    if result.limit.metric == KL:
        return (
            f"retention text moves by a KL of {lost}, and {margin:g} is allowed; collect more of "
            "it, or allow more with max_kl="
        )
    return (
        f"answers of trained lengths lose {lost}, and {margin:g} is allowed; collect more of them "
        "(lengths up to trained_up_to=), or allow more with tolerance="
    )


def _describe_gain(estimate: Estimate) -> str:
    return f"{estimate.mean:+.3f} ± {estimate.error:.3f} nats"
