"""`calibrate fit`: publish the rule that a collection's head or heads need."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import (
    DaskOption,
    JobsOption,
    JsonOption,
    StallOption,
    StoreOption,
    check_figure,
)
from calibrate.parallel.jobs import ONE_PROCESS, Jobs
from calibrate.report.terminal import show


class Rows(StrEnum):
    """Which collected rows a fit uses."""

    ALL = "all"
    MISRANKED = "misranked"


@dataclass(frozen=True)
class FitRequest:
    """What `calibrate fit` is asked for."""

    folder: Path
    name: str
    rows: Rows | None = None
    gate: float = 0.0  # nats
    q: float | None = None
    trained_up_to: int | None = None
    force_polynomial: bool = False
    paper: bool = False
    allow_partial: bool = False
    jobs: Jobs = ONE_PROCESS
    store: Path | None = None
    figure: Path | None = None

    def refuse_choices_with_paper(self) -> None:
        """The paper's procedure has no options."""
        plain = FitRequest(
            self.folder, self.name, paper=True, allow_partial=self.allow_partial, store=self.store,
            figure=self.figure,
        )  # fmt: skip
        if self.paper and self != plain:
            raise typer.BadParameter(
                "--paper cannot be used with options that choose another fit, or with --jobs or "
                "--dask"
            )


CollectionArgument = Annotated[Path, typer.Argument(help="Folder of a collection.")]
NameOption = Annotated[str, typer.Option(help="Name of the fit; its next version is written.")]
RowsOption = Annotated[
    Rows | None, typer.Option(help="Rows to fit [default: what the collection keeps]")
]
GateOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=20,
        help="Entropy in nats up to which softmax is unchanged; rules by set size have no gate.",
    ),
]
SharpnessOption = Annotated[
    float | None,
    typer.Option(
        min=0, max=1,
        help="Sharpness: fit the mean of p^q of the target in place of log p, which is 0 "
        "[default: the largest of 0, 1/4, 1/2 that keeps 90 % of the gain in log p]",
    ),
]  # fmt: skip
TrainedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Set size that the model was trained up to, where log p may fall by 0.005 nats at "
        "most [default: what the head says]",
    ),
]
ForceOption = Annotated[
    bool, typer.Option(help="Publish the polynomial even if a simpler rule is as good.")
]
PaperOption = Annotated[
    bool,
    typer.Option(help="Use the paper's procedure: least squares on misranked rows, no verdict."),
]
PartialOption = Annotated[
    bool, typer.Option(help="Fit an unfinished collection; the fit's file records that.")
]
FigureOption = Annotated[
    Path | None,
    typer.Option(
        callback=check_figure, help="File of the figure [default: beside the fit's file, .png]"
    ),
]


def fit(
    run: CollectionArgument,
    name: NameOption,
    rows: RowsOption = None,
    gate: GateOption = 0.0,
    q: SharpnessOption = None,
    trained_up_to: TrainedOption = None,
    force_polynomial: ForceOption = False,
    paper: PaperOption = False,
    allow_partial: PartialOption = False,
    jobs: JobsOption = 1,
    dask: DaskOption = None,
    stall: StallOption = 600.0,
    store: StoreOption = None,
    figure: FigureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the rule that a collection's head needs, and publish it.

    Every row is solved for its optimal beta. Four kinds of rule are fitted and compared on
    held-out rows: a constant, kappa log n + b, a degree-4 polynomial of entropy, and one of entropy
    and size together. The simplest that no other one beats is made as sharp as its gain in log p
    allows (--q), and published as the next version of NAME, unless the newest version is
    unchanged. If no rule beats plain softmax, nothing is published (exit code 3). If the rows name
    a layer and head, each head is fitted separately, and the file has an entry for each head that
    gains.

    Example: calibrate fit runs/try --name try
    """
    from calibrate.cli.fit_steps import fit_and_publish

    request = FitRequest(
        run, name, rows, gate, q, trained_up_to, force_polynomial, paper, allow_partial,
        Jobs(jobs, dask, stall), store, figure,
    )  # fmt: skip
    request.refuse_choices_with_paper()
    show(fit_and_publish(request), as_json)
