"""Tensors for tests of PyTorch."""

import numpy as np
import pytest
import torch

# PyTorch's compiler warns of its own inside.
of_the_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def tensor(array, dtype=None):
    return None if array is None else torch.tensor(np.asarray(array), dtype=dtype)


def normal(*shape, scale=2.0, seed=0, dtype=torch.float32):
    return tensor(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)
