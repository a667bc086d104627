"""Harm to text in the measures that others report of quantised models.

llama.cpp's `llama-perplexity --kl-divergence` prints the same: perplexity before and after, mean
and 99.9 % KL divergence, and the share of tokens whose most probable token stays ("Same top p").
"""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import HIGHEST_KL, KL, LOG_P, SAME_TOP

TAIL = 0.001  # the share of tokens whose KL is above `kl_999`


class TextHarm(NamedTuple):
    """A rule on windows of text, beside the baseline."""

    perplexity: float  # exp of the NLL, nats a token
    baseline_perplexity: float
    kl: Estimate  # nats a token, in the mean
    kl_999: float  # nats: the 99.9 % quantile of the KL of a token; NaN where it is not known
    same_top: Estimate  # the share of tokens whose most probable token is the baseline's
    n_tokens: int


def text_harm(evidence: Evidence, rule: str) -> TextHarm | None:
    """The harm of a rule to the text among some items; None without text, or without its tokens.

    Means give strata, domains of text at a length, equal weight; the quantile is of all tokens.
    """
    if SAME_TOP not in evidence.values or not evidence.text.n:
        return None
    text = evidence.text
    assert text.text_tokens is not None
    n_tokens = int(text.text_tokens.sum())
    own, baseline = (float(np.exp(-text.mean(x, LOG_P).mean)) for x in (rule, BASELINE))
    quantile = upper_quantile(text.scores(rule, HIGHEST_KL), n_tokens)
    mean = text.mean(rule, KL), text.mean(rule, SAME_TOP)
    return TextHarm(own, baseline, mean[0], quantile, mean[1], n_tokens)


def text_harm_by_domain(evidence: Evidence, rule: str) -> dict[str, TextHarm]:
    """The same of each domain of text, by its name; empty where it is not known."""
    harms = {domain: text_harm(part, rule) for domain, part in evidence.text.by("template").items()}
    return {str(domain): harm for domain, harm in harms.items() if harm is not None}


def upper_quantile(highest: np.ndarray, n_tokens: int) -> float:
    """The KL that a share TAIL of all tokens exceeds, by the highest ones of each window.

    Args:
      highest: (windows, some) nats. It is exact unless a window has more of the tokens above it
        than `highest` holds of each; then it is a lower bound.
      n_tokens: of all windows.
    Returns:
      nats; NaN where more are needed than there are.
    """
    above = int(TAIL * n_tokens)
    falling = -np.sort(-highest, axis=None)
    return float(falling[above]) if above < len(falling) else np.nan
