"""`calibrate.fit`: a fit of logits in memory, with its verdict on rows that it was not made of."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import escape

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files.atomic_io import write_atomically
from calibrate.files.coefficient_file import digest, dumps, read
from calibrate.files.coefficients import Coefficients
from calibrate.files.publishing import check_name
from calibrate.files.rows import count_bad
from calibrate.files.static_node import make_static
from calibrate.report.fit_verdict import outcome_on_logits, verdict_on_logits
from calibrate.report.gains_table import GainsTable, gains_table
from calibrate.report.logits_record import FIRST_FIT
from calibrate.report.streams import spinner
from calibrate.rows.baselines import rivals_on_logits
from calibrate.rows.collect import collect_in_memory
from calibrate.rows.fit_collection import fit_collection, fit_heads_of_collection
from calibrate.rows.hold_out import HELD_OUT, Split, hold_out
from calibrate.rows.logits_files import Arrays, InMemory
from calibrate.rows.rule_fitting import Options
from calibrate.rows.score_logits import LogitScores, score_logits

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Fit(Coefficients):
    """Coefficients, as `calibrate.load` gives them, with their scores on rows held out.

    It equals what was loaded from its file, and works wherever that does.
    """

    scores: LogitScores
    held_out: np.ndarray  # (rows,) bool: which rows it was judged by

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Coefficients):
            return NotImplemented
        return (self.rule, self.entries) == (other.rule, other.entries)

    __hash__ = Coefficients.__hash__

    @property
    def verdict(self) -> str:
        """A sentence: whether the target becomes more probable on the rows held out, and how."""
        return verdict_on_logits(self.scores, FIRST_FIT)

    @property
    def outcome(self) -> str:
        """The verdict in a word: "gain", "loss" or "no difference", in log p beyond chance.

        Or "unknown", of too few rows held out, or groups of them, for an error.
        """
        return outcome_on_logits(self.scores, FIRST_FIT)

    @property
    def table(self) -> GainsTable:
        """Gains over plain softmax by set size on the rows held out, beside other rules.

        "Hard attention" is beta = 64. Each record is (size, rows, rule, log_p, p, gain, error).
        """
        return gains_table(self.scores)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the gain in log p by set size, with bars of two standard errors.

        Args:
          ax: where to draw; None: a new figure of pyplot.
        Returns:
          The axes.
        """
        from calibrate.report.score_plots import plot_by_size

        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots(layout="constrained")[1]
        return plot_by_size(ax, self.scores, FIRST_FIT, "log_p_gain")

    def save(self, path: str | Path) -> Path:
        """Writes the coefficient file, which `calibrate.load(path)` reads; returns the path.

        A file that has this fit already stays as it is.

        Raises:
          CoefficientsError: not a .json file in a folder that exists, a file of something else, or
            a full disk.
        """
        path = Path(path)
        if path.suffix != ".json" or not path.parent.is_dir():
            raise CoefficientsError(f"{str(path)!r} is not a .json file in an existing folder")
        try:
            write_atomically(path, dumps(self).encode(), CoefficientsError, exclusive=True)
        except FileExistsError:
            if not _holds(path, self):
                raise CoefficientsError(
                    f"{path} exists, and is not this fit; give another path, or delete it"
                ) from None
        return path.absolute()

    def __repr__(self) -> str:
        return f"<Fit {self.reference}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.verdict)}</p>{self.table._repr_html_()}"


make_static(Fit)


def _holds(path: Path, fit: Fit) -> bool:
    """Whether a file is of the same rules, made of the same rows."""
    try:
        return digest(read(path)) == digest(fit)
    except CoefficientsError:
        return False


Array = Any  # what numpy.asarray takes


