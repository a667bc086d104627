"""The fit that the weights of an exported model carry: a second one would multiply its betas."""

from collections.abc import Mapping
from typing import Any

from calibrate.errors import CoefficientsError

KEY = "calibrate"  # of config.json; of a .gguf file, the beginning of the names of such keys


def require_original(model: Any, record: Any) -> None:
    """Raises CoefficientsError for a model that carries a fit already.

    Args:
      model: its path or class, for the message.
      record: the value of KEY, which says under "fit" what an export was made of.
    """
    fit = record.get("fit") if isinstance(record, Mapping) else None
    if fit is not None:
        raise CoefficientsError(f"{model} carries the fit {fit} already; give the original model")
