"""Harm to retention text: a sentence of the verdict, a table by domain, and JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from calibrate.evidence.estimate import decimal
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.harm_limits import TextHarm, text_harm, text_harm_by_domain
from calibrate.evidence.metrics import KL, SAME_TOP
from calibrate.prompts.retention_text import built_in_domains
from calibrate.report.blocks import Table
from calibrate.report.labels import estimate_text
from calibrate.store.fit import Fit

TEXT_COLUMNS = (
    "tokens",
    "perplexity",
    "mean KL, nats",
    "99.9th percentile of the KL per token, nats",
    "same top token, %",
)
TEXT_NOTE = (
    "Perplexity: baseline → fit. KL: divergence of the next token's distribution from the "
    "baseline's. Same top token: tokens whose most probable token is unchanged. llama.cpp "
    "prints the same of quantised models."
)


def text_harm_sentence(evidence: Evidence, rule: str) -> str:
    """The harm to held-out text, and its range over domains; "" if it is unknown.

    The range is given because the mean over some domains does not bound the harm to another one.
    """
    text = evidence.text.held_out_templates
    harm = text_harm(text, rule)
    if harm is None:
        return ""
    domains = text_harm_by_domain(text, rule)
    of_several = list(domains.values()) if len(domains) > 1 else []
    increases = [100 * (x.perplexity / x.baseline_perplexity - 1) for x in of_several]
    tails = [x.kl_999 for x in of_several]
    same_tops = [100 * x.same_top.mean for x in of_several]
    return (
        (
            f"{_kl_of_text(domains)}perplexity {harm.baseline_perplexity:.4g} -> "
            f"{harm.perplexity:.4g}{_range(increases, '+.1f', ' %')}, "
            f"99.9th percentile of the KL per token {harm.kl_999:.3f} nats{_range(tails, '.3f')}, "
            f"same top token {100 * harm.same_top.mean:.2f} %{_range(same_tops, '.2f', ' %')}."
        )
        + _on_memorised_text(domains)
        + _on_longer_text(text, evidence.fits.get(rule))
    )


def _kl_of_text(domains: Mapping[str, TextHarm]) -> str:
    """The beginning of the sentence, with the range of the KL if there are several domains."""
    if len(domains) < 2:
        return "Held-out text: "
    by_kl = sorted(domains, key=lambda name: domains[name].kl.mean)
    low, high = (f"{domains[name].kl.mean:.4f} ({name})" for name in (by_kl[0], by_kl[-1]))
    return f"Held-out text, with the range over its domains: KL from {low} to {high}, "


def _range(numbers: Sequence[float], shape: str, unit: str = "") -> str:
    """The lowest and the highest of some numbers: " (0.090 to 0.131)"; "" of none."""
    known = [x for x in numbers if np.isfinite(x)]
    return f" ({min(known):{shape}} to {max(known):{shape}}{unit})" if known else ""


def _on_memorised_text(domains: Iterable[str]) -> str:
    """A caution about the built-in text, which no model has learnt; "" for other text."""
    if not built_in_domains().issuperset(domains):
        return ""
    return (
        " The built-in text was written for this package: text that the model has memorised, "
        "such as licences, may have several times its KL."
    )


def _on_longer_text(text: Evidence, fit: Fit | None) -> str:
    """A caution about longer text, for rules of the entropy that are measured at one length."""
    lengths = text.by("size")
    if fit is None or not fit.rule.by_entropy or len(lengths) > 1:
        return ""
    return (
        f" Text of more than {max(lengths):,} tokens was not measured: entropies grow with the "
        "context, and the KL may too."
    )


def text_harm_table(evidence: Evidence, rule: str, name: str) -> Table | None:
    """A row for each domain of text, and one for all; None if scores of tokens are unknown."""
    of_all = text_harm(evidence, rule)
    if of_all is None:
        return None
    domains = text_harm_by_domain(evidence, rule)
    rows = [[domain, *_domain_cells(harm)] for domain, harm in domains.items()]
    is_one = len(rows) == 1
    return Table(
        ["text", *TEXT_COLUMNS],
        rows if is_one else [*rows, ["all", *_domain_cells(of_all)]],
        f"Retention text under {name}",
        TEXT_NOTE,
        left=["text"],
        marked=() if is_one else [len(rows)],
    )


def _domain_cells(harm: TextHarm) -> list[str]:
    return [
        f"{harm.n_tokens:,}",
        f"{harm.baseline_perplexity:.4g} → {harm.perplexity:.4g}",
        estimate_text(harm.kl, KL),
        decimal(harm.kl_999, ".3f"),
        estimate_text(harm.same_top, SAME_TOP),
    ]


def text_harm_json(evidence: Evidence, rule: str) -> dict[str, Any] | None:
    """The numbers of the table, for all text and each domain; `same_top` is a share of 1."""
    of_all = text_harm(evidence, rule)
    if of_all is None:
        return None
    domains = text_harm_by_domain(evidence, rule).items()
    return _harm_json(of_all) | {
        "domains": [{"text": domain} | _harm_json(harm) for domain, harm in domains]
    }


def _harm_json(harm: TextHarm) -> dict[str, Any]:
    numbers = harm._asdict()
    for name in ("kl", "same_top"):
        estimate = numbers[name]
        numbers |= {name: float(estimate.mean), f"{name}_error": float(estimate.error)}
    return numbers
