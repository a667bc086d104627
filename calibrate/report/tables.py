"""Results in words: tables for people on stdout, and the same as records for --json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from calibrate.evaluation.score_head import Score
from calibrate.files.coefficients import Coefficients
from calibrate.files.collection import BAD, Collection
from calibrate.fitting.fit_collection import Fit
from calibrate.fitting.model_selection import Choice, in_words
from calibrate.maths.rule import LOG_SIZE
from calibrate.report.console import print_whole, stdout
from calibrate.report.fit_views import left_out, load_line
from calibrate.report.rule_text import polynomial, span

WORTH_COLLECTING = 0.001  # nats, by twice the rows


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
    print_whole(table)
    total = sum(shard["bytes"] for shard in collection.manifest["shards"])
    stdout.print(f"{len(collection.manifest['shards'])} shards, {total / 1e6:,.1f} MB")


def print_fit(fit: Fit, figure: Path | None) -> None:
    """The rule, what it was fitted to, how good it is on held-out rows, and where it is."""
    coefficients = fit.coefficients
    quality = coefficients.quality
    rows = quality["rows"]
    stdout.print(f"\nFit {coefficients.reference}", style="bold")
    entry, by_size = coefficients.only, coefficients.rule.kind == LOG_SIZE
    _line("beta(n)" if by_size else "beta(H)", polynomial(entry.coefficients))
    _line("fitted on" if by_size else "domain", span(entry.domain, coefficients.rule.kind))
    if residuals := quality.get("residuals"):
        _line(
            "residuals",
            f"beta {residuals['beta_rms']:.3f} (R^2 {residuals['beta_r_squared']:.3f}), "
            f"theta {residuals['theta_rms']:.3f}, root mean square",
        )
    others = ", ".join(f"{count:,} {reason}" for count, reason in left_out(rows))
    used = rows.get("used", rows["interior"])
    _line("rows", f"{used:,} used of {rows['rows']:,}; left out: {others or 'none'}")
    _line("file", str(coefficients.path))
    _line("figure", str(figure or "not drawn"))
    if fit.choice is not None:
        _print_choice(fit.choice)
        _line("more rows", would_more_help(quality))


def _line(label: str, text: str) -> None:
    stdout.print(f"  {label:<10} {text}")


def _print_choice(choice: Choice) -> None:
    """Before and after, on rows that a fit has not seen, and what the other kinds of rule gain."""
    title = "\nLog-probability of the target in nats, held out (five folds)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for heading in ("n", "rows", "plain softmax", "this fit", "gain ± standard error"):
        table.add_column(heading, justify="right")
    for size in choice.held_out:
        gain = size.after - size.before
        table.add_row(
            f"{size.size:,}", f"{size.rows:,}", f"{size.before:.3f}", f"{size.after:.3f}",
            f"{gain:+.4f} ± {size.error:.4f}",
        )  # fmt: skip
    print_whole(table)
    for candidate in choice.candidates:
        mean, low, high = candidate.gain
        chosen = "  <- taken" if candidate is choice.chosen else ""
        label = in_words(candidate.kind)
        stdout.print(
            f"  {label:<16} gains {mean:+.4f} {choice.unit} ({low:+.4f} to {high:+.4f}){chosen}"
        )
    for kind, reason in choice.left_out.items():
        stdout.print(f"  {in_words(kind):<16} left out: {reason}")
    _line("verdict", choice.verdict)


def would_more_help(quality: Mapping[str, Any]) -> str:
    """What the learning curve says, in words."""
    curve = quality["learning_curve"]
    if len(curve) < 2:
        return "too few to tell"
    half, most = curve[-2], curve[-1]
    gain = most["log_p"] - half["log_p"]
    advice = "more would help" if gain > WORTH_COLLECTING else "more would hardly help"
    if gain < -WORTH_COLLECTING:
        advice = "noise, of too few to tell"
    return f"from {half['rows']:,} to {most['rows']:,} changes log p by {gain:+.4f} nats: {advice}"


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
    print_whole(table)


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


def print_verdict(said: Mapping[str, str | None]) -> None:
    """The report's sentences, and where the report is."""
    stdout.print()
    for sentence in filter(None, map(said.get, ("verdict", "rivals"))):
        stdout.print(sentence)
    stdout.print(f"  report     {said['report'] or 'not written'}")


def print_load_line(coefficients: Coefficients) -> None:
    """The Python that uses the fit."""
    stdout.print("\nUse it in place of jax.nn.softmax:")
    stdout.print(f"  fit = {load_line(coefficients)}")
    stdout.print("  probs = calibrate.adaptive_softmax(logits, fit)")
