"""`calibrate diagnose`: rank the heads of a collection by what calibration could add."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import JsonOption
from calibrate.report.terminal import show

OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the record and figures [default: RUN-diagnosis]"),
]
EpsOption = Annotated[
    float, typer.Option(help="A target is lost where its coefficient is below this.")
]


def diagnose(
    run: Annotated[Path, typer.Argument(help="Folder of a complete collection.")],
    out: OutOption = None,
    eps: EpsOption = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Rank the heads of a collection by what calibration could add.

    Heads are ranked by headroom: how much the best constant beta in [1, 64] would raise the
    log-probability of the targets on the same rows. That is an upper estimate; `calibrate fit`
    decides on held-out rows. The collection must hold all kinds of rows (collect with --keep all,
    the default).

    Example: calibrate diagnose runs/try
    """
    from calibrate.cli.diagnose_steps import diagnose_and_draw

    if not 0 < eps < 1:
        raise typer.BadParameter(f"--eps is {eps}; give a coefficient between 0 and 1")
    show(diagnose_and_draw(run, out, eps), as_json)
