"""Metrics of rules, and the kinds of items that they are measured on."""

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
    """

    name: str
    label: str
    shown_as: str = ""
    unit: str = NATS
    factor: int = 1
    decimals: int = 3
    per_token: bool = False

    @property
    def unit_of_change(self) -> str:
        """The unit of the difference of two means: points where the means are per cent."""
        return "points" if self.unit == PER_CENT else self.unit


# log p of the target or of the whole answer; of text per token.
LOG_P = Metric("log_p", "log-likelihood", "NLL", factor=-1)
LOG_P_PER_TOKEN = replace(LOG_P, per_token=True)
P = Metric("p", "probability of the target", unit=PER_CENT, factor=100, decimals=1)
# 1 where the head or the answer is right; of text the share of its tokens.
RIGHT = Metric("right", "accuracy", unit=PER_CENT, factor=100, decimals=1)
# Of text, in nats per token.
KL = Metric("kl", "KL divergence from the baseline", decimals=4, per_token=True)
# The probability of the item with the highest logit, and the probability that it is the target: 1,
# 0, or 1 / k in a tie of k items. See `calibration_error.py`.
CONFIDENCE = Metric("confidence", "confidence", unit=PER_CENT, factor=100, decimals=1)
RANKED = Metric("ranked", "share ranked first", unit=PER_CENT, factor=100, decimals=1)

SUMMARY = (LOG_P, P, RIGHT)  # in the sentence on a rule and in JSON, as far as they are known


@dataclass(frozen=True)
class ItemKind:
    """A kind of items that rules are scored on.

    Attributes:
      name: plural noun, in sentences and in JSON.
      of_model: they pass through a whole model, and their sizes are tokens.
      label_of_right: the label of RIGHT.
    """

    name: str
    of_model: bool = False
    label_of_right: str = RIGHT.label

    @property
    def unit_of_size(self) -> str:
        """The unit of the sizes of the items."""
        return "tokens" if self.of_model else "n"


ROWS = ItemKind("inputs")
SETS = ItemKind("new inputs")  # drawn to be scored, and not those of the fit
ANSWERS = ItemKind("answers", of_model=True, label_of_right="exact match")
BATCHES = ItemKind("batches", of_model=True)
