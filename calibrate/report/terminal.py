"""The terminal: prints a record's blocks on stdout, or the record as JSON."""

import json

from rich import box
from rich import table as rich_table

from calibrate.report.blocks import Block, Facts, Heading, Record, Table, as_json
from calibrate.report.console import print_whole, stdout

LABEL_WIDTH = 10


def show(record: Record, json_wanted: bool = False) -> None:
    """Prints the result of a command, for people or as JSON."""
    if json_wanted:
        print(json.dumps(as_json(record), indent=1))
        return
    for block in record.blocks():
        print_block(block)


def print_block(block: Block) -> None:
    """Prints one block on stdout."""
    if isinstance(block, Heading):
        stdout.print(f"\n{block.text}", style="bold")
    elif isinstance(block, Facts):
        width = max([LABEL_WIDTH, *(len(label) for label, _ in block.rows)])
        for label, text in block.rows:
            stdout.print(f"  {label:<{width}} {text}")
    elif isinstance(block, Table):
        _print_table(block)
    else:
        stdout.print(block.text)


def _print_table(block: Table) -> None:
    title = f"\n{block.title}" if block.title else None
    table = rich_table.Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold"
    )
    for heading in block.columns:
        justify = "left" if heading in block.left else "right"
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for i, row in enumerate(block.rows):
        style = "dim" if i in block.dim else None
        table.add_row(*row, style=style, end_section=i in block.sections)
    print_whole(table)
    if block.note:
        stdout.print(f"  {block.note}")
