"""Choosing the kind of rule that a head needs, and how sharp, by scores on held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.errors import QualityError
from calibrate.maths import solver
from calibrate.rows.candidates import Candidate, fit_candidate
from calibrate.rows.fit_sentences import (
    gain_sentences,
    refusal,
    sharpness_sentence,
    wanted_below_1,
    warnings,
)
from calibrate.rows.gain import Evidence, Scores
from calibrate.rows.held_out import HeldOut, held_out_by_size
from calibrate.rows.rule_fitting import KINDS, Options, Pools
from calibrate.rows.solved_rows import Rows
from calibrate.rows.weighting import assign_blocks, row_weights

SHARPER = (0.25, 0.5)  # values of q that are tried beyond 0
KEPT = 0.9  # of the gain in log p, by a sharper rule


@dataclass(frozen=True, eq=False)
class Trial:
    """Every kind of rule on the same rows."""

    evidence: Evidence  # of the rows that were solved
    options: Options
    plain: Scores  # under plain softmax
    candidates: list[Candidate]  # simplest first
    left_out: dict[str, str]  # kind -> why it could not be fitted
    sharper: dict[str, list[Candidate]]  # kind -> its rules with larger q, as far as they are known

    def of_kinds(self, kinds: Sequence[str]) -> "Trial":
        """The same, of some kinds only."""
        return replace(
            self,
            candidates=[c for c in self.candidates if c.kind in kinds],
            left_out={kind: why for kind, why in self.left_out.items() if kind in kinds},
        )

    def simplest_unbeaten(self) -> Candidate | None:
        """The simplest rule that no other leads; None if none evidently beats plain softmax."""
        best: Candidate | None = None
        for candidate in self.candidates:
            gain = self.evidence.gain(candidate.scores, best.scores) if best else candidate.gain
            if gain.leads(candidate.kind) if best else gain.evident:
                best = candidate
        return best


@dataclass(frozen=True, eq=False)
class Choice:
    """The rule to publish, and why."""

    chosen: Candidate
    candidates: list[Candidate]  # of each kind, simplest first
    trade: list[Candidate]  # of the chosen kind, least sharp first
    left_out: dict[str, str]  # kind -> why it could not be fitted
    rows: Rows  # those that were solved
    block: np.ndarray  # (rows,) block of each
    held_out: list[HeldOut]
    verdict: str
    options: Options  # of the candidates, but for q


def choose(rows: Rows, options: Options, force: str | None = None) -> Choice:
    """Fits every kind of rule, and chooses one; see `try_kinds` and `choose_from`."""
    return choose_from(try_kinds(rows, options), force)


def choose_from(trial: Trial, force: str | None = None) -> Choice:
    """The simplest rule that no other beats beyond chance, as sharp as its gain allows.

    Unless q is given, the kind is chosen at q = 0, and then the largest q of 0, 1/4 and 1/2 whose
    rule evidently beats plain softmax and keeps 90 % of the gain in log p.

    Args:
      trial: the kinds to choose from.
      force: a kind to choose even if another scores better, if it beats plain softmax.
    Raises:
      QualityError: too few rows for any fit, or none that evidently beats plain softmax.
    """
    evidence, candidates, left_out = trial.evidence, trial.candidates, trial.left_out
    if not candidates or force in left_out:
        raise QualityError(left_out[force or "constant"])
    unforced = trial.simplest_unbeaten()
    best = next((c for c in candidates if c.kind == force), unforced)
    if unforced is None or best is None or not best.gain.evident:
        below = wanted_below_1(evidence)
        raise QualityError(refusal(candidates, evidence.rows.n_groups(), force, below))
    if best.kind not in trial.sharper:
        trial.sharper[best.kind] = _sharper(trial, best)
    trade = [best, *trial.sharper[best.kind]]
    chosen = sharpest(trade)
    sentences = [
        *gain_sentences(chosen, unforced, left_out),
        sharpness_sentence(chosen, trade),
        *warnings(chosen),
    ]
    held_out = held_out_by_size(evidence.rows, trial.plain.log_p, chosen.scores.log_p)
    return Choice(
        chosen, candidates, trade, left_out, evidence.rows, evidence.block, held_out,
        "; ".join(sentences), trial.options,
    )  # fmt: skip


def _sharper(trial: Trial, best: Candidate) -> list[Candidate]:
    """The same kind of rule with larger q, where q is to be found."""
    if trial.options.q is not None:
        return []
    sharper = []
    for q in SHARPER:
        options = trial.options._replace(q=q)
        evidence = trial.evidence
        pools = Pools(evidence.rows, evidence.block, options)
        try:
            sharper.append(fit_candidate(evidence, trial.plain, best.kind, options, pools))
        except QualityError:  # beyond what the sizes that the head was trained on allow
            break
    return sharper


def sharpest(trade: Sequence[Candidate]) -> Candidate:
    """The last of some rules, least sharp first, that keeps enough of the first one's gain."""
    kept = [c for c in trade if c.gain.evident and c.gain.mean >= KEPT * trade[0].gain.mean]
    return kept[-1]


def try_kinds(rows: Rows, options: Options, kinds: Sequence[str] = KINDS) -> Trial:
    """Fits every kind of rule, and scores it on rows that folds leave out.

    Args:
      rows: of a collection; those without weight, or that the solver did not solve, are left out.
      options: of the fits.
      kinds: those to fit, simplest first.
    Raises:
      QualityError: there are rows, and none has any weight.
    """
    if len(rows.weight) and not rows.weight.any():
        raise QualityError("no row has any weight: all of them are 0; give some")
    rows = rows.take((rows.weight > 0) & (rows.status != solver.UNSOLVED))
    evidence = Evidence(rows, assign_blocks(rows), row_weights(rows), options.prior_rows)
    plain = evidence.score(np.ones_like(rows.beta))
    trial = Trial(evidence, options, plain, [], {}, {})
    pools = Pools(rows, evidence.block, options)
    for kind in kinds:
        try:
            trial.candidates.append(fit_candidate(evidence, plain, kind, options, pools))
        except QualityError as failure:
            trial.left_out[kind] = str(failure)
    return trial
