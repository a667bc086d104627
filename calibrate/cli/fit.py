"""`calibrate fit`: publish the rule that a collection's head or heads need."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.model_options import DeviceOption, ModelOption
from calibrate.cli.options import (
    DaskOption,
    JobsOption,
    JsonOption,
    SeedOption,
    StallOption,
    StoreOption,
    check_figure,
    check_fit_name,
    refuse_with,
)
from calibrate.parallel.jobs import ONE_PROCESS, Jobs
from calibrate.report.terminal import show


class Rows(StrEnum):
    """Which collected rows a fit uses."""

    ALL = "all"
    MISRANKED = "misranked"


class Kind(StrEnum):
    """A kind of rule of a model's heads."""

    CONSTANT = "constant"
    LOG_SIZE = "log-size"
    ENTROPY_AND_SIZE = "entropy-and-size"


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


CollectionArgument = Annotated[
    Path, typer.Argument(help="Folder of a collection, of rows or of examples.")
]
NameOption = Annotated[
    str,
    typer.Option(callback=check_fit_name, help="Name of the fit; its next version is written."),
]
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
        help="Set size, or tokens of an example, that the model was trained up to, where log p may "
        "fall by 0.005 nats at most [default: what the head says]",
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
KindOption = Annotated[
    Kind | None,
    typer.Option(help="Of the rules of a model's heads [default: the simplest as good as any]"),
]
AllowedLossOption = Annotated[
    float,
    typer.Option(
        min=0,
        help="Nats a token that plain text, and answers within --trained-up-to, may lose.",
    ),
]
StepsOption = Annotated[
    int, typer.Option(min=1, help="Steps through a model for each kind of rule, at most.")
]
ForExportOption = Annotated[
    bool,
    typer.Option(
        help="Publish rules that engines run as they are, once `calibrate export` has written them "
        "into the model: a constant for each head, or b (1 + r log n) with b for each head and one "
        "r for all. The other kinds are fitted too, to say what that costs."
    ),
]
FigureOption = Annotated[
    Path | None,
    typer.Option(
        callback=check_figure, help="File of the figure [default: beside the fit's file, .png]"
    ),
]


_OF_ROWS = (
    "rows", "gate", "q", "force_polynomial", "paper", "allow_partial", "jobs", "dask", "stall",
)  # fmt: skip
_NOT_OF_PAPER = (
    "rows", "gate", "q", "trained_up_to", "force_polynomial", "jobs", "dask", "stall",
)  # fmt: skip
_OF_EXAMPLES = ("model", "device", "kind", "allowed_loss", "steps", "seed", "for_export")


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
    model: ModelOption = None,
    device: DeviceOption = "cpu",
    kind: KindOption = None,
    allowed_loss: AllowedLossOption = 0.005,
    steps: StepsOption = 100,
    seed: SeedOption = 0,
    for_export: ForExportOption = False,
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Fit the rule that a collection's head needs, and publish it.

    Every row is solved for its optimal beta. Four kinds of rule are fitted and compared on
    held-out rows: a constant, kappa log n + b, a degree-4 polynomial of entropy, and one of entropy
    and size together. The simplest that no other one beats is made as sharp as its gain in log p
    allows (--q), and published as the next version of NAME, unless the newest version is
    unchanged. If no rule beats plain softmax, nothing is published (exit code 3). If the rows name
    a layer and head, each head is fitted separately, and the file has an entry for each head that
    gains.

    Of a collection of examples: the rules of all heads of its model, by the gradient of the mean
    log p of its answers through the model (PyTorch). Kinds are chosen, and the fit is judged, on
    examples that it was not fitted to; plain text may lose no more than --allowed-loss, and heads
    that gain nothing stay as they are. An interrupted fit carries on where it stopped.

    Example: calibrate fit runs/try --name try
    """
    from calibrate.files.collection import kind_of

    if kind_of(run) == "examples":
        refuse_with(context, "a collection of examples", _OF_ROWS)
        from calibrate.cli.model_steps import ModelFitRequest, fit_model_and_publish

        options = ModelFitRequest(
            run, name, model, device, kind and kind.value, trained_up_to, allowed_loss, steps, seed,
            for_export, store, figure,
        )  # fmt: skip
        show(fit_model_and_publish(options), as_json)
        return
    refuse_with(context, "a collection of rows", _OF_EXAMPLES)
    from calibrate.cli.fit_steps import fit_and_publish

    if paper:
        refuse_with(context, "--paper", _NOT_OF_PAPER)
    request = FitRequest(
        run, name, rows, gate, q, trained_up_to, force_polynomial, paper, allow_partial,
        Jobs(jobs, dask, stall), store, figure,
    )  # fmt: skip
    show(fit_and_publish(request), as_json)
