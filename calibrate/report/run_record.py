"""The result of `calibrate run` on rows: rules side by side, the polynomial, the verdict."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibrate.datasets.row_quality import share_misranked
from calibrate.datasets.rows import RowCollection
from calibrate.evidence.estimate import NOTHING, decimal
from calibrate.evidence.scores import CONFIDENCE, LOG_P, PLAIN, Evidence
from calibrate.evidence.verdict import judged_items, main_measure
from calibrate.evidence.verdict_text import HARD
from calibrate.report.blocks import Block, Facts, Result, Table, Text, as_detail
from calibrate.report.fit_record import FitRecord, usage
from calibrate.report.polynomial_record import LABEL, polynomial_blocks, selected_label
from calibrate.report.scores_record import SHOWN, TITLES, ScoresRecord
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

PROCEDURE = "procedure"  # the rule of the evidence that is the polynomial of the same rows


@dataclass(frozen=True, eq=False)
class SolvedHead:
    """The solved inputs of a head, and the polynomial that was fitted to them.

    Attributes:
      collection: of the inputs.
      rows: the same, solved.
      polynomial: as it was published; None where misranked inputs are too few.
      why_none: what lacks, if so.
    """

    collection: RowCollection
    rows: Rows
    polynomial: Coefficients | None
    why_none: str = ""

    @property
    def misranked(self) -> dict[int, float]:
        """Share of the inputs that are misranked, by size."""
        return {of["size"]: share_misranked(of) for of in self.collection.manifest["sizes"]}

    @property
    def no_polynomial(self) -> str:
        """The sentence that stands in place of a polynomial."""
        return f"No polynomial: {self.why_none}."


def rows_result(fit: FitRecord, scores: ScoresRecord, solved: SolvedHead, report: Result) -> Result:
    """Rules on what none of them was fitted to, the polynomial, the verdict, and how to use it."""
    shown: list[Block] = [
        *as_detail(fit.evidence()),
        Facts([("scored", scores.scored_items())], detail=True),
        rules_table(scores, fit.coefficients, solved.misranked),
        *as_detail(scores.tables()),
    ]
    if solved.polynomial is None:
        shown.append(Text(f"\n{solved.no_polynomial}"))
    else:
        shown += polynomial_blocks(solved.polynomial)
    shown += [*report.shown, usage(fit.coefficients)]
    found = fit.as_json() | report.found | {"scores": scores.as_json()}
    polynomial = solved.polynomial and FitRecord(solved.polynomial).as_json()
    return Result(shown, found | {"polynomial": polynomial})


def rules_table(scores: ScoresRecord, fit: Coefficients, misranked: Mapping[int, float]) -> Table:
    """The baseline, the published polynomial, this head's, the selected rule and argmax, by n."""
    items, measure = judged_items(scores.evidence), main_measure(scores.evidence)
    own = scores.fits[0]
    names = {
        PLAIN: "baseline",
        "paper": "published polynomial",
        PROCEDURE: LABEL,
        own: f"selected: {selected_label(fit)}",
        HARD: "argmax",
    }
    rules = [rule for rule in names if rule in items.rules]
    rows = [
        (items.span(n), _share(misranked, n, items.of.items), *_means(part, rules, measure))
        for n, part in items.by("size").items()
    ]
    n_sizes = len(rows)
    if n_sizes > 1:
        rows.append(("all", "", *_means(items, rules, measure)))
    if measure != LOG_P:
        rows.append(("NLL, nats", "", *_means(items, rules, LOG_P)))
    if CONFIDENCE in items.values:
        errors = (100 * items.reliability(rule).error for rule in rules)
        rows.append(("ECE, %", "", *(f"{error:.1f}" for error in errors)))
    headings = ["\n".join(textwrap.wrap(names[rule], width=18)) for rule in rules]
    note = (
        f"Held out: {items.n:,} {items.of.items}. Misranked: share of the collected inputs in "
        "which another item has a higher logit than the target."
    )
    note += f" Selected with q = {fit.quality['q']:.2g}." if fit.quality.get("q") else ""
    title = TITLES.get((measure, items.of.items), measure)
    marked = range(n_sizes, len(rows))
    return Table(["n", "misranked", *headings], rows, title, note, marked=marked)


def _share(misranked: Mapping[int, float], n: int, items: str) -> str:
    """The share of one size in per cent; of rows, that of the bin that the size is in."""
    share = misranked.get(n)
    if items == "rows":
        octaves = {math.ceil(math.log2(size)): share for size, share in misranked.items()}
        share = octaves.get(math.ceil(math.log2(n)))
    return "" if share is None else f"{share:.1%}"


def _means(items: Evidence, rules: Sequence[str], measure: str) -> list[str]:
    factor, digits, *_ = SHOWN[measure]
    means = [
        decimal(factor * float(items.mean(rule, measure).mean), f".{digits}f") for rule in rules
    ]
    pairs = zip(rules, means, strict=True)
    return [NOTHING if (rule, measure) == (HARD, LOG_P) else mean for rule, mean in pairs]
