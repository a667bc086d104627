"""The command line: results on stdout, progress and messages on stderr."""

import io
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from calibrate.errors import CalibrateError
from calibrate.faces import fits
from calibrate.faces.options import (
    JsonOption,
    check_figure,
    parse_bytes,
    parse_seeds,
    parse_sizes,
    print_json,
)

if TYPE_CHECKING:
    from calibrate.files.coefficients import Coefficients
    from calibrate.files.collection import Collection
    from calibrate.heads import Head
    from calibrate.heads.training import Progress
    from calibrate.pipeline.evaluate import Score
    from calibrate.pipeline.fit import Fit


class _Commands(TyperGroup):
    """Ends a command that fails with one line, and with the exit code that says which kind."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", UserWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except CalibrateError as error:
            if ctx.params["debug"]:
                raise
            _stop(str(error), error.exit_code)
        except (BrokenPipeError, typer.Abort):
            raise
        except OSError as error:
            if ctx.params["debug"]:
                raise
            _stop(f"{error.filename or 'output'}: {error.strerror}; check the path and the disk", 1)
        except Exception as error:
            if ctx.params["debug"] or hasattr(error, "exit_code"):
                raise  # what has an exit code is Typer's own, a usage error for instance
            _stop(f"{type(error).__name__}: {error}; this is a bug: see it with --debug", 1)
        except KeyboardInterrupt:
            _stop("interrupted; the same command carries on where it stopped", 130)


def _show_warning(message: Any, *where: Any, **also: Any) -> None:
    print("calibrate: warning: " + " ".join(str(message).split()), file=sys.stderr)


def _stop(message: str, exit_code: int) -> NoReturn:
    print("calibrate: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(exit_code)


app = typer.Typer(
    cls=_Commands,
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
    app()


HeadOption = Annotated[
    str, typer.Option(help="max-retrieval, max-retrieval-0 .. -9, or a weights file (.npz).")
]
SizesOption = Annotated[
    str, typer.Option(help="Set sizes: 16..16384 doubles from 16 on; 16,64,256 is a list.")
]
SetsOption = Annotated[int, typer.Option(min=1, help="How many sets to draw of each size.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the data.")]
BytesOption = Annotated[str, typer.Option(help="The collection never takes more than this.")]
StoreOption = Annotated[
    Path | None, typer.Option(help="Store of fits to write to [default: $CALIBRATE_FITS or ./fits]")
]


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
    """The whole job: collect, fit, and score the head before and after on fresh sets.

    Example: calibrate run
    """
    from calibrate.faces import tables
    from calibrate.files.publishing import check_name

    n, most = parse_sizes(sizes), parse_bytes(max_bytes)
    check_name(name)
    chosen = _load_head(head)
    collection = _collect(chosen, n, sets, seed, Path("runs") / name, most)
    fit, figure = _fit(collection.folder, name, "beta", store, None)
    rules = {"plain": None, "paper": _paper(), "own": fit.coefficients}
    scores = _evaluate(chosen, n, sets, seed, rules)
    if as_json:
        print_json(tables.fit_record(fit, figure) | {"scores": tables.score_records(scores)})
        return
    tables.print_fit(fit, figure)
    tables.print_scores(scores, head=chosen.name, own=fit.coefficients.reference)
    tables.print_load_line(fit.coefficients)


@app.command()
def collect(
    out: Annotated[Path, typer.Option(help="Folder of the collection, such as runs/NAME.")],
    head: HeadOption = "max-retrieval",
    sizes: SizesOption = "16..16384",
    sets: SetsOption = 4096,
    seed: SeedOption = 0,
    max_bytes: BytesOption = "1GB",
    as_json: JsonOption = False,
) -> None:
    """Run a head over sets of every size and keep the inputs whose true maximum is misranked.

    The same command again carries on where it stopped, or says that the collection is complete.

    Example: calibrate collect --head max-retrieval --sizes 16..1024 --sets 512 --out runs/try
    """
    from calibrate.faces import tables

    n, most = parse_sizes(sizes), parse_bytes(max_bytes)
    found = _collect(_load_head(head), n, sets, seed, out, most)
    if as_json:
        print_json(found.manifest)
    else:
        tables.print_collection(found)


@app.command()
def fit(
    run: Annotated[Path, typer.Argument(help="Folder of a complete collection.")],
    name: Annotated[str, typer.Option(help="Name of the fit; its next version is written.")],
    objective: Annotated[
        str, typer.Option(help="Least squares on beta, or on theta = 1 / beta.")
    ] = "beta",
    store: StoreOption = None,
    figure: Annotated[
        Path | None, typer.Option(help="Where to draw the fit [default: beside the file, .png]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Solve every collected row and fit 1/theta as a degree-4 polynomial of entropy.

    Writes the next version of NAME into the store, unless the newest says the same.

    Example: calibrate fit runs/try --name try
    """
    from calibrate.faces import tables
    from calibrate.files.publishing import check_name

    if objective not in ("beta", "theta"):
        raise typer.BadParameter(f"{objective!r} is no objective; use beta or theta")
    check_figure(figure)
    check_name(name)
    fitted, drawn = _fit(run, name, objective, store, figure)
    if as_json:
        print_json(tables.fit_record(fitted, drawn))
        return
    tables.print_fit(fitted, drawn)
    tables.print_load_line(fitted.coefficients)


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
    from calibrate.faces.console import stderr
    from calibrate.heads.training import train_seeds

    stderr.print(f"training seeds {seeds} for {steps:,} steps each; the first takes a while")
    for path in train_seeds(parse_seeds(seeds), steps, out, jobs, report=_say_training):
        print(path)


