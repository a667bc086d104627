"""Choosing the rule that a head needs, and how sharp, by scores on held-out rows; and the reasons.

The dial of sharpness is q: a fit maximises the mean of p^q, and of log p at q = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.baselines import kind_label
from calibrate.evidence.evidence import LOG_P, OWN, PLAIN, Evidence
from calibrate.evidence.prior import LEAST_GAIN, least_lead, simplest_unbeaten
from calibrate.rows.row_problem import Candidate, RowProblem
from calibrate.rows.rule_fitting import CONSTANT, KINDS, Options
from calibrate.rows.solved_rows import Rows

SHARPER = (0.25, 0.5)  # values of q that are tried beyond 0
KEPT = 0.9  # of the gain in log p, by a sharper rule


@dataclass(frozen=True, eq=False)
class Choice:
    """The rule to publish, and why."""

    chosen: Candidate
    candidates: list[Candidate]  # of each kind, simplest first
    trade: list[Candidate]  # of the chosen kind, least sharp first
    left_out: dict[str, str]  # kind -> why it could not be fitted
    problem: RowProblem
    verdict: str

    @property
    def held_out(self) -> Evidence:
        """log p of plain softmax and, as OWN, of the chosen rule, held out."""
        evidence = self.problem.evidence
        log_p = [evidence.scores(name, LOG_P) for name in (PLAIN, self.chosen.name)]
        return evidence.with_only((PLAIN, OWN), {LOG_P: np.array(log_p, np.float32)})


def choose(rows: Rows, options: Options) -> Choice:
    """Fits every kind of rule, and chooses one; see `choose_from`."""
    return choose_from(RowProblem(rows, options))


def choose_from(problem: RowProblem, kinds: Sequence[str] = KINDS) -> Choice:
    """The simplest rule that no other beats beyond chance, as sharp as its gain allows.

    Unless q is given, the kind is chosen at q = 0, and then the largest q of 0, 1/4 and 1/2 whose
    rule evidently beats plain softmax and keeps 90 % of the gain in log p. The problem's options
    may force a kind, if that beats plain softmax.

    Raises:
      QualityError: too few rows for any fit, or none that evidently beats plain softmax.
    """
    force, (candidates, left_out) = problem.options.force, problem.solve_kinds(kinds)
    if not candidates or force in left_out:
        raise QualityError(left_out[force or CONSTANT])
    unforced = unbeaten(problem, candidates)
    best = next((c for c in candidates if c.kind == force), unforced)
    if unforced is None or best is None or not best.gain.evident:
        raise QualityError(_refusal(problem, candidates))
    trade = [best, *_sharper(problem, best)]
    kept = [c for c in trade if c.gain.evident and c.gain.mean >= KEPT * best.gain.mean]
    choice = Choice(kept[-1], candidates, trade, left_out, problem, "")
    return replace(choice, verdict=_verdict(choice, unforced))


def unbeaten(problem: RowProblem, candidates: Sequence[Candidate]) -> Candidate | None:
    """The simplest rule that no other leads; None if none evidently beats plain softmax."""
    return simplest_unbeaten(candidates, problem.gain, lambda c: least_lead(c.kind))


def _sharper(problem: RowProblem, best: Candidate) -> list[Candidate]:
    """Where q is to be found, rules of the same kind with larger q."""
    trade: list[Candidate] = []
    for q in SHARPER if problem.options.q is None else ():
        try:
            trade.append(problem.solve(best.kind, q))
        except QualityError:  # beyond what the sizes that the head was trained on allow
            break
    return trade


def _verdict(choice: Choice, unforced: Candidate) -> str:
    """The choice, its gain over plain softmax, and kinds left out."""
    best, (mean, low, high, _) = choice.chosen, choice.chosen.gain
    told = [
        f"{kind_label(best.kind)} gains {mean:.4f} nats of log p over plain softmax "
        f"(95 % interval {low:.4f} to {high:.4f}), fitted with q = {best.q:g}"
    ]
    if best.kind != unforced.kind:
        told.append(f"forced: it does not beat {kind_label(unforced.kind)} beyond chance")
    for reason in dict.fromkeys(choice.left_out.values()):
        kinds = [kind_label(kind) for kind, its in choice.left_out.items() if its == reason]
        told.append(f"without {' and '.join(kinds)}: {reason}")
    return "; ".join(told)


def _refusal(problem: RowProblem, candidates: Sequence[Candidate]) -> str:
    """Why no rule is published."""
    gains = ", ".join(
        f"{kind_label(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    force = problem.options.force
    subject = "no rule beats" if force is None else f"{kind_label(force)} does not beat"
    return (
        f"not for this head: {subject} plain softmax by {LEAST_GAIN:g} nats on average and beyond "
        f"chance on held-out rows (nats of log p, sizes equal: {gains}); leave its softmax "
        "as it is, check that the targets are the items that should win, give more prompts, or "
        "allow less beta (--min-beta; min_beta in Python)"
    )
