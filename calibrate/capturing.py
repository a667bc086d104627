"""Capture of a model's attention logits, for models of Transformers and of Flax nnx."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from calibrate.datasets.logits_recorder import Recorder
from calibrate.errors import CalibrateError


def capture(model: Any, folder: Path, **options: Any) -> AbstractContextManager[Recorder]:
    """Records what the heads of a model have before softmax, while it runs.

        with calibrate.capture(model, "captured") as recorder:
            for tokens, answer in prompts:
                recorder.next(query=-1, target=answer)
                model(tokens)

    It is calibrate.transformers.capture for a model of Transformers', and
    calibrate.jax.flax.capture for one of Flax nnx; the options are theirs: layers, heads,
    max_bytes, and Transformers' part.
    A row counts, in what is made of it, by its head's share of the layer's attention to the target.

    Args:
      model: of Transformers, or an nnx module.
      folder: a new one, of npz files as `calibrate collect --logits` takes them.
    Raises:
      CalibrateError: a model of another kind, and what those raise.
    """
    transformers, nnx = (sys.modules.get(name) for name in ("transformers", "flax.nnx"))
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from calibrate.transformers import capture as of_transformers

        return of_transformers(model, folder, **options)
    if nnx is not None and isinstance(model, nnx.Module):
        from calibrate.jax.flax import capture as of_flax

        return of_flax(model, folder, **options)
    raise CalibrateError(
        f"model is a {type(model).__name__}; give a model of Transformers or Flax nnx, or save its "
        "logits for `calibrate collect`"
    )
