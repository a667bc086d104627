"""The evidence that a coefficient file keeps of fits per head: their scores and a sentence."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from calibrate.core.rule_kinds import KINDS
from calibrate.evidence.evidence import OWN, join
from calibrate.evidence.significance import ALPHA, significant_fdr
from calibrate.fitting.options import LIKELIHOOD, Options
from calibrate.fitting.per_head import HeadFit
from calibrate.fitting.verdict_clauses import NOT_JUDGED, margin_clause
from calibrate.solver.solved_rows import head_label

MAX_NAMED = 10  # heads in a sentence


def quality_of_heads(heads: list[HeadFit], options: Options) -> dict[str, Any]:
    """The evidence that a file keeps: held-out scores of all calibrated heads, and a sentence."""
    verdict = _gains(heads) if options.kind is None else _on_request(heads, options)
    together = join([head.held_out_evidence for head in heads if head.held_out_evidence])
    trained = options.trained_limit().check(together, OWN)
    if trained.n:
        verdict = f"{verdict}; {margin_clause(trained)}"
    verdict = f"{verdict}. {NOT_JUDGED}"
    return {
        "held_out": together.gain_records(),
        "candidates": mean_candidates(heads),
        "verdict": verdict,
    }


def mean_candidates(heads: Sequence[HeadFit]) -> list[dict[str, Any]]:
    """The kinds of rule that were compared, simplest first, with means over heads.

    A head that a kind could not be fitted to has the baseline by it; one that no kind could be
    fitted to is left out.
    """
    compared = [head.candidates for head in heads if head.candidates]
    means = []
    for kind in KINDS:
        records = [of_head[kind] for of_head in compared if kind in of_head]
        if not records:
            continue
        n_baseline = sum(kind not in of_head for of_head in compared)
        gains = [record["gain"] for record in records]
        first = [next(iter(of_head.values())) for of_head in compared]
        baseline = np.mean([record["log_p"] - record["gain"] for record in first])
        gain = float(np.mean([*gains, *[0.0] * n_baseline]))
        means.append({**records[0], "log_p": float(baseline) + gain, "gain": gain})
    return means


def _gains(heads: list[HeadFit]) -> str:
    """The number of heads that gain, and how much."""
    means = [head.nats for head in heads if head.entry]
    return (
        f"{len(means)} of {len(heads)} heads gain, by {min(means):.4f} to {max(means):.4f} nats of "
        f"log p (false-discovery rate {ALPHA:.0%})"
    )


def _on_request(heads: list[HeadFit], options: Options) -> str:
    """The number of heads that have a rule of the kind named and that gain, and those without."""
    is_likelihood = options.loss == LIKELIHOOD
    rule = f"a rule ({options.kind}, on request)" if is_likelihood else "a polynomial"
    fitted = [head for head in heads if head.entry]
    signs = significant_fdr([head.gain.p for head in fitted if head.gain])
    n_gain = int(np.sum(signs))
    means = [head.nats for head in fitted]
    text = (
        f"{len(fitted)} of {len(heads)} heads have {rule}, of which {n_gain} gain "
        f"significantly (false-discovery rate {ALPHA:.0%}); gains from {min(means):+.4f} to "
        f"{max(means):+.4f} nats of log p"
    )
    others = [head_label(head.layer, head.head) for head in heads if not head.entry]
    if not others:
        return text
    more = f" and {len(others) - MAX_NAMED:,} more" if len(others) > MAX_NAMED else ""
    without = "without one" if is_likelihood else "with too few rows for one"
    return f"{text}; {without}: {'; '.join(others[:MAX_NAMED])}{more}"
