"""Options that several commands share, and the checks of their values.

Rare options stand in panels of their own (`rich_help_panel`); see `Command`.
"""

import re
import warnings
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from typer import Argument, BadParameter, Context, Option

from calibrate.cli.command import given
from calibrate.defaults import (
    MAX_BETA,
    MAX_SETS,
    MAX_SIZE,
    MIN_BETA,
    MIN_ENTROPY,
    NLL_TOLERANCE,
    PAPER_MAX_BETA,
    PAPER_MIN_BETA,
)
from calibrate.storage.fingerprints import require_folder

SCORED_SETS = 4_096  # inputs of each size to score a head on, by default
RUN_SIZES, RUN_SETS = "16..4096", 1_024  # inputs of `run`, whose scores `report` draws again
RULE_PANEL = "Options of the rule"
EXECUTION_PANEL = "Options of execution"
SIZE = re.compile(r"\s*[0-9]{1,18}\s*")


def parse_sizes(text: str) -> list[int]:
    """Parses set sizes: a range "16..256" doubles, "16,64,100" is a list; both may be mixed.

    Warns:
      UserWarning: the doubling does not reach the end of a range.
    """
    sizes: list[int] = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        ends = [first, last] if dots else [first, first]
        size, end = (int(text) if SIZE.fullmatch(text) else 0 for text in ends)
        if not 2 <= size <= end <= MAX_SIZE:
            raise BadParameter(
                f"{word[:40]!r}: write set sizes, 2 to {MAX_SIZE:,}: 16..256 or 16,100"
            )
        while size <= end:
            sizes.append(size)
            size *= 2
        if sizes[-1] < end:
            message = f"{word} doubles and ends at {sizes[-1]}; for {end} write {word},{end}"
            warnings.warn(message, stacklevel=2)
    return sorted(set(sizes))


class Draws(NamedTuple):
    """The inputs to draw from a head."""

    sizes: list[int]
    sets: int  # inputs of each size
    seed: int


def check_source(ctx: Context) -> None:
    """Raises BadParameter if a head, or inputs to draw, are given beside logits."""
    if "logits" in given(ctx) and given(ctx) & {"head", "sizes", "sets"}:
        raise BadParameter("--head, --sizes and --sets cannot be used with --logits")


def check_file(path: Path | None, *suffixes: str) -> Path | None:
    """Checks the path of a file to write: its suffix, and that its folder exists."""
    if path is not None and (path.suffix not in suffixes or not path.parent.is_dir()):
        kinds = " or ".join(suffixes)
        raise BadParameter(f"{str(path)!r} is not a {kinds} file in an existing folder")
    return path


def check_fit_name(name: str | None) -> str | None:
    """Checks the name of a fit, before loading its data, which may take long."""
    from calibrate.store.references import check_name

    if name is not None:
        check_name(name)
    return name


AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]

HeadName = Annotated[
    str | None,
    Option(
        help="max-retrieval (max-retrieval-0), max-retrieval-1 to -9, a weights file, or "
        "module:attribute."
    ),
]
LogitsPath = Annotated[
    Path | None,
    Option(
        help="Logits in place of a head: an .npz file or a folder of them, with logits (rows, n), "
        "target (rows,) and, optionally, mask, layer, head, group."
    ),
]
MODEL_HELP = "Folder of a causal language model: safetensors, or a .gguf file"
# Checked at once, since libraries for models take seconds to load.
ModelFolderPath = Annotated[
    Path | None, Option(callback=require_folder, help=f"{MODEL_HELP} [default: the collection's]")
]
RequiredModelFolder = Annotated[Path, Option(callback=require_folder, help=f"{MODEL_HELP}.")]
FitsToScore = Annotated[
    list[str] | None,
    Argument(metavar="FIT", help="Fits: NAME, NAME@3, a file, an address."),
]
ReadStore = Annotated[Path | None, Option(help="Store to search before all others.")]

Overwrite = Annotated[
    bool, Option("--overwrite", help="Delete the collection that is there, and collect again.")
]
FitName = Annotated[str, Option(callback=check_fit_name, help="Name of the fit.")]
Store = Annotated[Path | None, Option(help="Store to write to [default: $CALIBRATE_FITS, ./fits]")]

Sizes = Annotated[
    str,
    Option(help="Sizes n of the inputs: 16..256 doubles, 16,100 is a list."),
]
Sets = Annotated[int, Option(min=1, max=MAX_SETS, help="Inputs of each size.")]
ScoredSets = Annotated[int, Option(min=2, max=MAX_SETS, help="New inputs of each size.")]
Seed = Annotated[int, Option(min=0, help="Seed of the data.")]

# `FitOptions` has the defaults of the rule. The literals repeat KINDS and LOSSES, which would load
# NumPy for --help; a test compares them.
RuleKind = Annotated[
    Literal["constant", "log-size", "polynomial", "entropy-and-size"] | None,
    Option(
        help="Kind of rule; one that is named is saved whatever its verdict [default: a "
        "polynomial, saved if it gains]"
    ),
]
Loss = Annotated[
    Literal["likelihood", "least-squares"] | None,
    Option(
        rich_help_panel=RULE_PANEL,
        help="Likelihood of all inputs, or least squares of the optimal beta of misranked ones "
        "[default: likelihood]",
    ),
]
Paper = Annotated[
    bool,
    Option(
        "--paper",
        rich_help_panel=RULE_PANEL,
        help="The paper's procedure: --loss least-squares, a polynomial.",
    ),
]
MinEntropy = Annotated[
    float | None,
    Option(
        rich_help_panel=RULE_PANEL,
        min=0,
        max=20,
        help=f"Entropy in nats up to which beta is 1 [default: 0; --paper {MIN_ENTROPY:g}]",
    ),
]
MinBeta = Annotated[
    float | None,
    Option(
        rich_help_panel=RULE_PANEL,
        min=MIN_BETA,
        max=1,
        help=f"Lower bound of beta [default: 1/{1 / MIN_BETA:,g}; --paper {PAPER_MIN_BETA:g}]",
    ),
]
MaxBeta = Annotated[
    float | None,
    Option(
        rich_help_panel=RULE_PANEL,
        min=1,
        max=MAX_BETA,
        help=f"Upper bound of beta [default: {MAX_BETA:,g}; --paper {PAPER_MAX_BETA:g}]",
    ),
]
TrainedUpTo = Annotated[
    int | None,
    Option(
        min=0,
        rich_help_panel=RULE_PANEL,
        help="Largest n of the training data [default: the head's own]",
    ),
]
Tolerance = Annotated[
    float | None,
    Option(
        min=0,
        rich_help_panel=RULE_PANEL,
        help=f"NLL in nats that may be lost up to --trained-up-to [default: {NLL_TOLERANCE:g}]",
    ),
]

Device = Annotated[str, Option(rich_help_panel=EXECUTION_PANEL, help="PyTorch device: cpu, cuda.")]
Processes = Annotated[
    int,
    Option(min=1, max=1024, rich_help_panel=EXECUTION_PANEL, help="Number of worker processes."),
]
Dask = Annotated[
    str | None,
    Option(
        rich_help_panel=EXECUTION_PANEL,
        help="Address of a Dask scheduler, such as tcp://HOST:PORT, in place of --jobs.",
    ),
]
