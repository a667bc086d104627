"""Refusals of a fit through a model: few examples, no improvement, a loss beyond its margin."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from calibrate.datasets.examples import ExampleCollection, ExampleSet
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import OWN, Evidence
from calibrate.evidence.metrics import KL, LOG_P
from calibrate.evidence.non_inferiority import NonInferiorityResult, check_limits
from calibrate.evidence.significance import MIN_GAIN
from calibrate.evidence.verdict import judge
from calibrate.model.calibration_and_validation import ModelSolution, Validation
from calibrate.model.options import ModelOptions
from calibrate.model.splits import splits_of

MIN_EXAMPLES = 8  # of a template and length
LIMIT_PARAMETERS = ("max_kl", "tolerance", "trained_up_to")  # that a refusal may name


def require_enough_examples(collection: ExampleCollection) -> None:
    """Raises QualityError for a collection without answers, or with too few examples to split."""
    examples = collection.set
    if all(cell.text for cell in examples.cells):
        raise QualityError(f"{collection.folder} has no answers; collect prompts or a task, too")
    if fault := too_few_answers(examples):
        raise QualityError(fault)
    text = np.array([examples.cells[example.cell].text for example in examples.examples])
    if text.any() and len(np.unique(splits_of(examples)[text])) < 2:
        raise QualityError(
            f"{text.sum()} window of plain text is too few for validation and test; collect a "
            "longer text, or shorter windows"
        )


def too_few_answers(examples: ExampleSet) -> str:
    """The template and length that has too few answers for a fit, in words; "" if none has."""
    counts = Counter[int]()
    groups = {
        (x.cell, x.group if x.group >= 0 else -1 - i) for i, x in enumerate(examples.examples)
    }
    counts.update(cell for cell, _ in groups)
    items = "examples" if len(groups) == len(examples.examples) else "prompts or groups of lines"
    for i, cell in enumerate(examples.cells):
        if not cell.text and counts[i] < MIN_EXAMPLES:
            return (
                f"template {cell.template} at {cell.length:,} tokens has {counts[i]} {items}; "
                f"a fit needs {MIN_EXAMPLES} of each at least, and better 100: collect them into "
                "a new folder"
            )
    return ""


def cause_of_refusal(validation: Validation, solution: ModelSolution, options: ModelOptions) -> str:
    """The constraint without which the rules would gain, in words; "" if there is none.

    Passes examples through the model: the rules at interpolation weight 1.
    """
    # No constraint limits a weight that was given.
    if options.interpolation is not None or solution.weight == 1:
        return ""
    full = validation.at_full_weight(solution).value
    if full.gain < MIN_GAIN:
        return ""
    (constrained,) = validation.constrained_values([solution.parameters.interpolated(1.0)])
    full = replace(full, results=constrained.results)
    return "" if full.is_allowed else validation.objective.describe_most_exceeded(full)


def require_improvement(
    evidence: Evidence,
    results: Sequence[NonInferiorityResult],
    find_cause: Callable[[], str] = str,
) -> None:
    """Raises QualityError unless held-out answers gain by the fit, OWN, within its margins.

    Retention text, and answers of trained lengths together, may lose no more than these in the
    mean. Errors of few examples are wide, so of one cell only a significant loss counts.

    Args:
      results: of each constraint.
      find_cause: says what keeps rules from gaining; called before a refusal alone.
    """
    answers, verdict = evidence.answers, judge(evidence, OWN)
    gain = answers.gain(OWN, LOG_P)
    if not verdict.use or gain.mean < MIN_GAIN:
        remedy = "collect more examples"
        raise QualityError(
            f"not for this model: log p changes by {nats(gain)} on {answers.n:,} held-out "
            f"{evidence.of.items.name}; {find_cause() or remedy}",
            parameter=LIMIT_PARAMETERS,
        )
    exceeded = [result for result in check_limits(evidence, OWN) if not result.passed]
    exceeded += [result for result in results if result.significantly_exceeded]
    if exceeded:
        worst = max(exceeded, key=lambda result: result.share)
        raise QualityError(_exceeded(worst), parameter=LIMIT_PARAMETERS)


def _exceeded(result: NonInferiorityResult) -> str:
    """The margin that a fit exceeds, and what to do."""
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


def nats(estimate: Estimate) -> str:
    """A gain with its standard error, in words."""
    return f"{estimate.mean:+.3f} ± {estimate.error:.3f} nats"
