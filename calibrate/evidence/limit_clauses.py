"""Clauses on limits of harm: files of fits have them, and reports say the same."""

from calibrate.evidence.metrics import KL, LOG_P, LOG_P_PER_TOKEN
from calibrate.evidence.non_inferiority import NonInferiorityResult

NOT_JUDGED = (
    "This is about attention heads, not about the model, which may lose where they gain: "
    "`calibrate model evaluate` scores its answers"
)
UNITS_OF_LOSS = {
    LOG_P: "nats of log-likelihood",
    LOG_P_PER_TOKEN: "nats of log-likelihood per token",
    KL: "nats per token of KL divergence from the baseline",
}


def margin_clause(result: NonInferiorityResult, name: str = "") -> str:
    """A loss beside its margin: "in distribution (n <= 16): +0.0133 ± 0.0071 nats of ...".

    Args:
      result: of a rule.
      name: of the items, for people; that of `items_name` if empty.
    """
    metric, margin, loss = result.limit.metric, result.limit.margin, result.loss
    word = "limit" if metric == KL else "tolerance"
    bound = f" ({word} {margin:g})" if margin >= 0 else ""
    if not result.passed:
        bound = f" (exceeds the {word} of {margin:g})"
    shown = loss.shown(".4f") if metric == KL else (-loss).shown("+.4f")
    return f"{name or items_name(result)}: {shown} {UNITS_OF_LOSS[metric]}{bound}"


def items_name(result: NonInferiorityResult) -> str:
    """The items of a result; where one size exceeds the margin, that size."""
    return result.limit.name if result.size is None else f"in distribution (n = {result.size:,})"
