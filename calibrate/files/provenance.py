"""When a fit was made, and with which versions."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import calibrate

_TOOLS = ("numpy", "scipy", "scikit-learn", "jax")


def provenance(*more: str) -> dict[str, Any]:
    """What a coefficient file says of it; `more` names distributions beside the usual ones."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"calibrate": calibrate.__version__}
        | {tool: version(tool) for tool in (*_TOOLS, *more)},
    }
