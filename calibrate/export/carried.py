"""What an exported model carries, as it was written or as it is read back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.export.plan import Plan


@dataclass(frozen=True)
class Carried:
    """What a folder, or a .gguf file, carries.

    Attributes:
      path: of it.
      said: what it says of the export.
      model_type: as engines see it.
      plan: what they apply; None if the fit cannot be read.
      faults: what is not as it was written, a line each.
      notes: what else there is to know of the export, a line each.
      unseen: what was not compared, if anything.
    """

    path: Path
    said: dict[str, Any]
    model_type: str
    plan: Plan | None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unseen: str | None = None
