"""LoRA: an adapter that adds a product of two matrices, B A, to the weight of a projection.

With D the diagonal of the factors of its outputs, D W = W + (D - 1) W. The rows of (D - 1) W are 0
but for heads whose beta is not 1. So A has those rows of W, and B, for each of them, beta - 1 at
its row:

    A (rank, inputs)   in the dtype of W: the rows are copies
    B (outputs, rank)  in float32

All projections have the rank of the largest, as engines read one rank; the rest of A and B is 0.
The scale lora_alpha / r is 1. An engine that rounds B to bfloat16 changes beta - 1 by at most 2^-9
of it; to float16, by 2^-12.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from calibrate.errors import CalibrateError, command
from calibrate.export.adapter_method import TENSOR, ReadWeight

MAX_RANK = 256
_VALUES = re.compile(r"(?<=\.)q_proj$")


@dataclass(frozen=True)
class Lora:
    """The method LoRA of PEFT, with a rank of at most `max_rank`; None: of any."""

    max_rank: int | None = None
    label: str = "LoRA"
    multiplies_biases: bool = False

    def prepare(
        self, factors: dict[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        """The factors, and those of values beside queries, which are 1.

        SGLang fuses queries, keys and values, and takes no adapter of queries without values.
        """
        values = {
            name: np.ones(shapes[f"{name}.weight"][0])
            for name in (_VALUES.sub("v_proj", name) for name in factors)
            if f"{name}.weight" in shapes and name not in factors
        }
        return factors | values

    def check(self, factors: dict[str, np.ndarray]) -> None:
        """Raises CalibrateError if a projection needs a larger rank."""
        check_rank(factors, self.max_rank)

    def configuration(self, factors: dict[str, np.ndarray], **settings: Any) -> Any:
        """The configuration of PEFT."""
        from peft import LoraConfig

        rank = rank_of(factors)
        return LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, bias="none", **settings)

    def tensors(
        self, factors: dict[str, np.ndarray], weights: ReadWeight
    ) -> dict[str, torch.Tensor]:
        """A and B of each projection."""
        rank, tensors = rank_of(factors), dict[str, torch.Tensor]()
        for name, by_output in factors.items():
            weight = weights(f"{name}.weight")
            rows = changed_rows(by_output)
            a = weight.new_zeros((rank, weight.shape[1]))
            a[: len(rows)] = weight[torch.from_numpy(rows)]
            tensors[f"{TENSOR.format(name)}.lora_A.weight"] = a
            b = torch.from_numpy(matrix_b(by_output, rank))
            tensors[f"{TENSOR.format(name)}.lora_B.weight"] = b
        return tensors

    def notes(self, factors: dict[str, np.ndarray]) -> tuple[str, ...]:
        """Its rank, which engines ask for."""
        return (rank_note(factors),)


def changed_rows(by_output: np.ndarray) -> np.ndarray:
    """The indices of the outputs whose factor is not 1."""
    return np.flatnonzero(by_output != 1)


def rank_of(factors: dict[str, np.ndarray]) -> int:
    """The rank of an adapter: the outputs that change in the projection where most do."""
    return max(len(changed_rows(by_output)) for by_output in factors.values())


def rank_note(factors: dict[str, np.ndarray]) -> str:
    """A line that names the rank."""
    return f"A LoRA of rank {rank_of(factors):,}."


def matrix_b(by_output: np.ndarray, rank: int) -> np.ndarray:
    """B of a projection, float32 (outputs, rank)."""
    rows, b = changed_rows(by_output), np.zeros((len(by_output), rank), np.float32)
    b[rows, np.arange(len(rows))] = by_output[rows] - 1
    return b


def check_rank(factors: dict[str, np.ndarray], max_rank: int | None) -> None:
    """Raises CalibrateError if the rank is larger than allowed."""
    largest = max(factors, key=lambda name: len(changed_rows(factors[name])))
    rank = len(changed_rows(factors[largest]))
    if max_rank is not None and rank > max_rank:
        fewer = command("model fit RUN", heads_per_layer="N")
        raise CalibrateError(
            f"{largest} needs a LoRA of rank {rank:,}, and {max_rank:,} is allowed; fit fewer "
            f"heads ({fewer}), give max_rank={rank} if your engine takes it, or export the weights "
            "instead",
            parameter="max_rank",
        )
