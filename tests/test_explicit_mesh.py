"""The runtime of JAX on an explicit mesh, in a process of its own, which has two devices."""

import subprocess
import sys

import pytest

BEGINNING = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
from functools import partial
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import calibrate
from calibrate.jax import dot_product_attention

fit = calibrate.load("paper")
rng = np.random.default_rng(0)
jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,)))
"""
SOFTMAX = """
z = rng.standard_normal((4, 60))
split = jax.device_put(z, P("x", None))
probs = calibrate.adaptive_softmax(split, fit)
gradient = jax.grad(lambda z: (calibrate.adaptive_softmax(z, fit) ** 2).sum())(split)
assert probs.sharding.spec == gradient.sharding.spec == split.sharding.spec
np.testing.assert_allclose(probs, calibrate.adaptive_softmax(z, fit), atol=1e-6)
"""
ATTENTION = """
attend = partial(dot_product_attention, coefficients=fit, is_causal=True)
arrays = [rng.standard_normal(shape) for shape in ((2, 11, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8))]
alone = attend(*arrays)
for spec in (P("x"), P(None, None, "x")):
    split = [jax.device_put(x, spec) for x in arrays]
    out = jax.shard_map(attend, in_specs=(spec,) * 3, out_specs=spec)(*split)
    assert out.sharding.spec == split[0].sharding.spec
    np.testing.assert_allclose(out, alone, atol=1e-6)
"""


@pytest.mark.slow
def test_softmax_of_rows_and_attention_in_shard_map_on_two_devices():
    subprocess.run([sys.executable, "-c", BEGINNING + SOFTMAX + ATTENTION], check=True)
