"""Rows of a .gguf tensor times factors, in the tensor's own type.

A block of a quantised row is its scale, a float16, times small integers (and for some types plus a
minimum, another float16). Times a factor, the scale and the minimum change, and the integers stay:
nothing is quantised a second time. Types whose blocks have no such scale are rewritten as Q8_0.
"""

from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from calibrate.errors import CalibrateError

# Where a block's float16 numbers are, in bytes from its begin: scale, and minimum if it has one.
_SCALES = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2),
    Type.Q6_K: (208,), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,), Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,), Type.IQ3_S: (0,), Type.IQ1_S: (0,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,), Type.TQ1_0: (52,), Type.TQ2_0: (64,),
}  # fmt: skip
_FALLBACK = Type.Q8_0


@dataclass(frozen=True)
class ScaledRows:
    """Rows times factors."""

    data: NDArray[np.generic]  # as in the file: numbers (rows, n), or bytes (rows, bytes of a row)
    kind: Type  # of the tensor's own or Q8_0
    # The norm of what rounding changed, of weights or of scales of blocks, over theirs.
    rounding: float


def scale_rows(data: NDArray[np.generic], kind: Type, factors: NDArray[np.float64]) -> ScaledRows:
    """The rows of a tensor, times a factor each.

    Args:
      data: (rows, n) numbers or (rows, bytes), or for a bias (rows,); as gguf.GGUFReader has it.
      kind: its type.
      factors: (rows,), finite.
    Raises:
      CalibrateError: a product overflows the type, or the type cannot be read.
    """
    by_row = factors.reshape(-1, *[1] * (data.ndim - 1))
    if kind in (Type.F32, Type.F16):
        product, rounding = _rounded(data, by_row, kind)
        return ScaledRows(product, kind, rounding)
    if kind in _SCALES:
        return _scale_blocks(data, kind, factors)
    after = kind if kind == Type.BF16 else _FALLBACK
    exact = _read(data, kind) * by_row
    if exact.shape[-1] % gguf.GGML_QUANT_SIZES[after][0]:
        raise CalibrateError(
            f"the queries' weights are {kind.name}, and their rows of {exact.shape[-1]} cannot be "
            f"written as {after.name}; give the model in another quantisation, such as Q8_0"
        )
    packed = gguf.quants.quantize(exact.astype(np.float32), after)
    return ScaledRows(packed, after, _relative(_read(packed, after), exact))


def _scale_blocks(
    data: NDArray[np.generic], kind: Type, factors: NDArray[np.float64]
) -> ScaledRows:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.array(data, np.uint8).reshape(len(factors), -1, size)
    changed, all_of_it = 0.0, 0.0
    for at in _SCALES[kind]:
        scales = np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")
        product, rounding = _rounded(scales, factors[:, None, None], kind)
        norm = float(np.linalg.norm(product.astype(np.float64)))
        changed, all_of_it = np.hypot(changed, rounding * norm), np.hypot(all_of_it, norm)
        blocks[:, :, at : at + 2] = product.view(np.uint8)
    rounding = changed / all_of_it if all_of_it else 0.0
    return ScaledRows(blocks.reshape(len(factors), -1), kind, float(rounding))


def _rounded(
    numbers: NDArray[np.generic], factors: NDArray[np.float64], kind: Type
) -> tuple[NDArray[np.generic], float]:
    """The products in the numbers' own type, and what rounding changed."""
    exact = numbers.astype(np.float64) * factors
    with np.errstate(over="ignore"):
        product = exact.astype(numbers.dtype)
    if not np.isfinite(product).all():
        raise CalibrateError(
            f"queries times {np.abs(factors).max():.4g} overflow {kind.name}; give the model as a "
            ".gguf file of float32 or bfloat16 weights"
        )
    return product, _relative(product, exact)


def _relative(found: NDArray[np.generic], exact: NDArray[np.float64]) -> float:
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(found.astype(np.float64) - exact) / norm) if norm else 0.0


def _read(data: NDArray[np.generic], kind: Type) -> NDArray[np.float64]:
    """The weights, as numbers.

    Raises:
      CalibrateError: the package gguf does not read this type.
    """
    try:
        return np.asarray(gguf.quants.dequantize(data, kind), np.float64)
    except NotImplementedError:
        raise CalibrateError(
            f"the queries' weights are {kind.name}, which this version of the package gguf does "
            "not read; give the model in another quantisation, such as Q8_0"
        ) from None
