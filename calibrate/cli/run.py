"""`calibrate run`: collect, fit, evaluate and report, on a head or on logits."""

import re
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from calibrate.cli.collect import collect_rows
from calibrate.cli.fit import fit_options, save_fit
from calibrate.cli.options import (
    RUN_SETS,
    RUN_SIZES,
    AsJson,
    Draws,
    HeadName,
    LogitsPath,
    Loss,
    MaxBeta,
    MinBeta,
    MinEntropy,
    Overwrite,
    Paper,
    RuleKind,
    Sets,
    Sizes,
    Store,
    Tolerance,
    TrainedUpTo,
    check_fit_name,
    check_source,
    parse_sizes,
)
from calibrate.report.terminal import show

NOT_IN_NAMES = re.compile(r"[^a-z0-9._]+")


def run_command(
    ctx: Context,
    *,
    head: HeadName = None,
    logits: LogitsPath = None,
    name: Annotated[
        str | None,
        Option(
            callback=check_fit_name,
            help="Name of the fit [default: quickstart, or that of --logits]",
        ),
    ] = None,
    overwrite: Overwrite = False,
    sizes: Sizes = RUN_SIZES,
    sets: Sets = RUN_SETS,
    kind: RuleKind = None,
    loss: Loss = None,
    paper: Paper = False,
    min_entropy: MinEntropy = None,
    min_beta: MinBeta = None,
    max_beta: MaxBeta = None,
    trained_up_to: TrainedUpTo = None,
    tolerance: Tolerance = None,
    seed: Annotated[int, Option(min=0, help="Seed of the data and of the folds.")] = 0,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Collect, fit, evaluate and report, in one command.

    Without options, the head is the built-in max-retrieval. A temperature polynomial is fitted to
    the inputs of the head, and saved as NAME if it gains at least 0.01 nats over softmax on
    held-out inputs, significantly, and loses no more than --tolerance in distribution; if not,
    nothing is saved (exit code 3), unless --kind is given. The fit is scored beside softmax, the
    paper's published polynomial, the best constant and argmax: on new inputs of a head, or on
    held-out folds of --logits. A report is written beside its file. The same command continues an
    interrupted run.

    Example: calibrate run --logits mine.npz
    """
    check_source(ctx)
    options = fit_options(ctx.params)
    draws = Draws(parse_sizes(sizes), sets, seed)
    from calibrate.cli import row_scoring
    from calibrate.cli.loading import open_head, open_logits
    from calibrate.store.saving import check_store

    check_store(store)
    name = name or ("quickstart" if logits is None else name_after(logits))
    own_head = open_head(head) if logits is None else None
    source: Any = own_head if logits is None else open_logits(logits)
    collection = collect_rows(source, Path("runs") / name, draws, overwrite)
    record = save_fit(collection, name, options, store)
    show(row_scoring.score_and_report(record, own_head, draws), as_json)


def name_after(path: Path) -> str:
    """The name of a file or folder, as the name of a fit: lower case, ASCII."""
    path = path.resolve()
    stem = path.stem if path.suffix == ".npz" else path.name
    return NOT_IN_NAMES.sub("-", stem.lower()).strip("-._")[:64] or "mine"
