"""`calibrate run`: collect, fit, evaluate and report, on a head, logits or a model."""

from typing import Annotated

import typer

from calibrate.cli.model_options import OF_MODEL, ModelRequest, takes_model
from calibrate.cli.options import (
    BytesOption,
    FreshOption,
    HeadOption,
    JsonOption,
    LogitsOption,
    SeedOption,
    SetsOption,
    SizesOption,
    StoreOption,
    check_fit_name,
    parse_bytes,
    parse_sizes,
    refuse_with,
)
from calibrate.report.terminal import show

NameOption = Annotated[
    str | None,
    typer.Option(
        callback=check_fit_name,
        help="Name of the fit, and of its folder in runs/ [default: quickstart, or that of the "
        "file or model]",
    ),
]


def _check_share(share: float) -> float:
    if not 0 < share < 1:
        raise typer.BadParameter(f"{share:g} is not between 0 and 1; give a share such as 0.2")
    return share


HeldOutOption = Annotated[
    float,
    typer.Option(
        callback=_check_share,
        help="Of --logits: share of the rows, by group, that judge the fit; between 0 and 1.",
    ),
]

_OF_HEAD = ("head", "sizes", "sets")


@takes_model
def run(
    head: HeadOption = "max-retrieval",
    sizes: SizesOption = "16..4096",
    sets: SetsOption = 1024,
    seed: SeedOption = 0,
    name: NameOption = None,
    fresh: FreshOption = False,
    max_bytes: BytesOption = "1GB",
    store: StoreOption = None,
    logits: LogitsOption = None,
    held_out: HeldOutOption = 0.2,
    request: ModelRequest = ModelRequest(),  # noqa: B008 (immutable)
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Collect, fit, evaluate and report, in one command.

    The head is scored before and after on fresh sets. Of --logits, a share of the rows (whole
    groups) is held out, the others are fitted, and the report tells what the fit does to those held
    out. Of --model, examples are made or read as by `collect`, the heads are fitted through the
    model, and the report is on the examples that no fit has seen. The fit is published as NAME, the
    report beside it. The same command continues what was interrupted.

    Example: calibrate run

    Example: calibrate run --logits mine.npz

    Example: calibrate run --model MODEL --task retrieval --text book.txt
    """
    if request.model is not None:
        from calibrate.cli.run_steps import run_on_model

        refuse_with(context, "--model", (*_OF_HEAD, "logits", "held_out", "max_bytes"))
        show(run_on_model(request.source(seed), name, store, fresh=fresh), as_json)
        return
    refuse_with(context, "a head or logits; they need --model", OF_MODEL)
    if logits is not None:
        from calibrate.cli.run_steps import run_on_logits

        refuse_with(context, "--logits", _OF_HEAD)
        n_bytes = parse_bytes(max_bytes)
        show(run_on_logits(logits, name, held_out, seed, n_bytes, store, fresh=fresh), as_json)
        return
    refuse_with(context, "a head, which draws fresh sets; it needs --logits", ("held_out",))
    from calibrate.cli.run_steps import run_on_head

    n, n_bytes = parse_sizes(sizes), parse_bytes(max_bytes)
    show(run_on_head(head, n, sets, seed, name, n_bytes, store, fresh=fresh), as_json)
