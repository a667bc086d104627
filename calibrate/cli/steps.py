"""The pipeline's steps as commands take them: with progress on stderr."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from calibrate.cli.progress import Steps
from calibrate.collecting import collect as collecting
from calibrate.collecting.work_units import Unit, plan_units
from calibrate.errors import CalibrateError, CoefficientsError, QualityError
from calibrate.evaluation.baselines import ScoredRule, fitted_rules, paper
from calibrate.evaluation.comparison import compare
from calibrate.evaluation.diagnosis import diagnose as diagnose_collection
from calibrate.evaluation.diagnosis import require_all_rows
from calibrate.evaluation.score_head import Score, score_head
from calibrate.files.atomic_io import check_writable
from calibrate.files.coefficients import Coefficients
from calibrate.files.collection import MANIFEST, Collection, open_collection
from calibrate.files.publishing import publish, writing_store
from calibrate.files.store import is_path, names, open_name, published_store, stores
from calibrate.files.store import load as load_fit
from calibrate.fitting.fit_collection import Fit, same_fit
from calibrate.fitting.per_head import ManyFits
from calibrate.fitting.solved_rows import heads_apart, solve_collection
from calibrate.heads import Head, is_built_in, load_head
from calibrate.heads.logits_files import Arrays
from calibrate.parallel.jobs import ONE_PROCESS, Jobs
from calibrate.report.console import stderr
from calibrate.report.diagnosis_record import RECORD, DiagnosisRecord, save_diagnosis
from calibrate.report.fit_plots import save_fit_figure
from calibrate.report.head_page import write_head_page
from calibrate.report.per_head_views import save_gains_figure
from calibrate.report.verdict import beside_rivals, verdict

Drawn = tuple[Fit, Path | None]


def load(reference: str) -> Head:
    """A head, by name or file."""
    stderr.print(f"loading head {reference}")
    return load_head(reference)


def runs(name: str) -> Path:
    """Where a collection goes if nobody says."""
    return Path("runs") / Path(name).stem


def collect(
    head: Head, sizes: list[int], sets: int, seed: int, folder: Path, max_bytes: int,
    keep: str = "all", jobs: Jobs = ONE_PROCESS,
) -> Collection:  # fmt: skip
    """Collects from a head, with a line per set size."""
    units = [unit for size in sizes for unit in plan_units(size, sets)]
    with _collecting(units, folder, jobs) as report:
        return collecting.collect(head, sizes, sets, seed, folder, max_bytes, report, keep, jobs)


def collect_arrays(
    path: Path, folder: Path | None, max_bytes: int, keep: str = "all", jobs: Jobs = ONE_PROCESS
) -> Collection:
    """Collects from arrays on disk, with a line per set size."""
    stderr.print(f"reading {path}")
    arrays = Arrays(path)
    folder = folder or Path("runs") / arrays.name
    units = [unit for size in arrays.sizes for unit in plan_units(size, arrays.count(size))]
    with _collecting(units, folder, jobs) as report:
        return collecting.collect_arrays(arrays, folder, max_bytes, report, keep, jobs)


@contextlib.contextmanager
def _collecting(
    units: Sequence[Unit], folder: Path, jobs: Jobs
) -> Iterator[Callable[[collecting.Progress], None]]:
    """What is to be called after each unit."""
    seen: dict[int, list[collecting.Progress]] = {unit.size: [] for unit in units}
    n_units = Counter(unit.size for unit in units)
    items = sum(unit.size * unit.sets for unit in units)
    with Steps("collecting", len(units), items, at_once=jobs.uses_workers) as steps:

        def report(progress: collecting.Progress) -> None:
            size = progress.receipt.size
            seen[size].append(progress)
            line = None
            if len(seen[size]) == n_units[size]:
                rows, misranked = (
                    sum(p.receipt.counts[k] for p in seen[size]) for k in ("rows", "misranked")
                )
                line = f"  n = {size:>6,}  {rows:,} sets  {misranked / rows:6.1%} misranked"
                line += "  (was there already)" if all(p.resumed for p in seen[size]) else ""
            steps.advance(line, size * progress.receipt.counts["rows"], progress.resumed)

        yield report
    if not steps.done:
        stderr.print(f"{folder} is complete already")


def fit(folder: Path, make: Callable[[], Fit], store: Path | None, figure: Path | None) -> Drawn:
    """Fits and publishes; the path is that of the figure, if it could be drawn."""
    stderr.print(f"solving and fitting {folder}")
    fitted = make()
    coefficients, written = _publish(fitted.coefficients, store)
    fitted = fitted._replace(coefficients=coefficients)
    return fitted, _draw(
        coefficients, written, figure,
        lambda path: save_fit_figure(path, fitted.rows, coefficients, paper()),
    )  # fmt: skip


def fit_heads(
    collection: Collection, make: Callable[[Callable[[int], None]], ManyFits], jobs: Jobs,
    store: Path | None, figure: Path | None,
) -> tuple[ManyFits, Path | None]:  # fmt: skip
    """Fits many heads and publishes them as one file; the path is that of the figure, if any.

    `make` is given what it shall call with the number of heads that are done.
    """
    groups, n_heads = heads_apart(collection), len(collection.heads)
    stderr.print(f"solving and fitting the {n_heads} heads of {collection.folder}")
    with Steps("fitting heads", len(groups), n_heads, at_once=jobs.uses_workers) as steps:
        fitted = make(lambda heads: steps.advance(work=heads))
    coefficients, written = _publish(fitted.coefficients, store)
    fitted = fitted._replace(coefficients=coefficients)
    drawn = _draw(coefficients, written, figure, lambda path: save_gains_figure(path, fitted))
    return fitted, drawn


def _publish(coefficients: Coefficients, store: Path | None) -> tuple[Coefficients, bool]:
    """The fit as it is in the store, and whether it was written now."""
    name = coefficients.name
    published, written = publish(coefficients, writing_store(store), same_fit)
    if not written:
        stderr.print(f"{published.reference} says the same; no new version is written")
    elif name in names(published_store()) and not _is_published(published):
        stderr.print(f"a fit named {name!r} comes with the package too; yours hides it here")
    return published, written


def _draw(
    coefficients: Coefficients, written: bool, figure: Path | None, save: Callable[[Path], None]
) -> Path | None:
    """Where the figure of a published fit is; None if it could not be drawn."""
    assert coefficients.path is not None
    path = figure or coefficients.path.with_suffix(".png")
    try:
        if written or figure or not path.exists():
            save(path)
    except CalibrateError as error:  # the fit itself is published: say where it is
        stderr.print(f"the figure is not drawn: {error}")
        return None
    return path


def _is_published(coefficients: Coefficients) -> bool:
    """Whether a fit lies among those of the package itself, as in a clone."""
    assert coefficients.path is not None
    return coefficients.path.resolve().is_relative_to(published_store().resolve())


def evaluate(
    head: Head,
    sizes: list[int],
    sets: int | None,
    seed: int,
    rules: Mapping[str, ScoredRule],
    jobs: Jobs = ONE_PROCESS,
) -> list[Score]:
    """Scores one head, with a line per set size."""
    with Steps("scoring", len(sizes), at_once=jobs.uses_workers) as steps:
        return score_head(
            head, sizes, sets, seed, rules, jobs=jobs,
            report=lambda score: steps.advance(
                f"  n = {score.size:>6,}  scored on {score.sets:,} fresh sets"
            ),
        )  # fmt: skip


def report(
    path: Path,
    fit: Coefficients,
    head: Head,
    scores: list[Score],
    seed: int,
    needed: bool = True,
) -> dict[str, str | None]:
    """Writes the report on one head's scores; returns its sentences, and its path.

    If it is not `needed`, a disk that does not take it is no error: the path is None.
    """
    stderr.print(f"drawing the report {path}")
    comparison = compare(head.name, scores)
    said = {"verdict": verdict(comparison, fit.reference), "rivals": beside_rivals(comparison)}
    try:
        write_head_page(path, fit, head, comparison, seed)
    except CalibrateError as error:
        if needed:
            raise
        stderr.print(f"the report is not written: {error}")
        return {**said, "report": None}
    return {**said, "report": str(path)}


def diagnose(run: Path, out: Path | None, eps: float) -> DiagnosisRecord:
    """Diagnoses a collection, and writes the record and the figures into a folder of their own."""
    collection = open_collection(run)
    require_all_rows(collection)
    folder = out or beside(run)
    if folder.resolve().is_relative_to(run.resolve()) or (folder / MANIFEST).exists():
        raise CalibrateError(f"{folder} is a collection's folder; choose another one with --out")
    check_writable(folder / RECORD)
    n_steps = len(heads_apart(collection)) * len(collection.manifest["shards"])
    with Steps(f"measuring the rows of {run}", n_steps) as steps:
        diagnosis = diagnose_collection(collection, eps, steps.advance)
    stderr.print(f"drawing into {folder}")
    return save_diagnosis(folder, diagnosis)


def beside(run: Path) -> Path:
    """Where the diagnosis of a collection goes if nobody says: runs/NAME-diagnosis."""
    named = run if run.name not in ("", "..") else run.resolve()
    return named.with_name(f"{named.name}-diagnosis")


def find_fit(reference: str, store: Path | None) -> tuple[Coefficients, Collection | None]:
    """A fit by reference, or that of a collection's folder; and its collection, if it is here.

    Raises:
      CalibrateError: there is no such fit, or the collection is damaged.
    """
    folder = Path(reference)
    if folder.is_dir() and (is_path(reference) or (folder / MANIFEST).exists()):
        collection = open_collection(folder)
        return _fit_of(collection, store), collection
    coefficients = load_fit(reference, store)
    return coefficients, _collection_of(coefficients)


def _fit_of(collection: Collection, store: Path | None) -> Coefficients:
    """The newest published fit of a collection that is not yanked."""
    found = []
    for held in (open_name(place, name) for place in stores(store) for name in names(place)):
        # Of one name the highest version is the newest, whatever the clock said.
        for version in sorted(set(held.versions) - held.history.yanked, reverse=True):
            with contextlib.suppress(CoefficientsError):  # a damaged one is not the one
                coefficients = held.read(version)
                if coefficients.source.get("collection") == collection.digest:
                    found.append(coefficients)
                    break
    if not found:
        raise CalibrateError(
            f"no published fit is of the collection {collection.folder}; "
            f"make one with `calibrate fit {collection.folder} --name NAME`"
        )
    return max(found, key=lambda fit: (fit.provenance.get("created", ""), fit.version))


def _collection_of(coefficients: Coefficients) -> Collection | None:
    for manifest in sorted(Path("runs").glob(f"*/{MANIFEST}")):
        with contextlib.suppress(CalibrateError):
            collection = open_collection(manifest.parent)
            if collection.digest == coefficients.source.get("collection"):
                return collection
    return None


def fitted_rivals(collection: Collection | None) -> dict[str, ScoredRule]:
    """Rules that are fitted to the collection of a fit, if it is here and calls for any."""
    if collection is None:
        return {}
    try:
        return fitted_rules(solve_collection(collection))
    except QualityError as failure:
        stderr.print(f"rivals that are fitted to {collection.folder} are left out: {failure}")
        return {}


def load_fits(references: str, store: Path | None) -> dict[str, Coefficients]:
    """Fits by "REF,...", each file once, named NAME@VERSION: no built-in rule is called so.

    Raises:
      CoefficientsError: there is no such fit.
    """
    found: dict[str, Coefficients] = {}
    for reference in filter(None, map(str.strip, references.split(","))):
        fit = load_fit(reference, store)
        if any(fit.path == other.path for other in found.values()):
            continue
        found[fit.reference if fit.reference not in found else f"{reference}@"] = fit
    return found


def refuse_heads(coefficients: Coefficients) -> None:
    """Raises CoefficientsError if a fit has an entry per head: one head alone has no use for it."""
    try:
        assert coefficients.only
    except CoefficientsError as failure:
        raise CoefficientsError(
            f"{failure}, or score each head on logits on disk: --logits FILE.npz"
        ) from None


def head_of(coefficients: Coefficients, reference: str | None) -> Head:
    """The head that a fit is for, or the one that is asked for.

    Raises:
      CalibrateError: the fit names no head, or was made for another one.
    """
    named = reference or coefficients.source.get("head")
    if named is None:
        raise CalibrateError(
            f"{coefficients.reference} names no head; say which to score: --head max-retrieval"
        )
    if not reference and not is_built_in(named):  # a file says no path of this machine
        raise CalibrateError(
            f"{coefficients.reference} was made for head {named!r}, which does not come with the "
            "package; give its weights file or module:attribute with --head, or, if it is of "
            "logits on disk, others of them with --logits FILE.npz"
        )
    head = load(named)
    if coefficients.fingerprint not in (None, head.fingerprint):
        raise CalibrateError(
            f"{coefficients.reference} was made for {coefficients.fingerprint}, and {head.name} "
            f"is {head.fingerprint}; give the head that it was made for, with --head"
        )
    return head
