"""Commands that judge, and publish nothing: verify, diagnose, evaluate, report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import (
    DaskOption,
    HeadOption,
    JobsOption,
    JsonOption,
    LogitsOption,
    SeedOption,
    SizesOption,
    StallOption,
    parse_sizes,
    print_json,
    refuse_beside,
)
from calibrate.errors import CalibrateError


def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a collection, finished or not.")],
    as_json: JsonOption = False,
) -> None:
    """Check every shard of a collection; exit 1 if one is bad or missing, or a file is foreign.

    Shards are checked against the digests in the manifest and against the format; those of an
    unfinished collection against the format alone. Nothing is changed: the same `calibrate collect`
    command as before makes bad and missing shards again, and leaves the others as they are.

    Example: calibrate verify runs/try
    """
    from calibrate.files.collection_audit import audit_collection
    from calibrate.report import audit_views

    audit = audit_collection(run)
    if as_json:
        print_json(audit_views.audit_record(audit))
    else:
        audit_views.print_audit(audit)
    if audit.faults:
        raise CalibrateError(audit_views.remedy(audit))


def diagnose(
    run: Annotated[Path, typer.Argument(help="Folder of a complete collection.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of figures and record [default: RUN's, with -diagnosis]"),
    ] = None,
    eps: Annotated[
        float, typer.Option(help="A target is lost where its coefficient is below this.")
    ] = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Which heads of a collection disperse, and which are worth calibrating, ranked by headroom.

    Headroom is what the best constant beta in [1, 64] would add to the log-probability of the
    targets of these very rows, an upper estimate: `calibrate fit` decides, on held-out rows. The
    collection has to hold rows of every kind (collect with --keep all, the default).

    Example: calibrate diagnose runs/try
    """
    from calibrate.cli import steps
    from calibrate.report.terminal import show

    if not 0 < eps < 1:
        raise typer.BadParameter(f"--eps is {eps}; give a coefficient between 0 and 1")
    show(steps.diagnose(run, out, eps), as_json)


def evaluate(
    head: HeadOption = "max-retrieval",
    logits: LogitsOption = None,
    sizes: SizesOption = "16..16384",
    sets: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Held-out sets of each size "
            "[default: 32,768 up to n = 256, 4,096 up to 4,096, 1,024 above]",
        ),
    ] = None,
    seed: SeedOption = 0,
    fits: Annotated[str, typer.Option(help="Fits to score: REFERENCE,... ")] = "",
    store: Annotated[Path | None, typer.Option(help="Store to look for --fits in first.")] = None,
    jobs: JobsOption = 1,
    dask: DaskOption = None,
    stall: StallOption = 600.0,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print accuracies as CSV.")] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Score a head under fits and under simpler rules, on held-out sets, with tests.

    The rules beside --fits are plain softmax, the paper's numbers, log n, hard attention, and, as a
    yardstick, the best constant of each size in hindsight. Nothing is collected or fitted.

    With --logits, --fits are scored on the rows of a file or folder, each head by the fit's own
    entry for it, by how probable they make the target. The rows should be other ones than the fits
    are made of.

    Example: calibrate evaluate --head max-retrieval-3 --sizes 16..256 --fits max-retrieval@1
    """
    from calibrate.cli import steps
    from calibrate.evaluation.baselines import fixed_rules, in_order
    from calibrate.evaluation.comparison import compare
    from calibrate.parallel.jobs import Jobs
    from calibrate.report.comparison_record import ComparisonRecord
    from calibrate.report.terminal import show

    if logits is not None:
        refuse_beside(context, "--logits", _OF_HEADS)
        _evaluate_logits(logits, fits, store, as_json)
        return
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other; give one of them")
    n, workers, more = parse_sizes(sizes), Jobs(jobs, dask, stall), steps.load_fits(fits, store)
    for fit in more.values():
        steps.refuse_heads(fit)
    chosen, rules = steps.load(head), in_order({**fixed_rules(), **more})
    comparison = compare(chosen.name, steps.evaluate(chosen, n, sets, seed, rules, workers))
    record = ComparisonRecord(comparison)
    if as_csv:
        print(record.as_csv(), end="")
    else:
        show(record, as_json)


# Options of `evaluate` that concern a head which runs, and not logits on disk.
_OF_HEADS = ("head", "sizes", "sets", "seed", "jobs", "dask", "stall", "as_csv")


def _evaluate_logits(path: Path, fits: str, store: Path | None, as_json: bool) -> None:
    from calibrate.cli import logits_steps, steps
    from calibrate.report.logits_record import LogitsRecord
    from calibrate.report.terminal import show

    show(LogitsRecord(logits_steps.score(path, steps.load_fits(fits, store))), as_json)


def report(
    run_or_fit: Annotated[str, typer.Argument(help="A fit (NAME, NAME@3), or a collection.")],
    out: Annotated[Path, typer.Option(help="Where to write the page, an .html file.")],
    head: Annotated[
        str | None, typer.Option(help="The head to score, if it is not the one that the fit names.")
    ] = None,
    logits: LogitsOption = None,
    sizes: SizesOption = "16..4096",
    sets: Annotated[int, typer.Option(min=2, help="Held-out sets of each size.")] = 4096,
    seed: SeedOption = 0,
    store: Annotated[Path | None, typer.Option(help="Store to look in first.")] = None,
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """One self-contained page on a fit: the verdict, scores, figures, and what it was made of.

    Rules that are fitted to the same collection are in it if the collection is in ./runs. A fit
    with an entry per head, or of logits on disk, is scored on the rows of --logits, which should
    be other ones than it was made of.

    Example: calibrate report max-retrieval --out report.html
    """
    from calibrate.cli import logits_steps, steps
    from calibrate.evaluation.baselines import beside, fixed_rules
    from calibrate.files.atomic_io import check_writable
    from calibrate.report import tables

    n = parse_sizes(sizes)
    if out.suffix != ".html":
        raise typer.BadParameter(f"{str(out)!r} is no .html file")
    if logits is not None:
        refuse_beside(context, "--logits", ("head", "sizes", "sets", "seed"))
    fit, collection = steps.find_fit(run_or_fit, store)
    said: Mapping[str, str | None]
    if logits is not None:
        said = logits_steps.report(out, fit, logits)
    else:
        steps.refuse_heads(fit)
        chosen = steps.head_of(fit, head)
        check_writable(out)
        rules = beside(fit, {**fixed_rules(), **steps.fitted_rivals(collection)})
        said = steps.report(out, fit, chosen, steps.evaluate(chosen, n, sets, seed, rules), seed)
    if as_json:
        print_json(said)
    else:
        tables.print_verdict(said)
