"""Plugin heads: loads a user's head from module:attribute."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.rows.protocol import check_head

REFERENCE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")


def load_plugin(reference: str, folder: Path) -> Any:
    """The head at module:attribute; `folder` is searched first.

    The attribute is a head, or a function or class that gives one without arguments.

    Raises:
      CalibrateError: no such module or attribute, one that fails, or that breaks the protocol.
    """
    match = REFERENCE.fullmatch(reference)
    assert match
    module, attribute = match.groups()
    searched = str(folder.absolute())
    if searched not in sys.path:
        sys.path.insert(0, searched)
    try:
        head = importlib.import_module(module)
    except ModuleNotFoundError as failure:
        if failure.name is None or not f"{module}.".startswith(f"{failure.name}."):
            raise _failed(f"importing {module!r}", failure) from failure
        raise CalibrateError(
            f"no module is named {module!r} in {searched} or on Python's path; "
            "give --head module:attribute"
        ) from None
    except Exception as failure:
        raise _failed(f"importing {module!r}", failure) from failure
    for name in attribute.split("."):
        if not hasattr(head, name):
            raise CalibrateError(f"{module!r} has no attribute {attribute!r}; check --head")
        head = getattr(head, name)
    if isinstance(head, type) or (callable(head) and not hasattr(head, "sample")):
        try:
            head = head()
        except Exception as failure:
            raise _failed(f"{reference}()", failure) from failure
    check_head(head, reference)
    return head


def _failed(action: str, failure: Exception) -> CalibrateError:
    return CalibrateError(
        f"{action} failed with {type(failure).__name__}: {failure}; --debug shows where"
    )
