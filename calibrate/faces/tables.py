"""Results in words: tables for people on stdout, and the same as records for --json."""

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from calibrate.faces.console import stdout
from calibrate.faces.fit_views import left_out, load_line, polynomial
from calibrate.files.coefficients import Coefficients
from calibrate.files.collection import BAD, Collection
from calibrate.pipeline.evaluate import Score
from calibrate.pipeline.fit import Fit


def print_collection(collection: Collection) -> None:
    """What a collection saw and kept, a line per set size."""
    table = Table(
        box=box.SIMPLE_HEAD, title=f"Collection {collection.folder}", title_justify="left"
    )
    for heading in ("n", "sets", "misranked", "share", "ties", "bad", "kept"):
        table.add_column(heading, justify="right")
    for size in collection.manifest["sizes"]:
        table.add_row(
            f"{size['size']:,}", f"{size['rows']:,}", f"{size['misranked']:,}",
            f"{size['misranked'] / size['rows']:.1%}", f"{size['ties']:,}",
            f"{sum(size[reason] for reason in BAD):,}", f"{size['kept']:,}",
        )  # fmt: skip
    stdout.print(table)
    total = sum(shard["bytes"] for shard in collection.manifest["shards"])
    stdout.print(f"{len(collection.manifest['shards'])} shards, {total / 1e6:,.1f} MB")


def print_fit(fit: Fit, figure: Path | None) -> None:
    """The polynomial, its domain, how well it fits, what it was fitted to, and where it is."""
    coefficients = fit.coefficients
    entry, quality = coefficients.only, coefficients.quality
    rows, residuals = quality["rows"], quality["residuals"]
    others = ", ".join(f"{count:,} {reason}" for count, reason in left_out(rows))
    stdout.print(f"\nFit {coefficients.reference}", style="bold")
    stdout.print(f"  beta(H)    {polynomial(entry.coefficients)}")
    stdout.print(f"  domain     {entry.domain[0]:.3f} .. {entry.domain[1]:.3f} nats")
    stdout.print(
        f"  residuals  beta {residuals['beta_rms']:.3f} (R^2 {residuals['beta_r_squared']:.3f}), "
        f"theta {residuals['theta_rms']:.3f}, root mean square"
    )
    stdout.print(f"  rows       {rows['interior']:,} used of {rows['rows']:,}; left out: {others}")
    stdout.print(f"  file       {coefficients.path}")
    stdout.print(f"  figure     {figure or 'not drawn'}")


def fit_record(fit: Fit, figure: Path | None) -> dict[str, Any]:
    """What `print_fit` says, for a machine."""
    coefficients = fit.coefficients
    return {
        "reference": coefficients.reference,
        "path": str(coefficients.path),
        "figure": figure and str(figure),
        "coefficients": list(coefficients.only.coefficients),
        "domain": list(coefficients.only.domain),
        "quality": dict(coefficients.quality),
    }


def print_scores(scores: list[Score], head: str, own: str) -> None:
    """Accuracy in per cent, each with its standard error; the gain is paired set by set."""
    title = (
        f"\nAccuracy of {head} in % ± standard error, on {scores[0].sets:,} fresh sets of each size"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for heading in ("n", "plain softmax", "the paper's numbers", own, "gain over plain"):
        table.add_column(heading, justify="right")
    for score in scores:
        gain, error = score.gain("own", over="plain")
        shown = ("plain", "paper", "own")
        cells = (_percent(score.accuracy(r), score.standard_error(r)) for r in shown)
        table.add_row(f"{score.size:,}", *cells, f"{100 * gain:+.1f} ± {100 * error:.1f}")
    stdout.print(table)


def _percent(share: float, error: float) -> str:
    return f"{100 * share:.1f} ± {100 * error:.1f}"


def score_records(scores: list[Score]) -> list[dict[str, Any]]:
    """What `print_scores` says, for a machine; shares, not per cent."""
    return [
        {
            "size": score.size,
            "sets": score.sets,
            **{
                rule: {"accuracy": score.accuracy(rule), "error": score.standard_error(rule)}
                for rule in score.correct
            },
            "gain": dict(zip(("mean", "error"), score.gain("own", over="plain"), strict=True)),
        }
        for score in scores
    ]


def print_verdict(said: dict[str, str | None]) -> None:
    """The report's sentences, and where the report is."""
    stdout.print(f"\n{said['verdict']}\n{said['rivals']}")
    stdout.print(f"  report     {said['report'] or 'not written'}")


def print_load_line(coefficients: Coefficients) -> None:
    """The Python that uses the fit."""
    stdout.print("\nUse it in place of jax.nn.softmax:")
    stdout.print(f"  fit = {load_line(coefficients)}")
    stdout.print("  probs = calibrate.adaptive_softmax(logits, fit)")
