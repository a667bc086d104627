"""Fits of many heads: the table, the record, and the figure of what each of them gains."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from calibrate.fitting.per_head import HeadFit, ManyFits
from calibrate.maths.rule import LOG_SIZE
from calibrate.report.console import print_whole, stdout
from calibrate.report.fit_views import load_line
from calibrate.report.plot_style import draw, plot_head_map, save_figure
from calibrate.report.rule_text import polynomial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 20  # heads in the table


def print_heads(fits: ManyFits, figure: Path | None) -> None:
    """The heads that gain, the largest gain first, and where the file is."""
    coefficients, calibrated = fits.coefficients, fits.calibrated
    by_size = coefficients.rule.kind == LOG_SIZE
    stdout.print(f"\nFit {coefficients.reference}", style="bold")
    stdout.print(f"  heads      {len(calibrated)} of {len(fits.heads)} have a rule")
    stdout.print(f"  file       {coefficients.path}")
    stdout.print(f"  figure     {figure or 'not drawn'}")
    title = f"\nGain in {fits.unit}, held out (five folds)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for heading in ("layer", "head", "rows", "misranked", "gain", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("beta(n)" if by_size else "beta(H)")
    for head in calibrated[:SHOWN]:
        assert head.rule
        mean, low, high = head.rule.gain
        table.add_row(
            _index(head.layer), _index(head.head), f"{head.rows:,}", f"{head.misranked:.1%}",
            f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", polynomial(head.rule.entry.coefficients),
        )  # fmt: skip
    print_whole(table)
    if len(calibrated) > SHOWN:
        stdout.print(f"  and {len(calibrated) - SHOWN} more (--json lists them all)")
    stdout.print(f"  verdict    {coefficients.quality['verdict']}")
    layered = any(entry.layer is not None for entry in coefficients.entries)
    where = "(..., heads, queries, items)" + " of layer i" * layered
    stdout.print(f"\nUse it, in JAX or PyTorch, on logits {where}:")
    stdout.print(f"  fit = {load_line(coefficients)}{'.layer(i)' if layered else ''}")
    stdout.print("  probs = calibrate.adaptive_softmax(logits, fit)")


def _index(number: int | None) -> str:
    return "all" if number is None else str(number)


def heads_record(fits: ManyFits, figure: Path | None) -> dict[str, Any]:
    """What `print_heads` says, of every head, for a machine."""
    coefficients = fits.coefficients
    return {
        "reference": coefficients.reference,
        "path": str(coefficients.path),
        "figure": figure and str(figure),
        "heads": [_head_record(head) for head in fits.heads],
        "quality": dict(coefficients.quality),
    }


def _head_record(head: HeadFit) -> dict[str, Any]:
    rule = head.rule
    return {
        "layer": head.layer, "head": head.head, "rows": head.rows, "misranked": head.misranked,
        "kind": rule and rule.kind, "gain": rule and rule.gain._asdict(), "why": head.why,
    }  # fmt: skip


def save_gains_figure(path: Path, fits: ManyFits) -> None:
    """What each head gains, as PNG."""
    save_figure(path, draw(plot_gains, fits))


def plot_gains(ax: "Axes", fits: ManyFits) -> "Axes":
    """A map of layers and heads: the gain of those with a rule, x where there is none."""
    gains = {(head.layer, head.head): head.gain if head.rule else None for head in fits.heads}
    n = len(fits.calibrated)
    ax.set_title(f"{n} of {len(fits.heads)} heads gain by a rule\n(x: left as they are)")
    label = f"gain in {fits.unit}, held out"
    return plot_head_map(ax, gains, "all", label, cmap="viridis_r", vmin=0)
