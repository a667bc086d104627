"""The dial of sharpness q: a fit maximises the mean of p^q, and of log p at q = 0."""

from collections.abc import Sequence

from calibrate.errors import QualityError
from calibrate.rows.row_problem import Candidate, RowProblem

SHARPER = (0.25, 0.5)  # values of q that are tried beyond 0
KEPT = 0.9  # of the gain in log p, by a sharper rule


def with_sharper(problem: RowProblem, best: Candidate) -> list[Candidate]:
    """A rule and, where q is to be found, rules of its kind with larger q."""
    trade = [best]
    for q in SHARPER if problem.options.q is None else ():
        try:
            trade.append(problem.solve(best.kind, q))
        except QualityError:  # beyond what the sizes that the head was trained on allow
            break
    return trade


def sharpest(trade: Sequence[Candidate]) -> Candidate:
    """The last of some rules, least sharp first, that keeps enough of the first one's gain."""
    kept = [c for c in trade if c.gain.evident and c.gain.mean >= KEPT * trade[0].gain.mean]
    return kept[-1]


def sharpness_sentence(chosen: Candidate, trade: Sequence[Candidate]) -> str:
    """How sharp the rule is, and what that costs and gives."""
    mildest = trade[0]
    if chosen.q == 0 or len(trade) == 1:
        return f"fitted with q = {chosen.q:g}"
    return (
        f"fitted with q = {chosen.q:g}, which gives the target {chosen.mean_p:.1%} of the "
        f"attention ({mildest.mean_p:.1%} with q = {mildest.q:g}) for "
        f"{mildest.mean_log_p - chosen.mean_log_p:.4f} nats of log p"
    )
