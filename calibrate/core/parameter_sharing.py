"""Parameter sharing: the heads of a model whose rules, or factors, have the same numbers."""

from collections.abc import Sequence
from enum import StrEnum


class Sharing(StrEnum):
    """The heads that share their numbers; the values are what files and tables call them."""

    GLOBAL = "all heads alike"
    PER_LAYER = "each layer"
    PER_HEAD = "each head"

    def columns(self, heads: Sequence[tuple[int, int]]) -> list[int]:
        """The column of each (layer, head) in an array with one for each group of heads."""
        if self is Sharing.GLOBAL:
            return [0] * len(heads)
        if self is Sharing.PER_HEAD:
            return list(range(len(heads)))
        layers = sorted({layer for layer, _ in heads})
        return [layers.index(layer) for layer, _ in heads]
