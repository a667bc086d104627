"""How far a long piece of work is: what does the work tells it, and a caller shows it."""

from typing import Protocol


class Progress(Protocol):
    """Shows how far a piece of work is; called in the process that began the work."""

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Begins a stage of `total` steps, of `work` together; None is 1 for each step."""

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Counts a step that is done; a resumed one was done before and took no time now.

        Work that stops here, by an exception of this call, keeps the step.
        """

    def note(self, text: str) -> None:
        """Shows a line on the work."""


class Silent:
    """Progress that nobody sees."""

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Shows nothing."""

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""


SILENT = Silent()
