"""Choosing the rule that a head needs, by scores on held-out rows; and the reasons, in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.baselines import kind_label
from calibrate.evidence.evidence import BETA, LOG_P, OWN, PLAIN, Evidence
from calibrate.evidence.prior import LEAST_GAIN, least_lead, simplest_unbeaten
from calibrate.rows.groups import N_BLOCKS
from calibrate.rows.row_problem import Candidate, RowProblem, scores_at
from calibrate.rows.rule_fitting import CONSTANT, KINDS, Options
from calibrate.rows.sharpness import sharpest, sharpness_sentence, with_sharper
from calibrate.rows.solved_rows import Rows

NEAR_MAX_BETA = 0.99
STEP = 1e-3  # of beta above the least, for the slope of log p there


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
    rule evidently beats plain softmax and keeps 90 % of the gain in log p.

    Args:
      problem: of the rows; its options may force a kind, if that beats plain softmax.
      kinds: to choose from.
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
    trade = with_sharper(problem, best)
    chosen = sharpest(trade)
    sentences = [
        *_gain_sentences(chosen, unforced, left_out),
        sharpness_sentence(chosen, trade),
        *_caveats(problem, chosen),
    ]
    return Choice(chosen, candidates, trade, left_out, problem, "; ".join(sentences))


def unbeaten(problem: RowProblem, candidates: Sequence[Candidate]) -> Candidate | None:
    """The simplest rule that no other leads; None if none evidently beats plain softmax."""
    return simplest_unbeaten(candidates, problem.gain, lambda c: least_lead(c.kind))


def wants_less_beta(problem: RowProblem) -> bool:
    """Whether rows evidently want beta below the least allowed, for a gain that can be noticed.

    Evident by the slope of the mean log p at the least beta; the gain is that of a parabola.
    """
    rows, least = problem.rows, np.full(len(problem.rows.size), problem.options.min_beta)
    evidence = problem.evidence
    for name, beta in (("least", least), ("step", least + STEP)):
        evidence = evidence.with_rule(name, scores_at(rows, beta))
    if evidence.gain("step", LOG_P, "least").interval[1] >= 0:
        return False
    _, slope, bend = (rows.shares() @ x for x in rows.profile.derivatives(least))
    return bool(slope**2 >= -2 * LEAST_GAIN * bend)


def least_beta_sentence(min_beta: float) -> str:
    """What is said of rows that want less."""
    return f"best beta is below {min_beta:g}, the least allowed"


def _gain_sentences(best: Candidate, unforced: Candidate, left_out: Mapping[str, str]) -> list[str]:
    """The choice, its gain over plain softmax, and kinds left out."""
    mean, low, high, _ = best.gain
    gain = (
        f"{kind_label(best.kind)} gains {mean:.4f} nats of log p over plain softmax "
        f"(95 % interval {low:.4f} to {high:.4f})"
    )
    if best.kind == unforced.kind == CONSTANT and not left_out:
        gain = f"no other kind is better than one constant beyond chance: {gain}"
    sentences = [gain]
    if best.kind != unforced.kind:
        sentences.append(f"forced: it does not beat {kind_label(unforced.kind)} beyond chance")
    for reason in dict.fromkeys(left_out.values()):
        kinds = [kind_label(kind) for kind, its in left_out.items() if its == reason]
        verb = "were" if len(kinds) > 1 else "was"
        sentences.append(f"{' and '.join(kinds)} {verb} left out: {reason}")
    return sentences


def _caveats(problem: RowProblem, best: Candidate) -> list[str]:
    beta = problem.evidence.scores(best.name, BETA)
    if np.median(beta) > NEAR_MAX_BETA * best.fit.rule.max_beta:
        return ["beta is at its upper bound: on this head hard attention may do as well"]
    return []


def _refusal(problem: RowProblem, candidates: Sequence[Candidate]) -> str:
    """Why no rule is published."""
    gains = ", ".join(
        f"{kind_label(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    force, n_groups = problem.options.force, int(problem.rows.group_index().max(initial=-1)) + 1
    subject = "no rule beats" if force is None else f"{kind_label(force)} does not beat"
    check = "check that the targets are the items that should win"
    advice = f"leave its softmax as it is, or {check}"
    if n_groups < N_BLOCKS and any(c.gain.mean >= LEAST_GAIN for c in candidates):
        advice = (
            f"{n_groups} prompts (groups) are too few to rule out failures that they do not show: "
            "collect more"
        )
    if wants_less_beta(problem):
        advice = (
            f"{least_beta_sentence(problem.options.min_beta)}: the logits barely identify the "
            f"target; {check}, or allow less (--min-beta; min_beta in Python)"
        )
    return (
        f"not for this head: {subject} plain softmax by {LEAST_GAIN:g} nats on average and beyond "
        f"chance on held-out rows (nats of log p, sizes equal: {gains}); {advice}"
    )
