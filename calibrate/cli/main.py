"""The command line: results on stdout, progress and messages on stderr."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli import evaluation_commands, fits
from calibrate.cli.exit_codes import INTERRUPTED, Commands, end_interrupted
from calibrate.cli.options import (
    BytesOption,
    DaskOption,
    HeadOption,
    JobsOption,
    JsonOption,
    LogitsOption,
    SeedOption,
    SetsOption,
    SizesOption,
    StallOption,
    StoreOption,
    check_figure,
    check_word,
    parse_bytes,
    parse_seeds,
    parse_sizes,
    print_json,
    refuse_beside,
)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Calibrate adaptive-temperature softmax for your own attention head: "
    "collect the inputs that it misranks, fit a versioned coefficient file, load it at inference.",
)


app.add_typer(fits.app, name="fits")


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 is no error
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
        signal.signal(signal.SIGINT, end_interrupted)
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # JAX may be at work in other threads still, and crashes in an orderly exit.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("calibrate"))
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def run(
    head: HeadOption = "max-retrieval",
    sizes: SizesOption = "16..4096",
    sets: SetsOption = 4096,
    seed: SeedOption = 0,
    name: Annotated[str, typer.Option(help="Name of the fit, and of its folder in runs/.")] = (
        "quickstart"
    ),
    max_bytes: BytesOption = "1GB",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """The whole job: collect, fit, score the head before and after on fresh sets, and report.

    Example: calibrate run
    """
    from calibrate.cli import steps
    from calibrate.evaluation.baselines import beside, fitted_rules, fixed_rules
    from calibrate.files.publishing import check_name
    from calibrate.fitting.fit_collection import fit_collection
    from calibrate.report import tables

    n, most = parse_sizes(sizes), parse_bytes(max_bytes)
    check_name(name)
    chosen = steps.load(head)
    collection = steps.collect(chosen, n, sets, seed, Path("runs") / name, most)
    fit, figure = steps.fit(
        collection.folder, lambda: fit_collection(collection.folder, name), store, None
    )
    rules = beside(fit.coefficients, {**fixed_rules(), **fitted_rules(fit.rows, fit.choice)})
    scores = steps.evaluate(chosen, n, sets, seed, rules)
    assert fit.coefficients.path is not None
    page = fit.coefficients.path.with_suffix(".html")
    said = steps.report(page, fit.coefficients, chosen, scores, seed, needed=False)
    if as_json:
        record = tables.fit_record(fit, figure) | said
        print_json(record | {"scores": tables.score_records(scores)})
        return
    tables.print_fit(fit, figure)
    tables.print_scores(scores, head=chosen.name, own=fit.coefficients.reference)
    tables.print_verdict(said)
    tables.print_load_line(fit.coefficients)


@app.command()
def collect(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the collection [default: runs/ and its name]")
    ] = None,
    head: HeadOption = "max-retrieval",
    logits: LogitsOption = None,
    sizes: SizesOption = "16..16384",
    sets: SetsOption = 4096,
    seed: SeedOption = 0,
    keep: Annotated[
        str,
        typer.Option(help="all: up to 2,048 rows of each size; or those that are misranked."),
    ] = "all",
    max_bytes: BytesOption = "1GB",
    jobs: JobsOption = 1,
    dask: DaskOption = None,
    stall: StallOption = 600.0,
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Run a head over sets of every size, or take logits from files, and keep a sample of the rows.

    How many of its inputs the head misranks is counted whatever is kept. The same command again
    carries on where it stopped, makes shards that were damaged or lost again, or says that the
    collection is complete; so it does with other --jobs, --dask and --stall, which change no byte.

    Example: calibrate collect --head max-retrieval --sizes 16..1024 --sets 512 --out runs/try
    """
    from calibrate.cli import steps
    from calibrate.collecting.collect import KEEP
    from calibrate.parallel.jobs import Jobs
    from calibrate.report import tables

    n, most = parse_sizes(sizes), parse_bytes(max_bytes)
    check_word(keep, KEEP, "--keep")
    workers = Jobs(jobs, dask, stall)
    if logits is not None:
        refuse_beside(context, "--logits", ("head", "sizes", "sets", "seed"))
        found = steps.collect_arrays(logits, out, most, keep, workers)
    else:
        chosen = steps.load(head)
        folder = out or steps.runs(chosen.name)
        found = steps.collect(chosen, n, sets, seed, folder, most, keep, workers)
    if as_json:
        print_json(found.manifest)
    else:
        tables.print_collection(found)


