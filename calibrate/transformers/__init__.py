"""A fit in the attention of a model of Transformers, and capture of the logits of its heads.

Needs the extra "transformers".
"""

from calibrate.errors import install

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as missing:
    raise ImportError(
        f"calibrate.transformers needs PyTorch and Transformers: {install('transformers')}"
    ) from missing

from calibrate.transformers.applying import apply
from calibrate.transformers.recording import capture

__all__ = ["apply", "capture"]
