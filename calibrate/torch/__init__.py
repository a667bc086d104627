"""Softmax and attention in PyTorch that apply a fit (extra "torch").

Loads neither JAX nor Transformers.
"""

from calibrate.errors import install

try:
    import torch as _torch  # noqa: F401
except ImportError as missing:
    raise ImportError(f"calibrate.torch needs PyTorch: {install('torch')}") from missing

from calibrate.torch.attention import scaled_dot_product_attention
from calibrate.torch.softmax import adaptive_softmax, entropy, inverse_temperature

__all__ = ["adaptive_softmax", "entropy", "inverse_temperature", "scaled_dot_product_attention"]
