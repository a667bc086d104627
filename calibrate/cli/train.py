"""`calibrate train`: train the built-in heads from scratch."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrate.cli.options import parse_seeds
from calibrate.cli.progress import in_words
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.rows.training import Progress

SeedsOption = Annotated[str, typer.Option(help="A head per seed: 0, 0,3 or 0-9.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Gradient steps.")]
FolderOption = Annotated[Path, typer.Option(help="Folder of the weights and checkpoints.")]
ProcessesOption = Annotated[int, typer.Option(min=1, help="Heads trained at once, a core each.")]


def train(
    seeds: SeedsOption = "0",
    steps: StepsOption = 100_000,
    out: FolderOption = Path("runs/train"),
    jobs: ProcessesOption = 1,
) -> None:
    """Train max-retrieval heads as in the paper's appendix A.4.

    Needs the extra "train". Run the same command again to continue from the last checkpoint; the
    weights are the same bytes.

    Example: calibrate train --seeds 0-3 --steps 100000 --jobs 2
    """
    from calibrate.rows.training import train_seeds

    numbers = parse_seeds(seeds)
    stderr.print(f"training seeds {seeds}, {steps:,} steps each; compiling first")
    if jobs > 1:
        stderr.printed_at = math.inf  # the processes that train print every few seconds
    for path in train_seeds(numbers, steps, out, jobs, report=print_progress):
        print(path)


def print_progress(progress: "Progress") -> None:
    """Prints a line on the training of one head; called in the worker process."""
    stderr.print(
        f"seed {progress.seed}  step {progress.step:,}/{progress.steps:,}  "
        f"loss {progress.loss:.4f}  accuracy {progress.accuracy:.2%}  "
        f"{progress.steps_per_second:.0f} steps/s  {in_words(progress.seconds_left)} left"
    )
