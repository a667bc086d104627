"""IA3: an adapter that multiplies what a projection gives by a vector.

For queries that is the constant of each head repeated by its width, and 1 for the keys and values
of a fused projection. Biases are in what the projection gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from calibrate.export.adapter_method import TENSOR, ReadWeight


@dataclass(frozen=True)
class Ia3:
    """The method IA3 of PEFT."""

    label: str = "IA3"
    multiplies_biases: bool = True

    def prepare(
        self, factors: dict[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        """The factors as they are."""
        return factors

    def check(self, factors: dict[str, np.ndarray]) -> None:
        """Accepts any factors."""

    def configuration(self, factors: dict[str, np.ndarray], **settings: Any) -> Any:
        """The configuration of PEFT."""
        from peft import IA3Config

        return IA3Config(feedforward_modules=[], **settings)

    def tensors(
        self, factors: dict[str, np.ndarray], weights: ReadWeight
    ) -> dict[str, torch.Tensor]:
        """A vector for each projection, float32 (outputs, 1)."""
        return {
            f"{TENSOR.format(name)}.ia3_l": torch.from_numpy(by_output[:, None]).float()
            for name, by_output in factors.items()
        }

    def notes(self, factors: dict[str, np.ndarray]) -> tuple[str, ...]:
        """Has nothing to add."""
        return ()
