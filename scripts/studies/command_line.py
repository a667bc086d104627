"""The command line that studies share: their steps, and --markdown."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path


def study_parser(about: str | None, steps: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser for --markdown and, of a study that has steps, for their names.

    Args:
      about: the docstring of the study, shown by --help.
      steps: names of its steps in their order; without any name given, all of them are done.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if names := list(steps):
        parser.add_argument("steps", nargs="*", help=f"of {', '.join(names)}; all without any")
        parser.set_defaults(names=names)
    parser.add_argument("--markdown", action="store_true", help="print the tables of the record")
    return parser


def parse(
    parser: argparse.ArgumentParser, markdown: Callable[[dict], list[str]], record: Path
) -> argparse.Namespace:
    """The options, with `steps` as asked for; ends after the tables with --markdown."""
    options = parser.parse_args()
    if options.markdown:
        print("\n".join(markdown(json.loads(record.read_text()))))
        parser.exit()
    names = getattr(options, "names", [])
    if names:
        options.steps = options.steps or names
        if wrong := [name for name in options.steps if name not in names]:
            parser.error(f"{', '.join(wrong)} is not a step; give any of {', '.join(names)}")
    return options
