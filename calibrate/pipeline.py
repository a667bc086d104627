"""The whole way in five steps, from a trained head to a softmax that uses its polynomial.

    import calibrate

    rows = calibrate.collect("max-retrieval", sizes=[64, 256, 1024], sets=500)
    solved = calibrate.solve(rows)
    rule = calibrate.fit_polynomial(solved)
    print(rule.only.coefficients, rule.r_squared)
    rule.save("mine.json")
    probs = calibrate.adaptive_softmax(logits, calibrate.load("./mine.json"))

`collect` runs a trained head on inputs whose right item is known. `solve` gives each input the
temperature theta that maximises the probability of that item. `fit_polynomial` fits beta = 1/theta,
a polynomial of degree 4 in the entropy, to the misranked inputs. The commands `calibrate collect`
of a head and `solve` run these functions, and `fit --paper` fits the same. `calibrate.fit` does
more: it compares kinds of rule by likelihood, on all inputs, and evaluates the best on held-out
ones.
"""

from collections.abc import Sequence
from pathlib import Path

from calibrate.datasets.resume import discard_collection
from calibrate.datasets.row_collection import RowCollection
from calibrate.defaults import MIN_ENTROPY
from calibrate.errors import CalibrateError
from calibrate.fitting.fit_collection import fit_solved, open_for_fit
from calibrate.fitting.options import SQUARES, Options, resolve_options
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.rows.collect import MAX_BYTES, collect_head_in_memory
from calibrate.rows.collect import collect as collect_on_disk
from calibrate.rows.heads import Head, load_head
from calibrate.solver.solved_inputs import SolvedInputs
from calibrate.solver.solved_rows import solve_collection
from calibrate.store.coefficients import Coefficients


def collect(
    head: Head | str,
    sizes: Sequence[int],
    sets: int = 1_000,
    *,
    seed: int = 0,
    folder: Path | str | None = None,
    overwrite: bool = False,
    keep: str = "all",
    max_bytes: int = MAX_BYTES,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
) -> RowCollection:
    """Runs a head on inputs of every size, and keeps the logits of a sample.

    Args:
      head: see `calibrate.Head`; or the name of a built-in one, or "module:attribute".
      sizes: numbers of items n.
      sets: inputs of each size.
      seed: of the inputs.
      folder: where to write them, resumably; None keeps them in memory.
      overwrite: delete a collection that is there, and collect anew.
      keep: "all", at most 2,048 inputs of each size; or "misranked", only those.
      max_bytes: of the folder.
      jobs: processes that share the work into a folder; the result does not depend on them.
      progress: of that work, advances after each part.
    Raises:
      CalibrateError: a head that lacks a member, or a folder with another collection.
      QualityError: more than 1 % of the inputs have NaN, +inf or a masked target.
    """
    given = load_head(head) if isinstance(head, str) else head
    if folder is None:
        return collect_head_in_memory(given, sizes, sets, seed, keep)
    if overwrite:
        discard_collection(Path(folder))
    to = Path(folder)
    return collect_on_disk(given, sizes, sets, seed, to, max_bytes, progress, keep, jobs)


def solve(rows: RowCollection | Path | str, jobs: Jobs = ONE_PROCESS) -> SolvedInputs:
    """Solves every input for the temperature that maximises the probability of its target.

    The result has `.n`, `.entropy`, `.beta`, `.theta`, `.status` and `.misranked` of every input.

    Args:
      rows: of `collect`, or the folder of a collection.
      jobs: processes that share the work; the result does not depend on them.
    Raises:
      CalibrateError: the folder holds no finished collection.
    Reference: Velickovic et al. 2024, section 3 and appendix A.
    """
    collection = rows if isinstance(rows, RowCollection) else open_for_fit(Path(rows))
    return SolvedInputs(solve_collection(collection, jobs), collection)


def fit_polynomial(
    solved: SolvedInputs,
    *,
    loss: str = "log-least-squares",
    rows: str = "misranked",
    min_entropy: float = MIN_ENTROPY,
    name: str = "polynomial",
) -> Coefficients:
    """Fits beta(H) = c4 H^4 + c3 H^3 + c2 H^2 + c1 H + c0 to the optimal beta of the inputs.

    By default this is the paper's procedure, robust against outliers of the optimal beta; see
    `calibrate.fitting.fit_polynomial`.

    Args:
      solved: of `solve`.
      loss: "log-least-squares", of log p(H) - log beta; or "least-squares", of p(H) - beta.
      rows: "misranked", or "all" with a finite optimum.
      min_entropy: nats, up to which beta is 1; 0 is no threshold.
      name: of the fit.
    Returns:
      Coefficients: `.only.coefficients` are the five numbers, `.r_squared` how much of log beta the
      entropy explains, `.quality["verdict"]` what the rule gains on held-out folds. Of inputs that
      name heads, each head with enough of them has a polynomial, in `.entries`.
    Raises:
      CalibrateError: another loss.
      QualityError: fewer than 100 misranked inputs with a finite optimum, in each head.
    """
    if loss not in SQUARES:
        raise CalibrateError(f"loss is {loss!r}; give one of {', '.join(SQUARES)}")
    options = Options.of_the_paper()._replace(rows=rows, min_entropy=min_entropy, loss=loss)
    options = resolve_options(solved.collection, options)
    fit = fit_solved(solved.collection, solved.rows, name, options)
    fit.warn_of_bound()
    return fit.coefficients
