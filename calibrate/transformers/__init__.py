"""Floor 2, the runtime in Hugging Face Transformers (extra "transformers"): attention that applies
a fit, and what is needed to make one: the logits of a model's heads.
"""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as missing:
    raise ImportError(
        "calibrate.transformers needs PyTorch and Transformers: "
        "pip install 'calibrate[transformers]'"
    ) from missing

from calibrate.transformers.attention import register, verify
from calibrate.transformers.recording import capture

__all__ = ["capture", "register", "verify"]
