"""`calibrate.capture`: records the attention logits of a model of Transformers or Flax nnx."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.rows.recorder import Recorder


def capture(model: Any, folder: Path, **options: Any) -> AbstractContextManager[Recorder]:
    """Records the logits of a model's heads, before softmax, while the model runs.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.MultiHeadAttention(2, in_features=8, decode=False, rngs=nnx.Rngs(0))
    >>> with calibrate.capture(model, "captured") as recorder:
    ...     recorder.next(query=-1, target=3)  # the position that the last query should attend to
    ...     _ = model(jnp.ones((1, 8, 8)))

    Calls calibrate.transformers.capture for a model of Transformers, and calibrate.jax.flax.capture
    for a module of Flax nnx. The weight of a row is its head's share of the layer's attention to
    the target.

    Args:
      model: of Transformers, or an nnx module.
      folder: new; the result is npz files for `calibrate collect --logits`.
      options: layers, heads, max_bytes, and part of Transformers; see these functions.
    Raises:
      CalibrateError: the model is of another kind; and the errors of these functions.
    """
    transformers, nnx = (sys.modules.get(name) for name in ("transformers", "flax.nnx"))
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from calibrate.transformers import capture as capture_transformers

        return capture_transformers(model, folder, **options)
    if nnx is not None and isinstance(model, nnx.Module):
        from calibrate.jax.flax import capture as capture_flax

        return capture_flax(model, folder, **options)
    raise CalibrateError(
        f"model is a {type(model).__name__}; give a model of Transformers or Flax nnx, or save its "
        "logits for `calibrate collect`"
    )
