"""The polynomial of a head as a result to show: its five numbers, and how well they describe it."""

from collections.abc import Iterable

from calibrate.evidence.baselines import chosen_kind
from calibrate.report.blocks import Block, Facts, Heading
from calibrate.report.rules import span
from calibrate.store.coefficients import Coefficients

POWERS = (" H^4", " H^3", " H^2", " H", "")
LABEL = "this head's polynomial"
# Of log beta: with less, a constant does as well on 19 of 21 data sets (scripts/results).
WEAK_R_SQUARED = 0.25


def selected_label(fit: Coefficients) -> str:
    """A fit by its kind and its objective: "constant (accuracy-tuned)"."""
    return f"{chosen_kind(fit)} ({_objective(fit)})"


def _objective(fit: Coefficients) -> str:
    """The loss that a fit minimises, by its file, or that its q was tuned for accuracy."""
    options = fit.source.get("options", {})
    if "loss" in options:
        return str(options["loss"])
    if options.get("q"):
        return f"q = {options['q']:g}"
    return "accuracy-tuned" if fit.quality.get("q") else "maximum likelihood"


def numbers(fit: Coefficients) -> str:
    """The five coefficients, highest power first, as one would paste them."""
    return ", ".join(f"{c:.4g}" for c in fit.only.coefficients)


def formula(fit: Coefficients) -> str:
    """The polynomial with its powers: "0.0754 H^4 - 0.583 H^3 + 1.46 H^2 - 0.884 H + 1.12"."""
    terms = [
        f"{'-' if c < 0 else '+'} {abs(c):.3g}{power}"
        for c, power in zip(fit.only.coefficients, POWERS, strict=True)
    ]
    return " ".join(terms).removeprefix("+ ")


def polynomial_blocks(fit: Coefficients) -> Iterable[Block]:
    """The polynomial, how much of the optimal temperature it explains, and where it is."""
    rows = fit.quality.get("rows", {})
    yield Heading(f"{LABEL[:1].upper()}{LABEL[1:]}: the paper's procedure, robust")
    yield Facts([("beta(H) = 1/theta", formula(fit))], detail=True)
    facts = [("coefficients", f"{numbers(fit)} (of H^4 to 1)")]
    if fit.r_squared is not None:
        facts.append(("R^2 of log beta", f"{fit.r_squared:.2f}{_meaning(fit.r_squared)}"))
    fitted = span(fit.only.domain, fit.rule)
    if "used" in rows:
        bound = f", {rows['at_bound']:,} at a bound" if rows.get("at_bound") else ""
        fitted = f"{rows['used']:,} misranked inputs{bound}; domain H = {fitted}"
    facts.append(("fitted to", fitted))
    if fit.path or fit.address:  # published
        facts.append(("file", fit.place))
    yield Facts(facts)


def _meaning(r_squared: float) -> str:
    if r_squared < 0:
        return ": the entropy tells nothing of the temperature that an input needs"
    if r_squared >= WEAK_R_SQUARED:
        return ": the entropy tells which temperature an input needs"
    return ": the entropy tells little of the temperature that an input needs"
