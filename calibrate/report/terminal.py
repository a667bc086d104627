"""The terminal: prints a record's blocks on stdout, or the record as JSON."""

import json

from rich import box
from rich import table as rich_table
from rich import text as rich_text

from calibrate.report.blocks import (
    GAP,
    WIDEST,
    Block,
    Code,
    Curve,
    Facts,
    Heading,
    Record,
    Table,
    as_json,
)
from calibrate.report.streams import print_whole, stdout
from calibrate.report.text_plot import draw_curve

LABEL_WIDTH = 10


def show(record: Record, json_wanted: bool = False, verbose: bool = True) -> None:
    """Prints the result of a command, for people or as JSON."""
    if json_wanted:
        print(json.dumps(as_json(record), indent=1))
        return
    blocks = list(record.blocks())
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
            stdout.print(f"  {label:<{label_width}} {text}")
    elif isinstance(block, Table):
        _print_table(block)
    elif isinstance(block, Curve):
        _print_curve(block)
    elif isinstance(block, Code):
        stdout.print(f"\n{block.purpose}")
        for line in block.text.splitlines():
            stdout.print(f"  {line}")
    else:
        stdout.print(block.text)


def _print_table(block: Table) -> None:
    """Prints a table, in several parts if it is wider than 100 letters and than the terminal."""
    widest = max(WIDEST, stdout.width if stdout.is_terminal else 0)
    for part in block.split(widest - 1):  # rich ends lines with a space
        _print_part(part)


def _print_part(block: Table) -> None:
    title = f"\n{block.title}" if block.title else None
    table = rich_table.Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold",
        padding=(0, 0, 0, GAP - 1),
    )  # fmt: skip
    for heading in block.columns:
        justify = "left" if heading in block.left else "right"
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for i, row in enumerate(block.rows):
        style = "dim" if i in block.dim else None
        cells = [
            rich_text.Text(cell, "bold" if (i, j) in block.bold else "")
            for j, cell in enumerate(row)
        ]
        table.add_row(*cells, style=style, end_section=i in block.sections)
    print_whole(table)
    if block.note:
        stdout.print(f"  {block.note}")


def _print_curve(block: Curve) -> None:
    if not stdout.encoding.startswith("utf"):
        return  # it cannot show Braille dots
    lines = draw_curve(block.x, block.y, block.x_label, block.y_label)
    stdout.print("\n".join(["", *(f"    {line}" for line in lines), ""]))
