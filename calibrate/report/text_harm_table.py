"""Harm to text by domain, as a table and as JSON."""

from typing import Any

from calibrate.evidence.estimate import decimal
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import KL, SAME_TOP
from calibrate.evidence.text_harm import TextHarm, text_harm, text_harm_by_domain
from calibrate.report.blocks import Table
from calibrate.report.metric_text import estimate_text

COLUMNS = (
    "tokens",
    "baseline perplexity",
    "perplexity",
    "mean KL, nats",
    "99.9 % KL, nats",
    "same top token, %",
)
NOTE = (
    "KL: divergence of the next token's distribution from the baseline's. Same top token: tokens "
    "whose most probable token is unchanged. llama.cpp prints the same of quantised models."
)


def text_harm_table(evidence: Evidence, rule: str, name: str) -> Table | None:
    """A row for each domain of text, and one for all; None where single tokens are not known."""
    of_all = text_harm(evidence, rule)
    if of_all is None:
        return None
    domains = text_harm_by_domain(evidence, rule)
    rows = [[domain, *_cells(harm)] for domain, harm in domains.items()]
    is_one = len(rows) == 1
    return Table(
        ["text", *COLUMNS],
        rows if is_one else [*rows, ["all", *_cells(of_all)]],
        f"Retention text under {name}",
        NOTE,
        left=["text"],
        marked=() if is_one else [len(rows)],
    )


def _cells(harm: TextHarm) -> list[str]:
    return [
        f"{harm.n_tokens:,}",
        f"{harm.baseline_perplexity:.4g}",
        f"{harm.perplexity:.4g}",
        estimate_text(harm.kl, KL),
        decimal(harm.kl_999, ".3f"),
        estimate_text(harm.same_top, SAME_TOP),
    ]


def text_harm_json(evidence: Evidence, rule: str) -> dict[str, Any] | None:
    """The same numbers: of all text, and of each domain; `same_top` is a share of 1."""
    of_all = text_harm(evidence, rule)
    if of_all is None:
        return None
    domains = text_harm_by_domain(evidence, rule).items()
    return _numbers(of_all) | {
        "domains": [{"text": domain} | _numbers(harm) for domain, harm in domains]
    }


def _numbers(harm: TextHarm) -> dict[str, Any]:
    numbers = harm._asdict()
    for name in ("kl", "same_top"):
        estimate = numbers[name]
        numbers |= {name: float(estimate.mean), f"{name}_error": float(estimate.error)}
    return numbers
