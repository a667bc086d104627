"""Rows of .gguf tensors times factors, in each of their types."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from calibrate.errors import CalibrateError
from calibrate.export.scale_gguf_rows import _SCALES, kind_of_scaled, scale_rows

FACTORS = (1.9, 0.4, 1.0, 2.7)


ERRORS = {"F32": 1e-7, "BF16": 4e-3, "MXFP4": 0.01}
# Those that the package cannot write: any bytes are such weights, if their scales are numbers.
READ_ALONE = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "IQ1_S", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
WRITTEN = ("F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", *ERRORS)


def dequantized(data, kind):
    return gguf.quants.dequantize(data, kind).astype(np.float64)


def packed(kind):
    """Four rows of weights."""
    random = np.random.default_rng(0)
    if kind.name in WRITTEN:
        weights = random.normal(0, 0.05, (4, 512)).astype(np.float32)
        half = kind == Type.F16
        return weights.astype(np.float16) if half else gguf.quants.quantize(weights, kind)
    n_weights, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (4, 512 // n_weights * size), np.uint8)
    blocks = data.reshape(4, -1, size)
    for at in _SCALES[kind]:
        scales = random.uniform(1e-3, 2e-3, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return data


@pytest.mark.parametrize("name", [*WRITTEN, *READ_ALONE])
def test_rows_of_every_type_times_their_factors(name):
    kind, factors = Type[name], np.array(FACTORS)
    scaled = scale_rows(data := packed(kind), kind, factors)
    after = kind_of_scaled(kind)
    assert after == (Type.Q8_0 if kind == Type.MXFP4 else kind)
    exact = factors[:, None] * dequantized(data, kind)
    found = dequantized(scaled, after)
    assert np.linalg.norm(found - exact) < ERRORS.get(name, 1e-3) * np.linalg.norm(exact)
    if after == kind:  # a factor of 1 changes nothing
        np.testing.assert_array_equal(scaled[2], data[2])


def test_what_is_refused_of_rows():
    big = np.full((1, 32), 6e4, np.float16)
    with pytest.raises(CalibrateError, match=r"\b2 .*F16"):
        scale_rows(big, Type.F16, np.array([2.0]))
    packed = gguf.quants.quantize(np.ones((1, 64), np.float32), Type.Q4_0)
    with pytest.raises(CalibrateError, match="Q1_0"):
        scale_rows(packed, Type.Q1_0, np.array([2.0]))
    bias = gguf.quants.quantize(np.ones(32, np.float32), Type.Q8_0)
    with pytest.raises(CalibrateError, match=r"\bQ8_0, .*F32"):
        scale_rows(bias, Type.Q8_0, np.ones(32))