def fit(
    logits: Array | Sequence[Array],
    target: Array | Sequence[Array],
    mask: Array | Sequence[Array] | None = None,
    *,
    group: Array | Sequence[Array] | None = None,
    weight: Array | Sequence[Array] | None = None,
    layer: Array | Sequence[Array] | None = None,
    head: Array | Sequence[Array] | None = None,
    q: float | None = None,
    trained_up_to: int | None = None,
    held_out: float = HELD_OUT,
    seed: int = 0,
    name: str = "arrays",
    progress: bool = True,
) -> Fit:
    """The rule beta that logits need, fitted to most of the rows and judged by the others.

        import numpy as np, calibrate

        rng = np.random.default_rng(0)
        value = rng.uniform(0, 6, (300, 64))  # 300 queries over 64 items
        logits = value + 0.5 * rng.standard_normal(value.shape)
        fit = calibrate.fit(logits, target=value.argmax(axis=1))
        print(fit.verdict)
        print(fit.table)
        probs = calibrate.adaptive_softmax(logits, fit)
        fit.save("mine.json")  # calibrate.load("./mine.json") reads it

    As `calibrate run --logits` on a file of the same arrays, and in memory. The kind of rule and
    its sharpness are chosen by scores on five folds; see `calibrate fit --help`.

    Args:
      logits: (rows, n) float, the scores before softmax, -inf where masked; or, if n differs, a
        list of such arrays, and lists as long of the others.
      target: (rows,) int, the position that should win; or (rows, n) bool, where several may.
      mask: (rows, n) or (n,) bool, True for real items.
      group: (rows,) int, the prompt, or whatever makes rows dependent; each its own if None.
      weight: (rows,) float, of a row among those of its size; 1 if None.
      layer, head: (rows,) int, the head of each row: each head then gets a rule of its own.
      q: the dial of sharpness, from 0 (the mean of log p) to 1 (of p); None: chosen.
      trained_up_to: set size up to which log p may fall by 0.005 nats at most.
      held_out: share of the groups that judge the fit.
      seed: which groups those are.
      name: of the fit.
      progress: show a spinner on stderr, if that is a terminal; the first fit of a process compiles
        for some seconds. Otherwise nothing is printed.
    Returns:
      Fit: Coefficients with .verdict, .outcome, .table, .plot(), .save(path) and .held_out.
    Raises:
      CalibrateError: arrays of another shape, dtype or range.
      QualityError: too few rows, more than 1 % of bad ones (NaN, +inf or a masked target), or no
        rule that beats plain softmax by 0.01 nats and beyond chance.
    """
    check_name(name)
    _check_options(q, trained_up_to)
    columns = {
        "logits": logits, "target": target, "mask": mask, "layer": layer, "head": head,
        "weight": weight, "group": group,
    }  # fmt: skip
    split = hold_out(Arrays(name, _parts(columns)), held_out, seed)
    with spinner(f"calibrate.fit: {len(split.is_held_out):,} rows", progress):
        return _fit(split, Options(q=q, trained_up_to=trained_up_to), name)


def _fit(split: Split, options: Options, name: str) -> Fit:
    collection = collect_in_memory(split.fitted)
    choice = None
    if collection.heads:
        coefficients = fit_heads_of_collection(collection, name, options).coefficients
    else:
        result = fit_collection(collection, name, options)
        coefficients, choice = result.coefficients, result.choice
    scores = score_logits(split.held_out, {"this fit": coefficients, **rivals_on_logits(choice)})
    counts = [*collection.manifest["sizes"], *scores.counts]
    if bad := sum(map(count_bad, counts)):
        warnings.warn(
            f"{bad:,} of {sum(size['rows'] for size in counts):,} rows are left out: they have "
            "NaN, +inf or a masked target",
            stacklevel=3,
        )
    of_fit = {field.name: getattr(coefficients, field.name) for field in fields(Coefficients)}
    return Fit(**of_fit, scores=scores, held_out=split.is_held_out)


def _check_options(q: float | None, trained_up_to: int | None) -> None:
    if q is not None and not 0 <= q <= 1:
        raise CalibrateError(f"q is {q}; give a number from 0 to 1")
    if trained_up_to is not None and trained_up_to < 0:
        raise CalibrateError(f"trained_up_to is {trained_up_to}; give a set size, or 0 for none")


def _parts(columns: dict[str, Any]) -> list[InMemory]:
    """The arrays, one part for each n."""
    needed = ("logits", "target")
    given = {name: x for name, x in columns.items() if x is not None or name in needed}
    logits = given["logits"]
    if not (isinstance(logits, list | tuple) and logits and np.ndim(logits[0]) == 2):
        return [InMemory.of({name: _array(value, name) for name, value in given.items()})]
    for name, value in given.items():
        if not isinstance(value, list | tuple) or len(value) != len(logits):
            raise CalibrateError(f"{name} is not a list of {len(logits)} arrays, as logits is")
    return [
        InMemory.of({name: _array(value[i], name) for name, value in given.items()}, f"part {i}: ")
        for i in range(len(logits))
    ]


def _array(value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except Exception as failure:  # of ragged lists, or of tensors that are not on the CPU
        raise CalibrateError(
            f"{name} is a {type(value).__name__} that NumPy cannot read ({failure}); give an array"
        ) from failure
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
