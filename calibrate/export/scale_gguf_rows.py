"""Scales the rows of a tensor of a .gguf file, in the tensor's own type.

A block of a quantised row stores small integers q with a float16 scale d, and for some types a
float16 minimum m: its weights are d q, plus or minus m. A factor changes d and m, and q stays, so
that no weight is quantised a second time. Types without such a scale are refused.
"""

from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from calibrate.errors import CalibrateError

# Offsets in bytes of the float16 numbers in a block: of the scale, and of the minimum if any.
_SCALES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.IQ1_S: (0,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}
_FLOATS = (Type.F32, Type.F16, Type.BF16)


def scale_rows(
    data: NDArray[np.generic], kind: Type, factors: NDArray[np.float64]
) -> NDArray[np.generic]:
    """Returns the rows of a tensor times a factor each, as numbers or bytes of its type.

    Args:
      data: (rows, n) numbers or (rows, bytes), or for a norm or bias (rows,), as in GgufFile.
      factors: (rows,), finite.
    Raises:
      CalibrateError: the type has no scales, weights are not finite, or a product is beyond the
        type.
    """
    if kind not in _FLOATS and kind not in _SCALES:
        raise CalibrateError(
            f"the queries' weights are {kind.name}, whose scales are not known; give the model in "
            "another quantisation, such as Q8_0"
        )
    if data.ndim == 1 and kind not in _FLOATS:
        raise CalibrateError(
            f"a norm or a bias of queries is {kind.name}, expected F32; such a model cannot be "
            "exported"
        )
    by_row = factors.reshape(-1, *[1] * (data.ndim - 1))
    if kind in (Type.F32, Type.F16):
        return _multiply(data, by_row, kind)
    if kind in _SCALES:
        return _scale_blocks(data, kind, factors)
    exact = np.asarray(gguf.quants.dequantize(data, kind), np.float64) * by_row
    _require_finite(exact)
    return np.asarray(gguf.quants.quantize(exact.astype(np.float32), kind))


def _scale_blocks(
    data: NDArray[np.generic], kind: Type, factors: NDArray[np.float64]
) -> NDArray[np.generic]:
    """Returns quantised rows with the scale and minimum of each block times the row's factor."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.array(data, np.uint8).reshape(len(factors), -1, size)
    for offset in _SCALES[kind]:
        scales = np.ascontiguousarray(blocks[:, :, offset : offset + 2]).view("<f2")
        product = _multiply(scales, factors[:, None, None], kind)
        blocks[:, :, offset : offset + 2] = product.view(np.uint8)
    return blocks.reshape(len(factors), -1)


def _multiply(
    numbers: NDArray[np.generic], factors: NDArray[np.float64], kind: Type
) -> NDArray[np.generic]:
    """Returns numbers times factors, rounded to the type of the numbers."""
    _require_finite(numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        product = (numbers.astype(np.float64) * factors).astype(numbers.dtype)
    if not np.isfinite(product).all():
        raise CalibrateError(
            f"queries times {np.abs(factors).max():.4g} overflow {kind.name}; give the model as a "
            ".gguf file of float32 or bfloat16 weights"
        )
    return product


def _require_finite(numbers: NDArray[Any]) -> None:
    """Raises CalibrateError for NaN or infinities."""
    if not np.isfinite(numbers).all():
        raise CalibrateError("the queries' weights have NaN or infinities; fetch the file again")