@app.command()
def fit(
    run: Annotated[Path, typer.Argument(help="Folder of a collection.")],
    name: Annotated[str, typer.Option(help="Name of the fit; its next version is written.")],
    objective: Annotated[
        str,
        typer.Option(
            help="likelihood: of the targets. beta, theta: least distance from each row's optimum."
        ),
    ] = "likelihood",
    rows: Annotated[
        str | None, typer.Option(help="all or misranked [default: what the collection keeps]")
    ] = None,
    weigh: Annotated[str, typer.Option(help="What counts alike: set sizes, or rows.")] = "sizes",
    monotone: Annotated[bool, typer.Option(help="Beta never falls as the entropy rises.")] = False,
    gate: Annotated[
        float,
        typer.Option(
            min=0,
            max=20,
            help="Entropy (nats) up to which softmax is left as it is; rules by size have none.",
        ),
    ] = 0.0,
    force_polynomial: Annotated[
        bool, typer.Option(help="Publish the polynomial even if a simpler rule does as well.")
    ] = False,
    paper: Annotated[
        bool,
        typer.Option(
            help="The paper's procedure instead: least squares on misranked rows, no verdict."
        ),
    ] = False,
    allow_partial: Annotated[
        bool, typer.Option(help="Fit what there is of an unfinished collection; the file says so.")
    ] = False,
    jobs: JobsOption = 1,
    dask: DaskOption = None,
    stall: StallOption = 600.0,
    store: StoreOption = None,
    figure: Annotated[
        Path | None, typer.Option(help="Where to draw the fit [default: beside the file, .png]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Solve every collected row, and publish the rule that the head needs.

    Three kinds of rule are fitted and scored on rows that they have not seen: one constant,
    kappa log n + b, and a degree-4 polynomial of entropy. The simplest that no other beats, by the
    objective on all rows of the collection, is written into the store as the next version of NAME,
    unless the newest says the same. If none beats plain softmax, none is written (exit code 3).
    Where the rows say which layer and head they are of, each head is fitted by itself, and the file
    has an entry for each that gains.

    Example: calibrate fit runs/try --name try
    """
    from calibrate.cli import steps
    from calibrate.files.publishing import check_name
    from calibrate.fitting import fit_collection as fitting
    from calibrate.fitting import rule_fitting
    from calibrate.parallel.jobs import ONE_PROCESS, Jobs
    from calibrate.report import per_head_views, tables

    check_word(objective, rule_fitting.OBJECTIVES, "--objective")
    check_word(weigh, rule_fitting.WEIGHTS, "--weigh")
    if rows is not None:
        check_word(rows, rule_fitting.ROWS, "--rows")
    check_figure(figure)
    check_name(name)
    options = rule_fitting.Options(objective, rows, weigh, monotone, gate)
    force = "polynomial" if force_polynomial else None
    workers = Jobs(jobs, dask, stall)
    if paper and (options, force, workers) != (rule_fitting.Options(), None, ONE_PROCESS):
        raise typer.BadParameter("--paper sets all other choices; give it alone")
    collection = fitting.open_for_fit(run, allow_partial)
    arguments = (collection, name, options, force, workers)
    if paper:
        one, drawn = steps.fit(
            run, lambda: fitting.fit_collection_as_in_the_paper(collection, name), store, figure
        )
    elif not collection.heads:
        one, drawn = steps.fit(run, lambda: fitting.fit_collection(*arguments), store, figure)
    else:
        many, drawn = steps.fit_heads(
            collection,
            lambda report: fitting.fit_heads_of_collection(*arguments, report),
            workers,
            store,
            figure,
        )
        if as_json:
            print_json(per_head_views.heads_record(many, drawn))
        else:
            per_head_views.print_heads(many, drawn)
        return
    if as_json:
        print_json(tables.fit_record(one, drawn))
        return
    tables.print_fit(one, drawn)
    tables.print_load_line(one.coefficients)


for command in (
    evaluation_commands.verify,
    evaluation_commands.diagnose,
    evaluation_commands.evaluate,
    evaluation_commands.report,
):
    app.command()(command)


@app.command()
def train(
    seeds: Annotated[str, typer.Option(help="One head each: 0, 0,3 or 0-9.")] = "0",
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps.")] = 100_000,
    out: Annotated[Path, typer.Option(help="Folder of the weights and checkpoints.")] = Path(
        "runs/train"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Heads trained at once, a core each.")] = 1,
) -> None:
    """Train max-retrieval heads as in the paper's appendix A.4 (needs the extra "train").

    The same command again carries on from the last checkpoint, and ends with the same bytes.

    Example: calibrate train --seeds 0-3 --steps 100000 --jobs 2
    """
    from calibrate.cli.progress import say_training
    from calibrate.heads.training import train_seeds
    from calibrate.report.console import stderr

    stderr.print(f"training seeds {seeds} for {steps:,} steps each; the first takes a while")
    for path in train_seeds(parse_seeds(seeds), steps, out, jobs, report=say_training):
        print(path)
