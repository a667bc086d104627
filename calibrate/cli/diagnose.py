"""`calibrate diagnose`: commitment and susceptibility of the heads of a collection."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from calibrate.cli.options import AsJson, check_file
from calibrate.report.terminal import Steps, show, stderr


def diagnose_command(
    run: Annotated[Path, Argument(metavar="collection", help="Folder of inputs, from `collect`.")],
    *,
    out: Annotated[
        Path | None, Option(help="File of the figure, .png [default: RUN-diagnosis.png]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which heads disperse as n grows.

    The table shows, for each head, the commitment rho = log n - H of its attention at each n, the
    slope of rho against log n (1: it attends to a fixed number of items, 0: it disperses), and the
    susceptibility, the change of rho per unit of beta. Heads are listed by rising slope. The
    figure shows inputs in the plane of rho and susceptibility. The collection must hold inputs
    that are ranked correctly, too.

    Example: calibrate diagnose runs/mine
    """
    from calibrate.report.diagnosis_record import diagnosis_result
    from calibrate.report.plot_diagnosis import draw_diagnosis
    from calibrate.report.plot_style import save_figure
    from calibrate.rows import diagnosis
    from calibrate.rows.collection import RowCollection, open_collection
    from calibrate.storage.atomic_io import check_writable

    collection = open_collection(run, RowCollection)
    diagnosis.require_all_rows(collection)
    figure = check_file(out, ".png") or Path(f"{run.resolve()}-diagnosis.png")
    check_writable(figure)
    with Steps() as steps:
        result = diagnosis.diagnose(collection, steps)
    stderr.print(f"drawing {figure}")
    save_figure(figure, draw_diagnosis(result))
    show(diagnosis_result(result, figure), as_json)
