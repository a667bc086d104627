"""The terminal: prints a record's blocks on stdout, or the record as JSON."""

import io
import json
from typing import Literal

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text as RichText

from calibrate.errors import printable
from calibrate.report.blocks import Block, Code, Facts, Heading, Record, Table, as_json
from calibrate.report.streams import stdout

LABEL_WIDTH = 10
WHOLE = 1_000  # letters of a line: wide enough for any table


def show(record: Record, json_wanted: bool = False, verbose: bool = False) -> None:
    """Prints the result of a command as JSON, or for people: without details, unless `verbose`.

    Raises the `failure` of a record that has one.
    """
    _print_record(record, json_wanted, verbose)
    if failure := getattr(record, "failure", None):
        raise failure


def _print_record(record: Record, json_wanted: bool, verbose: bool) -> None:
    if json_wanted:
        print(json.dumps(as_json(record), indent=1).replace("\x7f", "\\u007f"))
        return
    blocks = [block for block in record.blocks() if verbose or not block.detail]
    labels = (label for block in blocks if isinstance(block, Facts) for label, _ in block.rows)
    label_width = max([LABEL_WIDTH, *map(len, labels)])
    for block in blocks:
        print_block(block, label_width)


def print_block(block: Block, label_width: int = LABEL_WIDTH) -> None:
    """Prints one block on stdout; the values of facts are aligned at `label_width`."""
    if isinstance(block, Heading):
        stdout.print(f"\n{block.text}", style="bold")
    elif isinstance(block, Facts):
        for label, text in block.rows:
            stdout.print(printable(f"  {label:<{label_width}} {text}"))
    elif isinstance(block, Table):
        stdout.print(f"\n{block.title}" if block.title else "", style="bold")
        _print_whole(_of_rich(block))
        if block.note:
            stdout.print(f"  {block.note}")
    elif isinstance(block, Code):
        stdout.print("\n".join([f"\n{block.purpose}", *map("  {}".format, block.text.split("\n"))]))
    else:
        stdout.print(block.text)


def _print_whole(table: rich_table.Table) -> None:
    """Prints a table at its own width: a narrow terminal may wrap its lines, no cell is cut."""
    width, stdout.width = stdout.width, WHOLE
    try:
        stdout.print(table)
    finally:
        stdout.width = width


def as_text(block: Table) -> str:
    """A table as it is printed, without its note."""
    console = Console(file=io.StringIO(), width=WHOLE, color_system=None, force_jupyter=False)
    with console.capture() as printed:
        console.print(_of_rich(block))
    lines = [block.title, *printed.get().splitlines()]
    return "\n".join(line.rstrip() for line in lines)


def _of_rich(block: Table) -> rich_table.Table:
    table = rich_table.Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))
    for heading in block.columns:
        side: Literal["left", "right"] = "left" if heading in block.left else "right"
        table.add_column(RichText(printable(heading, "\n")), justify=side, no_wrap=True)
    for i, row in enumerate(block.rows):
        cells = (
            RichText(printable(x, "\n"), "bold" if (i, j) in block.bold else "")
            for j, x in enumerate(row)
        )
        table.add_row(*cells)
    return table
