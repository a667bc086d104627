"""Sections that every page on a fit has: how to use it, its rule, and its provenance."""

from collections.abc import Iterable

from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import LOG_SIZE
from calibrate.report.blocks import Block, Code, Facts, Heading, Text
from calibrate.report.fit_text import facts, load_line
from calibrate.report.rule_text import guards, outside, polynomial, span


def usage_section(fit: Coefficients) -> Iterable[Block]:
    """The Python that uses the fit."""
    layered = any(entry.layer is not None for entry in fit.entries)
    load = load_line(fit) + ".layer(i)" * layered
    yield Heading("Use it")
    yield Code(
        "In place of jax.nn.softmax:",
        f"import calibrate\n\nfit = {load}\nprobs = calibrate.adaptive_softmax(logits, fit)",
    )
    if layered or fit.has_heads:
        yield Text(
            f"Logits are (..., heads, queries, items){', of layer i' * layered}; a head that the "
            "fit does not name keeps beta = 1. For Transformers and Flax models see the README."
        )


def rule_section(fit: Coefficients) -> Iterable[Block]:
    """The rule of the only entry, or what the rules of several have in common."""
    by_size = fit.rule.kind == LOG_SIZE
    if len(fit.entries) == 1:
        rule = polynomial(fit.entries[0].coefficients)
    else:
        form = "kappa log n + b" if by_size else "a polynomial of degree 4 in H"
        rule = f"{form}, with coefficients of its own for each head"
    bounds = guards(fit.rule)
    yield Heading("The rule")
    yield Code(
        "With n the number of unmasked items, and the natural logarithm:" if by_size else
        "With H the Shannon entropy, in nats, of softmax(z) over the unmasked items:",
        f"beta({'n' if by_size else 'H'}) = {rule}",
    )  # fmt: skip
    yield Text(
        f"Fitted on {'sets of' if by_size else 'entropies from'} {domain_text(fit)}; "
        f"{outside(fit.rule)}. {bounds[0].upper()}{bounds[1:]}."
    )


def domain_text(fit: Coefficients) -> str:
    """The domain, or the range that the domains of several entries span."""
    lows, highs = zip(*(entry.domain for entry in fit.entries), strict=True)
    return span((min(lows), max(highs)), fit.rule.kind).replace("..", "to")


def provenance_section(fit: Coefficients, scored_on: str) -> Iterable[Block]:
    """What the file says of its making, and what the page was scored on."""
    yield Heading("Provenance")
    yield Facts([*facts(fit), ("scored on", scored_on)])
