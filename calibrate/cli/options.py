"""Options that commands share, and parsers of their values: sizes, seeds, heads, bytes."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

LogitsOption = Annotated[
    Path | None,
    typer.Option(
        help="Rows on disk in place of a head: an .npz file with logits (rows, n), target (rows,), "
        "and if you like mask, layer, head and group, or a folder of them, one for each size."
    ),
]
HeadOption = Annotated[
    str,
    typer.Option(
        help="max-retrieval, max-retrieval-0 .. -9, a weights file (.npz), or module:attribute."
    ),
]
SizesOption = Annotated[
    str, typer.Option(help="Set sizes: 16..16384 doubles from 16; 16,64,256 is a list.")
]
SetsOption = Annotated[int, typer.Option(min=1, help="Sets to draw of each size.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the data.")]
BytesOption = Annotated[str, typer.Option(help="Size limit of the collection on disk: 1GB, 500MB.")]
StoreOption = Annotated[
    Path | None, typer.Option(help="Store of fits to write to [default: $CALIBRATE_FITS or ./fits]")
]
ReadStoreOption = Annotated[
    Path | None,
    typer.Option(help="Store to look in first; then $CALIBRATE_FITS, ./fits, the package's fits."),
]
FreshOption = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Delete the collection in the folder, if there is one, and collect anew."
    ),
]
JobsOption = Annotated[int, typer.Option(min=1, help="Processes that share the work.")]
DaskOption = Annotated[
    str | None,
    typer.Option(
        help="Run on a Dask cluster: its address, or local for a new one with --jobs workers."
    ),
]
StallOption = Annotated[
    float,
    typer.Option(
        min=0.1,
        help="Timeout without progress in seconds: fail if no process finishes a task.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

MAX_SIZE = 1 << 20
_SIZE = re.compile(r"\s*[0-9]{1,18}\s*")
_SEED = re.compile(r"[0-9]{1,9}")
_BYTES = re.compile(r"([0-9]{1,15}(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*(|k|M|G)B?", re.IGNORECASE)


def parse_sizes(text: str) -> list[int]:
    """A range "16..256" doubles, "16,64,100" is a list; both may be mixed."""
    sizes: list[int] = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        if not _SIZE.fullmatch(first) or (dots and not _SIZE.fullmatch(last)):
            raise typer.BadParameter(f"{word!r} is not a set size; write 16..16384 or 16,64,256")
        size, end = int(first), int(last) if dots else int(first)
        if not 2 <= size <= end <= MAX_SIZE:
            raise typer.BadParameter(
                f"{word!r}: set sizes are 2 to {MAX_SIZE:,} items, the lowest first"
            )
        while size <= end:
            sizes.append(size)
            size *= 2
    return sorted(set(sizes))


def parse_seeds(text: str) -> list[int]:
    """One seed "0", a list "0,3" or a range "0-9"."""
    seeds: list[int] = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        if not _SEED.fullmatch(first) or (dash and not _SEED.fullmatch(last)):
            raise typer.BadParameter(f"{word!r} is not a seed; write 0 or 0-9")
        seeds.extend(range(int(first), int(last or first) + 1))
    if not seeds:
        raise typer.BadParameter(f"{text!r} names no seed; write 0 or 0-9")
    return sorted(set(seeds))


def parse_bytes(text: str) -> int:
    """Decimal units: "1GB", "500 MB", "2e8"."""
    match = _BYTES.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is an invalid size; write 1GB, 500MB or 2e8")
    return int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2].lower()])


def refuse_with(context: typer.Context, option: str, others: Sequence[str]) -> None:
    """Raises BadParameter if an option is given that `option` makes meaningless."""
    for name in others:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            refused = next(p.opts[0] for p in context.command.params if p.name == name)
            raise typer.BadParameter(f"{refused} cannot be used with {option}")


def check_fit_name(name: str | None) -> str | None:
    """The name of a fit, at once: what is to be fitted may take long to load."""
    from calibrate.errors import CoefficientsError
    from calibrate.files.publishing import check_name

    try:
        if name is not None:
            check_name(name)
    except CoefficientsError as failure:
        raise typer.BadParameter(str(failure)) from None
    return name


def check_input(path: Path | None) -> Path | None:
    """The path of a file to read, at once."""
    if path is not None and not path.is_file():
        state = "is a folder" if path.is_dir() else "does not exist"
        raise typer.BadParameter(f"{path} {state}; give a file")
    return path


def check_page(path: Path) -> Path:
    """The path of a page, an .html file in a folder that exists."""
    if path.suffix != ".html":
        raise typer.BadParameter(f"{str(path)!r} is not an .html file; give --out NAME.html")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {str(path.parent)!r} does not exist; make it first")
    return path


def check_figure(path: Path | None) -> Path | None:
    """The path of a figure, a .png file in a folder that exists."""
    if path and (path.suffix != ".png" or not path.parent.is_dir()):
        raise typer.BadParameter(f"{str(path)!r} is not a .png file in an existing folder")
    return path