def _say_training(progress: "Progress") -> None:
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    print(
        f"seed {progress.seed}  step {progress.step:,}/{progress.steps:,}  "
        f"loss {progress.loss:.4f}  accuracy {progress.accuracy:.2%}  "
        f"{progress.steps_per_second:.0f} steps/s  {minutes}:{seconds:02d} left",
        file=sys.stderr,
        flush=True,
    )


def _load_head(reference: str) -> "Head":
    from calibrate.faces.console import stderr
    from calibrate.heads import load_head

    stderr.print(f"loading head {reference}")
    return load_head(reference)


def _collect(
    head: "Head", sizes: list[int], sets: int, seed: int, folder: Path, max_bytes: int
) -> "Collection":
    from calibrate.faces.console import stderr
    from calibrate.faces.progress import Steps
    from calibrate.pipeline import collect as pipeline
    from calibrate.pipeline.units import plan_units

    units = {size: len(plan_units(size, sets)) for size in sizes}
    seen: dict[int, list[Any]] = {size: [] for size in sizes}
    with Steps("collecting", sum(units.values())) as steps:

        def report(progress: pipeline.Progress) -> None:
            size = progress.receipt.size
            seen[size].append(progress.receipt.counts)
            line = None
            if len(seen[size]) == units[size]:
                rows, misranked = (sum(c[k] for c in seen[size]) for k in ("rows", "misranked"))
                line = f"  n = {size:>6,}  {rows:,} sets  {misranked / rows:6.1%} misranked"
                line += "  (was there already)" if progress.resumed else ""
            steps.advance(line)

        collection = pipeline.collect(head, sizes, sets, seed, folder, max_bytes, report)
    if not steps.done:
        stderr.print(f"{folder} is complete already")
    return collection


def _fit(
    folder: Path, name: str, objective: str, store: Path | None, figure: Path | None
) -> tuple["Fit", Path | None]:
    from calibrate.faces.console import stderr
    from calibrate.faces.plots import save_fit_figure
    from calibrate.files.publishing import publish, writing_store
    from calibrate.files.store import names, published_store
    from calibrate.pipeline.fit import fit_collection, same_fit

    stderr.print(f"solving and fitting {folder}")
    fitted = fit_collection(folder, name, objective)
    coefficients, written = publish(fitted.coefficients, writing_store(store), same_fit)
    if not written:
        stderr.print(f"{coefficients.reference} says the same; no new version is written")
    elif name in names(published_store()):
        stderr.print(f"a fit named {name!r} comes with the package too; yours hides it here")
    fitted = fitted._replace(coefficients=coefficients)
    assert coefficients.path is not None
    drawn = figure or coefficients.path.with_suffix(".png")
    try:
        if written or figure or not drawn.exists():
            save_fit_figure(drawn, fitted.rows, coefficients, _paper())
    except CalibrateError as error:  # the fit itself is published: say where it is
        stderr.print(f"the figure is not drawn: {error}")
        return fitted, None
    return fitted, drawn


def _paper() -> "Coefficients":
    """The paper's own numbers, whatever a user's store calls "paper"."""
    from calibrate.files.store import load, published_store

    return load("paper@1", published_store())


def _evaluate(
    head: "Head", sizes: list[int], sets: int, seed: int, rules: "dict[str, Coefficients | None]"
) -> "list[Score]":
    from calibrate.faces.progress import Steps
    from calibrate.pipeline.evaluate import evaluate

    with Steps("scoring", len(sizes)) as steps:
        return evaluate(
            head, sizes, sets, seed, rules,
            lambda score: steps.advance(f"  n = {score.size:>6,}  scored on {sets:,} fresh sets"),
        )  # fmt: skip
