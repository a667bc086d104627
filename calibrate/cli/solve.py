"""`calibrate solve`: the optimal temperature of every input of a collection."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from calibrate.cli.options import AsJson, Dask, Processes, check_file
from calibrate.parallel import Jobs
from calibrate.report.terminal import show, stderr


def solve_command(
    run: Annotated[Path, Argument(metavar="collection", help="Folder of inputs, from `collect`.")],
    *,
    out: Annotated[
        Path | None,
        Option(
            callback=lambda path: check_file(path, ".csv", ".npz"),
            help="Table to write, .csv or .npz.",
        ),
    ] = None,
    jobs: Processes = 1,
    dask: Dask = None,
    as_json: AsJson = False,
) -> None:
    """Solve every input for its optimal temperature.

    The optimal theta = 1/beta is the one at which softmax(z / theta) gives the target the highest
    probability. The command prints quartiles of theta of misranked inputs, and numbers of inputs
    by class of their optimum; --json has them by size. The table has a row for each input of the
    collection: size, n, entropy in nats, beta, theta, status and misranked. Where the target is
    ranked first ("sharp"), beta is inf and theta 0.

    Example: calibrate solve runs/mine --out theta.csv
    """
    from calibrate import pipeline
    from calibrate.report.collection_record import solved_result, write_table

    stderr.print(f"solving {run}")
    solved = pipeline.solve(run, Jobs(jobs, dask))
    if out is not None:
        write_table(solved, out)
    show(solved_result(solved, out), as_json)
