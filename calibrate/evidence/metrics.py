"""Metrics of rules, and the kinds of items that they are measured on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

NATS = "nats"
PER_CENT = "%"


@dataclass(frozen=True)
class Metric:
    """A number of each item under a rule, and the display of its mean.

    Attributes:
      name: in JSON.
      label: for people.
      shown_as: the label of the displayed mean, if it is another: log p is shown as NLL.
      unit: of the displayed mean.
      factor: the displayed mean is this many times the mean of the items.
      decimals: of the displayed mean.
      per_token: the mean is per token, not per answer.
      place: rank in the sentence on a rule and in JSON; None: in neither.
    """

    name: str
    label: str
    shown_as: str = ""
    unit: str = NATS
    factor: int = 1
    decimals: int = 3
    per_token: bool = False
    place: int | None = None

    @property
    def unit_of_change(self) -> str:
        """The unit of the difference of two means: points where the means are per cent."""
        return "points" if self.unit == PER_CENT else self.unit


# log p of the target or of the whole answer; of text per token.
LOG_P = Metric("log_p", "log-likelihood", "NLL", factor=-1, place=0)
LOG_P_PER_TOKEN = replace(LOG_P, per_token=True)
P = Metric("p", "probability of the target", unit=PER_CENT, factor=100, decimals=1, place=1)
# 1 where the head or the answer is right; of text the share of its tokens.
RIGHT = Metric("right", "accuracy", unit=PER_CENT, factor=100, decimals=1, place=2)
# Of text, in nats per token.
KL = Metric("kl", "KL divergence from the baseline", decimals=4, per_token=True)
# The probability of the item with the highest logit, and the probability that it is the target: 1,
# 0, or 1 / k in a tie of k items. See `calibration_error.py`.
CONFIDENCE = Metric("confidence", "confidence", unit=PER_CENT, factor=100, decimals=1)
RANKED = Metric("ranked", "share ranked first", unit=PER_CENT, factor=100, decimals=1)


def placed(metrics: Iterable[Metric]) -> list[Metric]:
    """The metrics that sentences and JSON have, in their order."""
    places = {metric: metric.place for metric in metrics if metric.place is not None}
    return sorted(places, key=lambda metric: places[metric])


@dataclass(frozen=True)
class ItemKind:
    """A kind of items that rules are scored on.

    Attributes:
      name: plural noun, in sentences and in JSON.
      of_model: they pass through a whole model; else through one head.
      in_tokens: their sizes are tokens; else n.
      label_of_right: the label of RIGHT.
      nll_title: title of a table of LOG_P.
      fingerprinted: the fingerprint is that of the items themselves; else of their head or model.
      knows_nll_of_text: LOG_P of retention text is known; else only its KL.
    """

    name: str
    of_model: bool = False
    in_tokens: bool = False
    label_of_right: str = RIGHT.label
    nll_title: str = "NLL of the target, nats"
    fingerprinted: bool = False
    knows_nll_of_text: bool = True


ROWS = ItemKind("inputs", fingerprinted=True)
SETS = ItemKind("inputs")
ANSWERS = ItemKind(
    "answers",
    of_model=True,
    in_tokens=True,
    label_of_right="exact match",
    nll_title="NLL of the answer; of text, per token; nats",
)
BATCHES = ItemKind(
    "batches", of_model=True, nll_title="NLL of the batch, nats", knows_nll_of_text=False
)
