"""Arrays of an ONNX graph: the operations of the rule, written as nodes.

`core/rule.py` has the equation of beta for any array type. With `OnnxArray` as arrays and
`Nodes` as their namespace it writes itself into a graph, so that an engine computes what the
runtimes compute.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_COMPARISONS = {"Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal", "And", "Or"}


class Nodes:
    """Nodes that are appended to a graph, and the namespace (`xp`) of its arrays.

    Args:
      prefix: of the names of nodes and tensors.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def add(self, operator: str, *inputs: Any, **attributes: Any) -> "OnnxArray":
        """The output of a new node; numbers and arrays become constants."""
        output = f"{self.prefix}/{operator}_{len(self.nodes)}"
        names = [self.name_of(x) for x in inputs]
        self.nodes.append(helper.make_node(operator, names, [output], output, **attributes))
        return OnnxArray(output, self, operator in _COMPARISONS)

    def name_of(self, value: Any) -> str:
        """The tensor's name; of a number or an array, that of a new constant."""
        if isinstance(value, OnnxArray):
            return value.name
        kept = isinstance(value, np.ndarray) and value.dtype in (np.int64, np.bool_)
        array = value if kept else np.asarray(value, np.float32)
        name = f"{self.prefix}/constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def reduce(self, operator: str, x: "OnnxArray", axis: int = -1) -> "OnnxArray":
        """ReduceSum or ReduceMax along an axis, which is kept."""
        return self.add(operator, x, np.array([axis], np.int64), keepdims=1)

    def as_float32(self, x: Any) -> "OnnxArray":
        """The array, or a bool one as 0 and 1, in float32."""
        return self.add("Cast", x, to=TensorProto.FLOAT)

    # What `core/rule.py` asks of a namespace.

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return self.add("Where", condition, x, y)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        if not any(isinstance(value, OnnxArray) for value in (x, low, high)):
            return np.clip(x, low, high)
        x = x if low is None else self.add("Max", x, low)
        return x if high is None else self.add("Min", x, high)


class OnnxArray:
    """A float32 or bool tensor of a graph, with the operators of arrays."""

    __array_ufunc__ = None  # NumPy's arrays leave an operation with this one to it

    def __init__(self, name: str, nodes: Nodes, is_bool: bool = False):
        self.name, self.nodes, self.is_bool = name, nodes, is_bool

    def clip(self, low: Any, high: Any) -> Any:
        return self.nodes.clip(self, low, high)

    def __add__(self, other: Any) -> Any:
        return self.nodes.add("Add", self, other)

    def __sub__(self, other: Any) -> Any:
        return self.nodes.add("Sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.nodes.add("Sub", other, self)

    def __mul__(self, other: Any) -> Any:
        number = self.nodes.as_float32(self) if self.is_bool else self
        return self.nodes.add("Mul", number, other)

    def __truediv__(self, other: Any) -> Any:
        return self.nodes.add("Div", self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Any) -> Any:
        return self.nodes.add("Less", self, other)

    def __gt__(self, other: Any) -> Any:
        return self.nodes.add("Greater", self, other)

    def __le__(self, other: Any) -> Any:
        return self.nodes.add("LessOrEqual", self, other)

    def __ge__(self, other: Any) -> Any:
        return self.nodes.add("GreaterOrEqual", self, other)

    def __eq__(self, other: object) -> Any:
        return self.nodes.add("Equal", self, other)

    def __and__(self, other: Any) -> Any:
        return self.nodes.add("And", self, other)

    def __or__(self, other: Any) -> Any:
        return self.nodes.add("Or", self, other)

    __rand__, __ror__ = __and__, __or__
