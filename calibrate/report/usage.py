"""How to load a fit: Python for JAX, PyTorch and Transformers that works from any folder."""

import json
import os

from calibrate.files.coefficients import Coefficients
from calibrate.files.store import published_store
from calibrate.report.blocks import Code

SHIPPED = ("max-retrieval", "paper")  # as pyproject.toml lists them; others may share the folder


def usage(fit: Coefficients) -> Code:
    """The Python that uses a fit; what is of a whole model starts with Transformers."""
    layers = [entry.layer for entry in fit.entries if entry.layer is not None]
    of_layer = f".layer({layers[0]})" if layers else ""
    lines = ["import calibrate", "", f"fit = {load_line(fit)}"]
    if layers or fit.of_whole_model:
        own = "  # each layer takes its own" if layers else ""
        lines += ["", f"from calibrate import transformers{own}"]
        lines += [f"transformers.register({json.dumps(fit.name)}, fit)"]
        lines += [f"model.set_attn_implementation({json.dumps(fit.name)})"]
        lines += ["transformers.verify(model)  # raises if some attention stays plain"]
    jax = f"probs = calibrate.adaptive_softmax(logits, fit{of_layer})"
    torch = f"probs = adaptive_softmax(logits, fit{of_layer})"
    lines += ["", f"{jax}  # JAX, for jax.nn.softmax(logits)"]
    lines += ["", "from calibrate.torch import adaptive_softmax"]
    lines += [f"{torch}  # PyTorch, for torch.softmax(logits, -1)"]
    return Code(_purpose(fit), "\n".join(lines))


def _purpose(fit: Coefficients) -> str:
    shape = ", logits being (..., heads, queries, items)" if fit.has_heads else ""
    if any(entry.layer is not None for entry in fit.entries):
        shape += ", of one layer in JAX and PyTorch"
    ship = "" if _published(fit) else "; ship this one file, and load it by its new path"
    return f"How to use it{shape}{ship}:"


def load_line(fit: Coefficients) -> str:
    """The Python expression that loads exactly this version, from any folder."""
    assert fit.path is not None
    if _published(fit):
        return f"calibrate.load({json.dumps(fit.reference)})"
    return f"calibrate.load({json.dumps(os.path.abspath(fit.path), ensure_ascii=False)})"


def _published(fit: Coefficients) -> bool:
    """Whether a fit is the package's own, which its reference names wherever it is installed."""
    assert fit.path is not None
    own = published_store() / fit.name / f"{fit.version}.json"
    return fit.name in SHIPPED and os.path.realpath(own) == os.path.realpath(fit.path)
