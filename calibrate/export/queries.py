"""The tensors that compute the queries of a model, and their change by the factors of an export.

Up to softmax the logits are linear in a head's queries. The queries are linear in rows of a
projection or, where a norm follows the projection, in the weights of the norm. Scaling these by
beta gives beta z. `architectures.py` names the modules; their layouts are

    separate           rows by head: (heads width, inputs); a bias likewise
    queries first      fused: rows of keys and values follow those of the queries (GPT-2: columns)
    interleaved        fused by head: (heads, [query, key, value], width, inputs)
    norms              one weight for all heads (width,), or one a head: (heads width,) or
                       (heads, width)
    sinks              one logit a head, which beta multiplies like those of the keys
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.export.architectures import Architecture, Layout, Norm, Projection, architecture_of
from calibrate.export.plan import FIT_CONSTANTS, ExportPlan

_LAYER = re.escape("{layer}")


class TensorRole(NamedTuple):
    """The role of a tensor in the attention of a layer, such as (3, "q_proj", "bias")."""

    layer: int
    module: str
    name: str  # "" for a parameter of the attention module itself


class WeightChange(NamedTuple):
    """The change of a tensor x: (x + base) factors - base."""

    factors: np.ndarray  # broadcasts to the shape of the tensor
    base: float = 0.0

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Returns the changed tensor in float64."""
        changed: np.ndarray = (x.astype(np.float64) + self.base) * self.factors - self.base
        return changed


def names_by_role(names: Iterable[str], architecture: Architecture) -> dict[TensorRole, str]:
    """Returns the attention tensors among the names of a checkpoint or model, by their role.

    Raises:
      CalibrateError: a layer has two attention modules.
    """
    attention = re.escape(architecture.attention).replace(_LAYER, r"(\d{1,6})")
    pattern = re.compile(rf"(?:^|\.){attention}\.(\w+)\.?(.*)")
    tensors: dict[TensorRole, str] = {}
    for name in names:
        if match := pattern.search(name):
            role = TensorRole(int(match[1]), match[2], match[3])
            if (other := tensors.setdefault(role, name)) != name:
                raise CalibrateError(
                    f"{other} and {name} are both of layer {role.layer}; only models with one "
                    "attention a layer can be exported"
                )
    return tensors


def _head_of_norm(name: str) -> int | None:
    """Returns the head of a weight in a list of norms, one for each head; else None."""
    match = re.match(r"norms\.(\d{1,6})\.", name)
    return int(match[1]) if match else None


class Queries:
    """The tensors of a model of Transformers that compute its queries.

    Args:
      config: configuration of a type in the table of architectures.
      shapes: of all tensors of the model, by name.

    Attributes:
      architecture: the entry of the table.
      names: names of all attention tensors, by role.
      shapes: their shapes, by role.
      layers: layers that have attention.
      n_heads, width: query heads of a layer, and the width of a head.
    """

    def __init__(self, config: Any, shapes: Mapping[str, Sequence[int]]):
        self.architecture = architecture_of(config)
        self.n_heads = config.num_attention_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.n_heads
        self.names = names_by_role(shapes, self.architecture)
        self.shapes = {role: tuple(shapes[name]) for role, name in self.names.items()}
        self.layers = sorted({role.layer for role in self.names})
        max_rows = max((size for shape in self.shapes.values() for size in shape), default=0)
        if type(self.width) is not int or not 0 < self.width * self.n_heads <= max_rows:
            raise CalibrateError(
                f"the configuration has {self.n_heads} heads of head_dim = {self.width!r}, and "
                f"tensors of attention have at most {max_rows:,} rows; fetch it again"
            )

    def source(self, layer: int) -> Norm | Projection:
        """Returns the module to scale in a layer: the norm of the queries, or their projection."""
        modules = {role.module for role in self.shapes if role.layer == layer}
        for source in self.architecture.query_modules():
            if source.module in modules:
                return source
        raise CalibrateError(
            f"layer {layer} of the {self.architecture.model_type} has no weights of queries that "
            f"this version knows, among {', '.join(sorted(modules))}; a model of another type can "
            "be exported"
        )

    def heads_share(self, layer: int) -> bool:
        """Returns True if one norm weight scales all heads of a layer, which then have one beta."""
        source = self.source(layer)
        return isinstance(source, Norm) and any(
            role[:2] == (layer, source.module)
            and shape == (self.width,)
            and _head_of_norm(role.name) is None
            for role, shape in self.shapes.items()
        )

    def changes(self, plan: ExportPlan) -> dict[TensorRole, WeightChange]:
        """Returns the changes of tensors that scale the queries of each head by its factor.

        Raises:
          CalibrateError: heads of a layer have different factors, and one norm weight in common.
        """
        changes = {}
        for layer in self.layers:
            factors, source = np.array(plan.layer_factors(layer)), self.source(layer)
            if self.heads_share(layer) and np.ptp(factors):
                raise CalibrateError(
                    f"the heads of layer {layer} have factors of {factors.min():.4g} to "
                    f"{factors.max():.4g}, and a norm with one weight for all of them "
                    f"({source.module}) makes their queries; fit one constant for each layer: "
                    f"{FIT_CONSTANTS}"
                )
            if np.all(factors == 1):
                continue
            for role, shape in self.shapes.items():
                if role.layer == layer and role.module == source.module:
                    changes[role] = self._change(role, shape, source, factors)
                elif role.layer == layer and role.module == self.architecture.sinks:
                    changes[role] = WeightChange(factors)
        return changes

    def _change(
        self,
        role: TensorRole,
        shape: tuple[int, ...],
        source: Norm | Projection,
        factors: np.ndarray,
    ) -> WeightChange:
        """Returns the change of a weight or bias of the module that computes the queries."""
        if isinstance(source, Norm):
            return WeightChange(self._norm_factors(role, shape, factors), source.base)
        if source.is_transposed and role.name == "weight":  # (inputs, outputs)
            return WeightChange(self._output_factors(source, shape[-1], factors))
        by_output = self._output_factors(source, shape[0], factors)
        return WeightChange(by_output.reshape(-1, *[1] * (len(shape) - 1)))

    def _output_factors(
        self, projection: Projection, n_outputs: int, factors: np.ndarray
    ) -> np.ndarray:
        """Returns (outputs,): the factor of each output of a projection, 1 for keys and values."""
        if projection.layout is Layout.SEPARATE:
            return factors.repeat(n_outputs // self.n_heads)
        if projection.layout is Layout.INTERLEAVED:
            by_head = np.ones((self.n_heads, 3, self.width))
            by_head[:, 0] = factors[:, None]
            return by_head.reshape(-1)
        by_output = np.ones(n_outputs)
        by_output[: self.n_heads * self.width] = factors.repeat(self.width)
        return by_output

    def _norm_factors(
        self, role: TensorRole, shape: tuple[int, ...], factors: np.ndarray
    ) -> np.ndarray:
        """Returns the factors of a norm's weights, in a shape that broadcasts to theirs."""
        if (head := _head_of_norm(role.name)) is not None:
            return factors[head : head + 1]
        if shape == (self.width,):
            return factors[:1]
        by_head = shape == (self.n_heads, self.width)
        return factors[:, None] if by_head else factors.repeat(self.width)
