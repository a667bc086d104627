"""The interface of methods of PEFT by which an adapter multiplies what projections give."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

# By the name of a weight, it: (outputs, inputs).
ReadWeight = Callable[[str], torch.Tensor]
TENSOR = "base_model.model.{}"  # of the tensors of a module, in PEFT's files


class AdapterMethod(Protocol):
    """A method of PEFT; factors are those of the outputs of each projection, (outputs,)."""

    @property
    def label(self) -> str:
        """Its name, for people."""

    @property
    def multiplies_biases(self) -> bool:
        """True if biases of projections are multiplied too."""

    def prepare(
        self, factors: dict[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        """The factors of all projections that an adapter names, by the shapes of all weights."""

    def check(self, factors: dict[str, np.ndarray]) -> None:
        """Raises CalibrateError if an adapter becomes larger than the user allows."""

    def configuration(self, factors: dict[str, np.ndarray], **settings: Any) -> Any:
        """The configuration of PEFT, with settings that methods have in common."""

    def tensors(
        self, factors: dict[str, np.ndarray], weights: ReadWeight
    ) -> dict[str, torch.Tensor]:
        """The tensors of an adapter, by PEFT's names."""

    def notes(self, factors: dict[str, np.ndarray]) -> tuple[str, ...]:
        """Lines for users about an adapter."""
